"""Non-blocking sockets, plain or TLS: connect (happy eyeballs, proxies), receive, send, send a file, HTTP on them.

Invariants:
- a TLS socket is an `ssl.SSLSocket` that never blocks; the event loop's own `sock_*` functions refuse those;
- functions that wait are called inside `asyncio.timeout`;
- one reader and one writer at a time.
"""

import asyncio
import base64
import ipaddress
import os
import select
import socket
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

import h11

from shoal.errors import ConfigError
from shoal.net.http import HttpError, Url, new_client, receive_data, receive_head, take_rest

HAPPY_EYEBALLS_S = 0.25
"""head start of each address of a host over the next"""
_RECV_BYTES = 1 << 16
_TLS_RECORD = 1 << 14
_TLS_BATCH = 1 << 18
"""bytes of a file to encrypt before the event loop runs other tasks"""
_PROXY_S = 60.0
"""timeout for the response of a proxy, within the timeout of the whole connection"""
_WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def load_client_tls(authority: Path | None = None) -> ssl.SSLContext:
    """TLS settings of a client; `authority` is a file of certificates to trust instead of the system's."""
    try:
        return ssl.create_default_context(cafile=None if authority is None else str(authority))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{authority}: cannot load certificates from this file ({error.strerror or error})") from None


def load_server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS settings of a server from two PEM files: the certificate chain and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or error
        raise ConfigError(f"{certificate}, {key}: cannot load TLS certificate and key ({reason})") from None
    return context


def find_proxy(url: Url) -> str | None:
    """The proxy for a URL from HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY; None for this machine."""
    proxies = urllib.request.getproxies_environment()
    is_bypassed = urllib.request.proxy_bypass_environment  # type: ignore[attr-defined]  # unknown to its stubs
    if is_loopback(url.host) or is_bypassed(url.host, proxies):
        return None
    return proxies.get(url.scheme) or proxies.get("all")


async def connect(
    url: Url, timeout_s: float, *, tls: ssl.SSLContext | None = None, proxy: str | None = None
) -> socket.socket:
    """A connected socket, through a proxy if one is given; with TLS if the URL is https."""
    async with asyncio.timeout(timeout_s):
        if proxy is None:
            sock = await _connect_host(url.host, url.port)
        else:
            sock = await _connect_proxy(proxy, url)
        return sock if url.scheme == "http" else await start_tls(sock, tls or load_client_tls(), hostname=url.host)


async def start_tls(sock: socket.socket, context: ssl.SSLContext, *, hostname: str | None = None) -> ssl.SSLSocket:
    """Encrypt a connection, as its client if `hostname` is given. The original socket must not be used afterwards."""
    wrapped = context.wrap_socket(
        sock, server_side=hostname is None, server_hostname=hostname, do_handshake_on_connect=False
    )
    try:
        while True:
            try:
                wrapped.do_handshake()
            except ssl.SSLWantReadError:
                await wait_readable(wrapped)
            except ssl.SSLWantWriteError:
                await wait_writable(wrapped)
            else:
                return wrapped
    except BaseException:
        wrapped.close()
        raise


async def receive(sock: socket.socket, size: int = _RECV_BYTES) -> bytes:
    """Return up to `size` bytes as soon as any have arrived; empty once the peer has closed."""
    while True:
        try:
            return sock.recv(size)
        except _WOULD_BLOCK as error:
            await (wait_writable(sock) if isinstance(error, ssl.SSLWantWriteError) else wait_readable(sock))


def try_receive_into(sock: socket.socket, view: memoryview) -> int | None:
    """Read what has already arrived into `view`; None if nothing has, 0 if the peer closed."""
    try:
        return sock.recv_into(view)
    except _WOULD_BLOCK:
        return None


def try_send(sock: socket.socket, data: memoryview) -> int:
    """Send what the socket accepts now; 0 if it is full. The rest must be passed again, unchanged."""
    try:
        return sock.send(data[:_TLS_RECORD] if isinstance(sock, ssl.SSLSocket) else data)
    except _WOULD_BLOCK:
        return 0


async def send_all(sock: socket.socket, data: bytes) -> None:
    """Send all bytes."""
    view = memoryview(data)
    while view:
        sent = try_send(sock, view)
        view = view[sent:]
        if not sent:
            await wait_writable(sock)


def try_send_file(sock: socket.socket, descriptor: int, offset: int, size: int) -> int | None:
    """Send part of a file, without a copy unless encrypted; None if the socket is full, 0 at the end of the file."""
    if not isinstance(sock, ssl.SSLSocket):
        try:
            return os.sendfile(sock.fileno(), descriptor, offset, size)
        except BlockingIOError:
            return None
    data = memoryview(os.pread(descriptor, min(size, _TLS_BATCH), offset))
    total = 0
    while total < len(data) and (sent := try_send(sock, data[total:])):
        total += sent
    return total if total or not data else None


async def wait_readable(sock: socket.socket) -> None:
    """Return when the socket has data or its peer has closed."""
    loop = asyncio.get_running_loop()
    await _wait_ready(sock, loop.add_reader, loop.remove_reader)


async def wait_writable(sock: socket.socket) -> None:
    """Return when the socket accepts data again."""
    loop = asyncio.get_running_loop()
    await _wait_ready(sock, loop.add_writer, loop.remove_writer)


