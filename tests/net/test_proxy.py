"""Requests through a proxy: a tunnel for https, whole URLs for http, never for this machine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.certificates import write_certificate

from shoal.net import client as client_module
from shoal.net.client import HttpClient, HttpClientError, parse_endpoint
from shoal.net.http import parse_url
from shoal.net.server import HttpServer, Receive, Scope, Send
from shoal.net.sockets import find_proxy, load_server_tls

Run = Callable[[Callable[[], Any]], Any]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = scope["method"].encode() + b" " + scope["raw_path"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def open_proxy(seen: list[bytes], answer: bytes | None = None) -> AsyncIterator[str]:
    """A proxy that tunnels, or requests the path of a whole URL from the server."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head)
        if answer is not None:
            writer.write(answer)
            writer.close()
            return
        method, target, _ = head.split(b"\r\n")[0].split(b" ")
        authority = target if method == b"CONNECT" else target.split(b"/")[2]
        host, _, port = authority.decode().rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        if method == b"CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            far_writer.write(head.replace(b"http://" + authority, b""))
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://user:p%40ss@127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
    except ConnectionError:
        return
    finally:
        writer.close()


@pytest.mark.parametrize("is_secure", [False, True])
def test_a_request_goes_through_the_proxy(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, is_secure: bool
) -> None:
    certificate, secret = write_certificate(tmp_path)

    async def work() -> None:
        seen: list[bytes] = []
        server = HttpServer(echo, tls=load_server_tls(certificate, secret) if is_secure else None)
        await server.start()
        async with open_proxy(seen) as proxy:
            monkeypatch.setattr(client_module.sockets, "find_proxy", lambda url: proxy)  # which bypasses this machine
            url = f"{'https' if is_secure else 'http'}://127.0.0.1:{server.address[1]}"
            client = HttpClient(parse_endpoint(url, certificate if is_secure else None))
            for _ in range(2 if is_secure else 1):  # the proxy of this test rewrites one head
                response = await client.ask("GET", "/a/b", [], b"", 100)
                assert (response.status, response.body) == (200, b"GET /a/b")
            client.close()
        authority = url.partition("//")[2].encode()
        first = b"CONNECT " + authority if is_secure else b"GET http://" + authority + b"/a/b"
        assert len(seen) == 1 and seen[0].startswith(first + b" HTTP/1.1\r\n")
        assert b"roxy-Authorization: Basic dXNlcjpwQHNz\r\n" in seen[0]
        await server.close()

    run(work)


def test_a_proxy_that_refuses_a_tunnel_is_explained(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with open_proxy([], b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n") as proxy:
            monkeypatch.setattr(client_module.sockets, "find_proxy", lambda url: proxy)
            with pytest.raises(HttpClientError, match=r"the proxy refused the CONNECT request \(status 407\)"):
                await HttpClient(parse_endpoint("https://far.example")).ask("GET", "/", [], b"", 100)

    run(work)


def test_which_addresses_are_proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_proxy", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://plain:1")
    monkeypatch.setenv("HTTPS_PROXY", "http://secure:2")
    monkeypatch.setenv("NO_PROXY", "near.example, .inside")
    found = {
        url: find_proxy(parse_url(url))
        for url in (
            "http://a.example",
            "https://a.example",
            "https://near.example",
            "https://b.inside",
            "http://127.0.0.1:8600",
            "http://[::1]:8600",
            "https://localhost",
        )
    }
    assert list(found.values()) == ["http://plain:1", "http://secure:2", None, None, None, None, None]
