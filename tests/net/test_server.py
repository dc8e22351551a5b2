"""The server of the control plane over real sockets: what it serves, disconnects and evicts."""

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.fixtures.certificates import write_certificate

from shoal.errors import ConfigError, UnavailableError
from shoal.net import server as server_module
from shoal.net.client import HttpClient, HttpClientError, parse_endpoint
from shoal.net.limits import HttpLimits
from shoal.net.server import HEAD_BYTES, VERIFIED, HttpServer, Receive, Scope, Send
from shoal.net.sockets import load_server_tls

WAIT_S = 20.0
QUICK = {"header_seconds": 0.3, "idle_seconds": 0.3, "window_seconds": 0.3, "grace_seconds": 1.0}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Returns the body, or what the path asks for."""
    if scope["path"] == "/refuse":
        await answer(send, 403, b"no")
        return
    if scope["path"] == "/bug":
        raise RuntimeError("a bug")
    if scope["path"] == "/half":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("a bug in the middle")
    if scope["path"] == "/wait":
        scope[VERIFIED]()
        await asyncio.sleep(0.5)
    if scope["path"] == "/strange":
        await asyncio.sleep(0.5)
    if scope["path"] == "/large":
        await answer(send, 200, bytes(1 << 26))
        return
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            break
    client = scope["client"][0].encode()
    await answer(send, 200, b"%s %s %s %s" % (scope["method"].encode(), scope["raw_path"], client, body))


async def answer(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(app: Any = echo, tls: ssl.SSLContext | None = None, **limits: Any) -> AsyncIterator[HttpServer]:
    server = HttpServer(app, limits=HttpLimits(**limits), tls=tls)
    await server.start()
    try:
        async with asyncio.timeout(WAIT_S):
            yield server
    finally:
        await server.close()


async def ask(server: HttpServer, data: bytes, **options: Any) -> bytes:
    """Everything the server sends in response to these bytes until it closes."""
    reader, writer = await asyncio.open_connection(*server.address, **options)
    writer.write(data)
    got = b""
    with suppress(ConnectionResetError):
        got = await reader.read(-1)
    writer.close()
    return got


def request(target: str, *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: test", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


CLOSE = "Connection: close"


def test_a_request_and_its_body_reach_the_app() -> None:
    async def check() -> None:
        async with serving() as server:
            got = await ask(server, request("/a?b=1", CLOSE, method="POST", body=b"hello"))
            assert got.startswith(b"HTTP/1.1 200 OK\r\n")
            assert got.endswith(b"\r\n\r\nPOST /a 127.0.0.1 hello")

    asyncio.run(check())


def test_every_answer_says_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with serving() as server:
            for now_s, text in ((1_000_000_000, b"Sun, 09 Sep 2001 01:46:40 GMT"), (1_000_000_001, b"01:46:41 GMT")):
                monkeypatch.setattr(server_module.time, "time", lambda now_s=now_s: float(now_s))
                assert text in await ask(server, request("/", CLOSE))

    asyncio.run(check())


def test_many_requests_go_over_one_connection_also_in_one_write() -> None:
    async def check() -> None:
        async with serving() as server:
            got = await ask(server, request("/a", method="POST", body=b"x") * 3 + request("/b", CLOSE))
            assert got.count(b"200 OK") == 4
            assert got.endswith(b"GET /b 127.0.0.1 ")
            assert server.metrics.accepted.total == 1

    asyncio.run(check())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (b"GET http://other/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * HEAD_BYTES + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 3 * HEAD_BYTES, 431),
    ],
)
def test_an_invalid_request_is_refused_and_the_connection_closed(data: bytes, status: int) -> None:
    async def check() -> None:
        async with serving() as server:
            assert (await ask(server, data)).startswith(b"HTTP/1.1 %d " % status)
            assert (await ask(server, request("/", CLOSE))).startswith(b"HTTP/1.1 200 ")

    asyncio.run(check())


def test_a_head_that_drips_is_cut_however_often_a_byte_comes() -> None:
    async def check() -> None:
        async with serving(**QUICK) as server:
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(b"GET / HTTP/1.1\r\nX: ")
            with suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"G")
                    await writer.drain()  # reports a reset; the reader would wait forever
                    await asyncio.sleep(0.05)
            assert server.metrics.cut.values == {"late": 1}

    asyncio.run(check())


def test_a_silent_connection_is_cut_before_and_after_a_request() -> None:
    async def check() -> None:
        async with serving(**QUICK) as server:
            assert await ask(server, b"") == b""
            assert (await ask(server, request("/"))).endswith(b"GET / 127.0.0.1 ")
            assert server.metrics.cut.values == {"late": 2}

    asyncio.run(check())


def test_a_body_slower_than_the_least_rate_is_cut_with_408() -> None:
    async def check() -> None:
        async with serving(**QUICK, min_rate=10_000) as server:
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n")
            with suppress(ConnectionError):
                while not reader.at_eof() and server.metrics.cut.total == 0:
                    writer.write(b"x" * 10)
                    await asyncio.sleep(0.02)
            assert (await reader.read(-1)).startswith(b"HTTP/1.1 408 ")
            assert server.metrics.cut.values == {"slow": 1}

    asyncio.run(check())


def test_a_body_at_the_least_rate_goes_through_however_long_it_takes() -> None:
    async def check() -> None:
        async with serving(**QUICK, min_rate=1000) as server:
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 20000\r\n\r\n")
            for _ in range(20):  # a second in all, three windows
                writer.write(b"x" * 1000)
                await asyncio.sleep(0.05)
            assert (await reader.read(-1)).count(b"x") == 20000

    asyncio.run(check())


def test_a_client_that_does_not_read_its_response_is_disconnected() -> None:
    async def check() -> None:
        async with serving(**QUICK, min_rate=1 << 20) as server:
            _, writer = await asyncio.open_connection(*server.address, limit=1024)
            writer.transport.pause_reading()
            writer.write(request("/large"))
            while server.metrics.cut.total == 0:
                await asyncio.sleep(0.05)
            assert server.metrics.cut.values == {"slow": 1}
            writer.transport.abort()

    asyncio.run(check())


def test_a_body_that_ends_early_never_looks_whole() -> None:
    async def check() -> None:
        async with serving() as server:
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nhalf")
            writer.write_eof()
            assert (await reader.read(-1)).startswith(b"HTTP/1.1 400 ")
            assert server.metrics.cut.values == {"http": 1}

    asyncio.run(check())


def test_bytes_after_a_body_are_another_request() -> None:
    async def check() -> None:
        async with serving() as server:
            data = request("/", method="POST", body=b"four") + b"more\r\n\r\n"
            got = await ask(server, data)
            assert got.count(b"200 OK") == 1 and got.count(b"400 Bad Request") == 1

    asyncio.run(check())


def test_a_large_body_that_the_app_refuses_is_not_awaited() -> None:
    async def check() -> None:
        async with serving() as server:
            got = await ask(server, b"PUT /refuse HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n")
            assert got.startswith(b"HTTP/1.1 403 ") and b"connection: close" in got.lower()

    asyncio.run(check())


def test_a_short_body_that_the_app_refuses_leaves_the_connection_open() -> None:
    async def check() -> None:
        async with serving() as server:
            data = request("/refuse", method="POST", body=b"x" * 1000) + request("/b", CLOSE)
            got = await ask(server, data)
            assert got.count(b"403 Forbidden") == 1 and got.endswith(b"GET /b 127.0.0.1 ")

    asyncio.run(check())


def test_a_client_gets_100_continue_when_the_app_reads_and_not_before() -> None:
    async def check() -> None:
        async with serving() as server:
            reader, writer = await asyncio.open_connection(*server.address)
            head = "Expect: 100-continue\r\nConnection: close\r\nContent-Length: 3"
            writer.write(request("/", head, method="PUT"))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"abc")
            assert (await reader.read(-1)).endswith(b"PUT / 127.0.0.1 abc")
            got = await ask(server, request("/refuse", head, method="PUT"))
            assert got.startswith(b"HTTP/1.1 403 ")

    asyncio.run(check())


def test_a_bug_of_the_app_ends_its_connection_and_is_reported_to_the_loop() -> None:
    async def check() -> None:
        reported: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
        async with serving() as server:
            assert await ask(server, request("/bug")) == b""
            assert (await ask(server, request("/half"))).endswith(b"\r\n\r\nhalf")
            assert (await ask(server, request("/", CLOSE))).startswith(b"HTTP/1.1 200 ")
            assert server.metrics.cut.values == {"bug": 2}
        assert [str(error) for error in reported] == ["a bug", "a bug in the middle"]

    asyncio.run(check())


def test_a_new_connection_takes_the_place_of_an_idle_one() -> None:
    async def check() -> None:
        async with serving(max_connections=4) as server:
            idle = [await asyncio.open_connection(*server.address) for _ in range(4)]
            await wait_until(lambda: len(server.connections) == 4)
            assert (await ask(server, request("/", CLOSE))).startswith(b"HTTP/1.1 200 ")
            assert await idle[0][0].read(1) == b""  # the oldest was evicted
            assert server.metrics.evicted.total == 1
            for _, writer in idle:
                writer.close()

    asyncio.run(check())


def test_a_connection_that_is_being_served_is_never_evicted() -> None:
    async def check() -> None:
        async with serving(max_connections=1) as server:
            busy = asyncio.create_task(ask(server, request("/wait", CLOSE)))
            await asyncio.sleep(0.1)
            assert (await ask(server, request("/"))).startswith(b"HTTP/1.1 503 ")
            assert (await busy).startswith(b"HTTP/1.1 200 ")

    asyncio.run(check())


def test_one_address_has_its_own_limit_of_connections() -> None:
    async def check() -> None:
        async with serving(per_peer_connections=1, trust_loopback=False) as server:
            busy = asyncio.create_task(ask(server, request("/wait", CLOSE)))
            await asyncio.sleep(0.1)
            assert (await ask(server, request("/"))).startswith(b"HTTP/1.1 429 ")
            other = await ask(server, request("/", CLOSE), local_addr=("127.0.0.2", 0))
            assert other.endswith(b"GET / 127.0.0.2 ")
            assert (await busy).startswith(b"HTTP/1.1 200 ")

    asyncio.run(check())


@pytest.mark.parametrize("limits", [{"max_connections": 3}, {"per_peer_connections": 3}])
def test_requests_of_strangers_keep_no_verified_caller_out(limits: dict[str, int]) -> None:
    """Neighbours at one address hold all its connections by requests whose bodies they do not send."""

    async def check() -> None:
        async with serving(trust_loopback=False, **limits) as server:
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(request("/wait"))
            known = await reader.readexactly(len(b"HTTP/1.1 200 "))
            strangers = [asyncio.create_task(ask(server, request("/strange", CLOSE))) for _ in range(6)]
            await asyncio.sleep(0.1)
            assert (await ask(server, request("/wait", CLOSE))).startswith(known), "a new connection"
            writer.write(request("/wait", CLOSE))
            assert (await reader.read(-1)).count(b"HTTP/1.1 200 ") == 1, "and one that was idle meanwhile"
            answers = await asyncio.gather(*strangers, return_exceptions=True)
            assert sum(isinstance(answer, bytes) and answer.startswith(known) for answer in answers) < 3

    asyncio.run(check())


def test_behind_a_proxy_the_caller_is_the_address_that_the_proxy_saw() -> None:
    async def check() -> None:
        forged = request("/", "X-Forwarded-For: 1.1.1.1, 2.2.2.2", CLOSE)
        async with serving(behind_proxy=True) as server:
            assert (await ask(server, forged)).endswith(b"GET / 2.2.2.2 ")
        async with serving() as server:
            assert (await ask(server, forged)).endswith(b"GET / 127.0.0.1 ")

    asyncio.run(check())


def test_closing_lets_a_request_finish_and_drops_idle_connections() -> None:
    async def check() -> None:
        async with serving() as server:
            busy = asyncio.create_task(ask(server, request("/strange")))
            idle = asyncio.create_task(ask(server, b""))
            await asyncio.sleep(0.1)
            await server.close()
            assert b"200 OK" in await busy
            assert await idle == b""
            assert len(server.connections) == 0
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(*server.address)

    with suppress(OSError):  # the address of a closed listener
        asyncio.run(check())


def test_two_thousand_dribbling_sockets_do_not_keep_an_honest_caller_waiting() -> None:
    async def check() -> None:
        waits: list[float] = []
        async with serving(max_connections=512) as server:
            dribble = asyncio.create_task(dribble_sockets(server.address, 2000))
            reader, writer = await asyncio.open_connection(*server.address)
            for _ in range(100):
                began = time.monotonic()
                writer.write(request("/", method="POST", body=b"beat"))
                await reader.readuntil(b"beat")
                waits.append(time.monotonic() - began)
                await asyncio.sleep(0.01)
            num_open = await dribble
            assert server.metrics.accepted.total > 1500
            assert len(server.connections) <= 512
        assert num_open == 2000
        assert max(waits) < 5.0  # no wait is near the deadlines that the slow senders use up

    asyncio.run(check())


async def dribble_sockets(address: tuple[str, int], count: int) -> int:
    """Open sockets that slowly send bytes of a head for a while; those that the server closes are opened again."""
    socks: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    try:
        for number in range(count):
            sock = socket.socket()
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            socks.append(sock)
            for one in socks[number % 50 :: 50]:
                with suppress(OSError):
                    one.send(b"X")
        return len(socks)
    finally:
        for sock in socks:
            sock.close()


def test_a_flood_of_silent_bytes_is_held_within_bounds() -> None:
    """An app that never reads: the server does not buffer the peer's bytes."""

    async def stuck(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.3)
        await answer(send, 200, b"")

    async def check() -> None:
        async with serving(stuck) as server:
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(b"PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000000\r\n\r\n" + bytes(50_000_000))
            await asyncio.sleep(0.2)
            (served,) = server.state.connections
            assert served.received_bytes < 200_000
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
            writer.transport.abort()

    asyncio.run(check())