def set_options(sock: socket.socket) -> None:
    """Set the options of every connection: non-blocking, and small writes are sent at once."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def is_idle(sock: socket.socket) -> bool:
    """Whether an idle connection can be reused: its peer has neither sent anything nor closed."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return not poller.poll(0)


@contextmanager
def watch_peer(sock: socket.socket) -> "Iterator[asyncio.Future[None]]":
    """While the block runs: a future that is done when the peer has closed its side.

    Nothing else reads from a connection whose request is being answered. A peer that closes its side counts as gone:
    our clients close both sides or neither. A peer that has already sent its next request is not watched, because its
    end of stream comes after that request.
    """
    loop = asyncio.get_running_loop()
    left: asyncio.Future[None] = loop.create_future()

    def look() -> None:
        try:
            data = socket.socket.recv(sock, 1, socket.MSG_PEEK)  # below TLS, whose own recv cannot peek
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        loop.remove_reader(sock)
        if not data and not left.done():
            left.set_result(None)

    loop.add_reader(sock, look)
    try:
        yield left
    finally:
        loop.remove_reader(sock)
        left.cancel()


def is_loopback(host: str) -> bool:
    """Whether a host, as in a URL or a setting, is this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def phrase_error(error: Exception) -> str:
    """A short description of a connection error; the event loop's own messages repeat the address."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "if it is self-signed, pass the certificate with --ca"
        return f"its certificate is not trusted: {error.verify_message}; {hint}"
    if isinstance(error, ssl.SSLError):
        return f"TLS error {error.reason or error}; if the server does not use TLS, write http:// instead of https://"
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def build_request(
    url: Url, target: str, *headers: tuple[str, str], proxy: str | None = None, method: str = "GET"
) -> h11.Request:
    """Build the head of a request. A proxy gets the whole URL, unless it only tunnels TLS."""
    if proxy is not None and url.scheme == "http":
        target, headers = f"{url}{target}", (*headers, *format_proxy_headers(proxy))
    return h11.Request(method=method, target=target, headers=[("Host", url.authority), *headers])


async def send_event(sock: socket.socket, conn: h11.Connection, *events: h11.Event) -> None:
    """Send heads, data and ends as framed by h11, in one write."""
    await send_all(sock, b"".join(conn.send(event) or b"" for event in events))


async def read_head(
    sock: socket.socket, conn: h11.Connection, *, first_s: float, rest_s: float
) -> h11.Request | h11.Response | None:
    """Like `receive_head`, but from a socket and skipping `100 Continue`."""
    head = await receive_head(partial(receive, sock), conn, first_s=first_s, rest_s=rest_s)
    if isinstance(head, h11.InformationalResponse):
        raise HttpError("unexpected kind of message")
    return head


async def read_data(sock: socket.socket, conn: h11.Connection) -> bytes:
    """Like `receive_data`, but from a socket."""
    return await receive_data(partial(receive, sock), conn)


async def _connect_host(host: str, port: int) -> socket.socket:
    """Connect to the first address of a host that responds; IPv4 and IPv6 alternate (RFC 8305)."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, host, port, happy_eyeballs_delay=HAPPY_EYEBALLS_S)
    # Keep only the socket of the loop's transport. This loses nothing: an HTTP server sends nothing before a request.
    sock: socket.socket = transport.get_extra_info("socket").dup()
    transport.abort()
    set_options(sock)
    return sock


async def _connect_proxy(proxy: str, url: Url) -> socket.socket:
    """Connect to a proxy, and through it to the host if the URL is https."""
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if parts.scheme != "http" or not parts.hostname:
        raise HttpError(f"unsupported proxy {parts.scheme}://{parts.hostname}: only http:// proxies are supported")
    sock = await _connect_host(parts.hostname, parts.port or 80)
    if url.scheme == "http":
        return sock  # requests name the full URL http://HOST/PATH
    try:
        await _open_tunnel(sock, f"{url.bracketed}:{url.port}", format_proxy_headers(proxy))
    except BaseException:
        sock.close()
        raise
    return sock


def format_proxy_headers(proxy: str) -> list[tuple[str, str]]:
    """Headers sent only to a proxy: the user name and password from its URL."""
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if parts.username is None:
        return []
    secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return [("Proxy-Authorization", f"Basic {base64.b64encode(secret).decode('ascii')}")]


async def _open_tunnel(sock: socket.socket, authority: str, headers: list[tuple[str, str]]) -> None:
    conn = new_client()
    request = h11.Request(method="CONNECT", target=authority, headers=[("Host", authority), *headers])
    await send_event(sock, conn, request)
    head = await read_head(sock, conn, first_s=_PROXY_S, rest_s=_PROXY_S)
    if not isinstance(head, h11.Response) or take_rest(conn):  # a TLS server sends nothing before its client
        raise HttpError("the proxy closed the connection or sent invalid HTTP")
    if head.status_code != 200:
        raise HttpError(f"the proxy refused the CONNECT request (status {head.status_code})")


async def _wait_ready(sock: socket.socket, add: Callable[..., object], remove: Callable[..., object]) -> None:
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    add(sock, _wake, waiter)
    try:
        await waiter
    finally:
        remove(sock)


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
