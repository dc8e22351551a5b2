"""HTTP/1.1 on raw non-blocking sockets, for both ends: heads go through h11, large bodies go past it.

`receive_head` and `receive_data` do the same for whoever has something else than a socket (TLS, a transport).

Invariants:
- every wait has a deadline: functions take seconds or must be called inside `asyncio.timeout`, and what is late
  raises `TimeoutError`;
- a head is bounded by `HEAD_BYTES`, whatever the peer sends; nothing it says is allocated before it was checked;
- the loop has a turn before every piece of a body, and a piece cut into tiny chunks is refused: one peer that always
  has more to say keeps nobody else waiting;
- what is no HTTP we accept raises `HttpError`, with the status a server answers to it; a connection on which that
  happened is closed, never used again. Errors of the socket itself stay `OSError`.

Life cycle of a server's connection: read_head -> send_event(head) -> body -> send_event(end) -> start_next_cycle ...
A client takes a new h11 connection for each request on a socket: connect -> send_event(request) -> read_head ->
parse_reply -> take_rest + receive_into, or read_data.
"""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import h11

from shoal.errors import ConfigError

HEAD_BYTES = 8192
"""longest head of a request or answer"""
MAX_CHUNKS = 256
"""chunks in what came at once; each costs as much as a large one"""
SMALL_CHUNK = 256
"""more chunks are allowed where they are this long on average: no line of ours is shorter"""
_RECV_BYTES = 1 << 16
_MAX_ADDRESSES = 4
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_URL = re.compile(r"(?P<scheme>[a-z]+)://(?P<host>[^/?#@\[\]:]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?/?")
_COUNT = re.compile(r"0|[1-9][0-9]{0,18}")
_NEXT_CHUNK = re.compile(rb"\r\n0*[1-9a-fA-F]")
"""the end of a chunk with another behind it that is not the last"""

Receive = Callable[[], Awaitable[bytes]]
"""The next bytes of the peer as they come; empty once it has closed."""


class HttpError(Exception):
    """The other side closed in the middle or sent what is no HTTP we accept; `status` is a server's answer to it."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Url:
    """Where a server is; it has no path, since ours are fixed."""

    host: str
    port: int

    @property
    def authority(self) -> str:
        """Host and port as in a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == 80 else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"http://{self.authority}"


@dataclass(frozen=True)
class Reply:
    """The head of an answer, as far as we read it."""

    status: int
    length: int | None
    """bytes of the body; None if it comes in chunks"""
    retry_after_s: int | None
    """what the server asks us to wait before the next try"""
    content_range: str | None
    keep_alive: bool
    """whether the connection can be used again once the body is read"""


def parse_url(text: str) -> Url:
    """A server's address as the user writes it; `ConfigError` says what is allowed."""
    match = _URL.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r}: no address of a server, expected http://HOST:PORT")
    if match["scheme"] == "https":
        raise ConfigError(f"{text}: https is not spoken here, contents are signed; write http:// or go through a proxy")
    host, port = match["host"], int(match["port"] or 80)
    if match["scheme"] != "http" or not 0 < port < 1 << 16 or not _is_host(host):
        raise ConfigError(f"{text!r}: no address of a server, expected http://HOST:PORT")
    return Url(host.strip("[]").lower(), port)


def parse_count(text: str) -> int | None:
    """A decimal number below 10^19 in its only spelling, or None: no sign, no space, no leading zero."""
    return int(text) if _COUNT.fullmatch(text) else None