def test_tls_by_certificate_file_and_a_handshake_that_never_comes_is_cut(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)

    async def check() -> None:
        context = ssl.create_default_context(cafile=str(certificate))
        async with serving(tls=load_server_tls(certificate, key), **QUICK) as server:
            got = await ask(server, request("/", CLOSE, method="POST", body=b"x" * 100_000), ssl=context)
            assert got.count(b"x") == 100_000
            assert await ask(server, b"") == b""  # plain and silent
            assert b"HTTP" not in await ask(server, request("/"))  # plain and loud
            assert len(server.connections) == 0
            assert server.metrics.cut.total == 2

    asyncio.run(check())


def test_a_node_trusts_a_certificate_of_the_given_authority_and_no_other(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)

    async def check() -> None:
        async with serving(tls=load_server_tls(certificate, key)) as server:
            url = f"https://127.0.0.1:{server.address[1]}"
            link = HttpClient(parse_endpoint(url, certificate))
            for _ in range(3):
                answer = await link.ask("POST", "/a", [("Content-Length", "3")], b"abc", 1000)
                assert (answer.status, answer.body) == (200, b"POST /a 127.0.0.1 abc")
            assert server.metrics.accepted.total == 1
            link.close()
            with pytest.raises(HttpClientError, match="no connection"):
                await HttpClient(parse_endpoint(url)).ask("POST", "/a", [], b"", 1000)

    asyncio.run(check())


def test_files_that_are_not_certificates_are_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("nothing")
    with pytest.raises(ConfigError, match="cannot load TLS certificate and key"):
        load_server_tls(tmp_path / "a", tmp_path / "a")
    with pytest.raises(ConfigError, match="No such file"):
        load_server_tls(tmp_path / "b", tmp_path / "b")


def test_an_address_in_use_may_be_free_later() -> None:
    async def check() -> None:
        async with serving() as server:
            with pytest.raises(UnavailableError, match="cannot listen on this address"):
                await HttpServer(echo, registry=CollectorRegistry()).start(*server.address)

    asyncio.run(check())


async def wait_until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)