async def connect(url: Url, timeout_s: float) -> socket.socket:
    """A connected non-blocking socket; all addresses of the host are tried, each for its share of the time."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        found = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        found = found[:_MAX_ADDRESSES]
        failure: OSError = OSError(f"{url.host} has no address")
        for family, kind, protocol, _, address in found:
            try:
                async with asyncio.timeout(timeout_s / len(found)):
                    return await _connect_socket(socket.socket(family, kind, protocol), address)
            except OSError as error:  # TimeoutError is one
                failure = error
    raise failure


def new_client() -> h11.Connection:
    """The state of one request and its answer."""
    return h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)


def new_server(head_bytes: int = HEAD_BYTES) -> h11.Connection:
    """The state of one accepted connection."""
    return h11.Connection(h11.SERVER, max_incomplete_event_size=head_bytes)


def build_request(url: Url, target: str, *headers: tuple[str, str]) -> h11.Request:
    """A GET without body."""
    return h11.Request(method="GET", target=target, headers=[("Host", url.authority), *headers])


async def send_event(sock: socket.socket, conn: h11.Connection, *events: h11.Event) -> None:
    """Send heads, data and ends as h11 frames them, in one write."""
    data = b"".join(conn.send(event) or b"" for event in events)
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def read_head(
    sock: socket.socket, conn: h11.Connection, *, first_s: float, rest_s: float
) -> h11.Request | h11.Response | None:
    """The next request or answer; None if the peer closed before its first byte.

    The first byte may take `first_s`, and from then on the rest of the head `rest_s`, however it drips.
    """
    head = await receive_head(_receive_from(sock), conn, first_s=first_s, rest_s=rest_s)
    if isinstance(head, h11.InformationalResponse):
        raise HttpError("unexpected kind of message")
    return head


async def receive_head(
    receive: Receive, conn: h11.Connection, *, first_s: float, rest_s: float, head_bytes: int = HEAD_BYTES
) -> h11.Request | h11.Response | h11.InformationalResponse | None:
    """As `read_head`, from anywhere, `100 Continue` included; for a connection made with the same `head_bytes`."""
    seen = len(conn.trailing_data[0])
    if not seen:
        async with asyncio.timeout(first_s):
            seen += await _feed(receive, conn)
    event = _next_event(conn)
    if event is h11.NEED_DATA:  # most heads come in one piece, and need no second timer
        async with asyncio.timeout(rest_s):
            while event is h11.NEED_DATA:
                seen += await _feed(receive, conn)
                event = _next_event(conn)
    if isinstance(event, h11.ConnectionClosed):
        return None
    if seen - len(conn.trailing_data[0]) > head_bytes:
        raise HttpError("head too long", 431)
    if not isinstance(event, h11.Request | h11.Response | h11.InformationalResponse):
        raise HttpError("unexpected kind of message")
    return event


def parse_reply(response: h11.Response) -> Reply:
    """What an answer says of its body. Only an honest length or chunks will do: no "until I close", no encodings."""
    fields = {name: value.decode("ascii", "replace") for name, value in response.headers}
    chunked = fields.get(b"transfer-encoding", "").lower() == "chunked"
    length = parse_count(fields.get(b"content-length", ""))
    if (b"transfer-encoding" in fields) == (b"content-length" in fields) or not (chunked or length is not None):
        raise HttpError("neither a length nor chunks")
    if fields.get(b"content-encoding", "identity").lower() != "identity":
        raise HttpError("an encoding nobody asked for")
    return Reply(
        status=response.status_code,
        length=length,
        retry_after_s=parse_count(fields.get(b"retry-after", "")),
        content_range=fields.get(b"content-range"),
        keep_alive=response.http_version == b"1.1" and fields.get(b"connection", "").lower() != "close",
    )


def take_rest(conn: h11.Connection) -> bytes:
    """What was received beyond the head: the first bytes of the body, for those who read the rest past h11."""
    return conn.trailing_data[0]


async def receive_into(sock: socket.socket, view: memoryview) -> int:
    """Up to len(view) bytes of a body, straight into the caller's buffer; `HttpError` if the peer closed."""
    received = await asyncio.get_running_loop().sock_recv_into(sock, view)
    if not received:
        raise HttpError("closed in the middle of a body")
    return received


async def read_data(sock: socket.socket, conn: h11.Connection) -> bytes:
    """The next piece of a body through h11, chunks undone; empty at its end."""
    return await receive_data(_receive_from(sock), conn)


async def receive_data(receive: Receive, conn: h11.Connection) -> bytes:
    """As `read_data`, from anywhere. The end of the message is taken only by the call that returns nothing."""
    while True:
        event = _next_event(conn)
        if event is h11.NEED_DATA:
            await asyncio.sleep(0)  # a socket that has bytes is read at once, and would be so for ever
            await _feed(receive, conn)
        elif isinstance(event, h11.EndOfMessage):
            return b""
        elif not isinstance(event, h11.Data):
            raise HttpError("closed in the middle of a body")
        elif event.data:
            return _join_chunks(conn, event)


async def wait_writable(sock: socket.socket) -> None:
    """Return when the socket takes bytes again. For those who call sendfile themselves."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    loop.add_writer(sock, _wake, waiter)
    try:
        await waiter
    finally:
        loop.remove_writer(sock)


def set_options(sock: socket.socket) -> None:
    """What every connection of ours has: it never blocks, and small writes go out at once."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _connect_socket(sock: socket.socket, address: tuple[object, ...]) -> socket.socket:
    try:
        set_options(sock)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def _receive_from(sock: socket.socket) -> Receive:
    return partial(asyncio.get_running_loop().sock_recv, sock, _RECV_BYTES)


async def _feed(receive: Receive, conn: h11.Connection) -> int:
    data = await receive()
    if not data and conn.trailing_data[1]:
        raise HttpError("closed in the middle of a message")
    conn.receive_data(data)
    return len(data)


def _join_chunks(conn: h11.Connection, event: h11.Data) -> bytes:
    """A chunk and all after it that have come, but not the last, empty one, which ends the message."""
    rest = conn.trailing_data[0]
    left = max(MAX_CHUNKS, len(rest) // SMALL_CHUNK)
    pieces = [bytes(event.data)]
    while event.chunk_end and _NEXT_CHUNK.match(rest):
        if not left:
            raise HttpError("a body in tiny chunks")
        left -= 1
        following = _next_event(conn)
        if not isinstance(following, h11.Data):
            break  # the head of the chunk is all that has come
        event = following
        pieces.append(bytes(event.data))
        rest = conn.trailing_data[0]
    return b"".join(pieces)


def _next_event(conn: h11.Connection) -> object:
    try:
        return conn.next_event()
    except h11.RemoteProtocolError as error:
        raise HttpError(str(error), error.error_status_hint) from error


def _is_host(text: str) -> bool:
    if not text.startswith("["):
        return _HOST.fullmatch(text) is not None
    try:
        socket.inet_pton(socket.AF_INET6, text.strip("[]"))
    except OSError:
        return False
    return True


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
