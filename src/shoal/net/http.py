"""HTTP/1.1 for both ends: URLs, heads through h11, bodies through h11 or past it.

Invariants:
- every wait has a deadline: functions take seconds or must be called inside `asyncio.timeout`, and a late peer raises
  `TimeoutError`;
- a head is bounded by `HEAD_BYTES`, whatever the peer sends. Nothing is allocated from the peer's numbers before they
  are checked;
- the event loop runs other tasks before every piece of a body, and a body of tiny chunks is refused, so a peer that
  always has more data cannot starve others;
- anything that is not HTTP as accepted here raises `HttpError` with the status a server responds with. Such a
  connection is closed and never reused. Errors of the socket itself remain `OSError`.

Life cycle of a server's connection: receive_head -> head -> body -> end -> start_next_cycle ...
A client uses a new h11 connection for each request: connect -> request -> receive_head -> parse_reply -> take_rest and
`sockets.try_receive_into`, or receive_data.
"""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import h11

from shoal.errors import ConfigError

HEAD_BYTES = 8192
"""maximum length of the head of a request or response"""
MAX_CHUNKS = 256
"""maximum number of chunks in one read; a tiny chunk costs as much as a large one"""
SMALL_CHUNK = 256
"""more chunks are allowed if their average length reaches this; none of our own lines is shorter"""
_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_URL = re.compile(r"(?P<scheme>[a-z]+)://(?P<host>[^/?#@\[\]:]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?/?")
_COUNT = re.compile(r"0|[1-9][0-9]{0,18}")
_NEXT_CHUNK = re.compile(rb"\r\n0*[1-9a-fA-F]")
"""the end of a chunk, followed by another chunk that is not the last"""

Headers = list[tuple[str, str]]
"""Header fields of a request, in order."""
Receive = Callable[[], Awaitable[bytes]]
"""Returns the next bytes from the peer; empty once it has closed."""


class HttpError(Exception):
    """The peer closed early or sent invalid or unsupported HTTP; `status` is what a server responds with."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Url:
    """The address of a server. It has no path, since our paths are fixed."""

    host: str
    port: int
    scheme: str = "http"

    @property
    def bracketed(self) -> str:
        """The host as written in a URL."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def authority(self) -> str:
        """As in a Host header: without the default port of the scheme, since the exact text is signed."""
        return self.bracketed if self.port == _PORTS[self.scheme] else f"{self.bracketed}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


@dataclass(frozen=True)
class ResponseHead:
    """The parts of a response head that we use."""

    status: int
    length: int | None
    """length of the body in bytes; None for chunked encoding"""
    retry_after_s: int | None
    """how long the server asks us to wait before the next attempt"""
    content_range: str | None
    keep_alive: bool
    """whether the connection can be reused after the body is read"""


def parse_url(text: str) -> Url:
    """Parse a server address from user input; `ConfigError` states the allowed form."""
    match = _URL.fullmatch(text)
    if match is not None:
        host, scheme = match["host"], match["scheme"]
        port = int(match["port"] or _PORTS.get(scheme, 0))
        if scheme in _PORTS and 0 < port < 1 << 16 and _is_host(host):
            return Url(host.strip("[]").lower(), port, scheme)
    raise ConfigError(f"{text[:80]!r}: invalid server address, expected http://HOST:PORT or https://HOST:PORT")


def parse_count(text: str) -> int | None:
    """Parse a decimal number below 10^19 in canonical form (no sign, space or leading zero); otherwise None."""
    return int(text) if _COUNT.fullmatch(text) else None


def new_client() -> h11.Connection:
    """The h11 state of one request and its response."""
    return h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)


def new_server() -> h11.Connection:
    """The h11 state of one accepted connection."""
    return h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)


async def receive_head(
    receive: Receive, conn: h11.Connection, *, first_s: float, rest_s: float
) -> h11.Request | h11.Response | h11.InformationalResponse | None:
    """Read the next request or response, `100 Continue` included; None if the peer closed before its first byte.

    The first byte may take `first_s`, and the rest of the head `rest_s` from then on, however slowly it arrives.
    """
    seen = len(conn.trailing_data[0])
    if not seen:
        async with asyncio.timeout(first_s):
            seen += await _feed(receive, conn)
    event = _next_event(conn)
    if event is h11.NEED_DATA:  # most heads arrive in one piece and need no second timer
        async with asyncio.timeout(rest_s):
            while event is h11.NEED_DATA:
                seen += await _feed(receive, conn)
                event = _next_event(conn)
    if isinstance(event, h11.ConnectionClosed):
        return None
    if seen - len(conn.trailing_data[0]) > HEAD_BYTES:
        raise HttpError("head too long", 431)
    if not isinstance(event, h11.Request | h11.Response | h11.InformationalResponse):
        raise HttpError("unexpected kind of message")
    return event


def parse_reply(response: h11.Response) -> ResponseHead:
    """Parse how a response frames its body: only Content-Length or chunks; no read-until-close, no encoding."""
    fields = {name: value.decode("ascii", "replace") for name, value in response.headers}
    chunked = fields.get(b"transfer-encoding", "").lower() == "chunked"
    length = parse_count(fields.get(b"content-length", ""))
    if (b"transfer-encoding" in fields) == (b"content-length" in fields) or not (chunked or length is not None):
        raise HttpError("response has neither Content-Length nor chunked encoding")
    if fields.get(b"content-encoding", "identity").lower() != "identity":
        raise HttpError("unexpected Content-Encoding")
    return ResponseHead(
        status=response.status_code,
        length=length,
        retry_after_s=parse_count(fields.get(b"retry-after", "")),
        content_range=fields.get(b"content-range"),
        keep_alive=response.http_version == b"1.1" and fields.get(b"connection", "").lower() != "close",
    )


def take_rest(conn: h11.Connection) -> bytes:
    """Return the bytes received after the head: the start of a body whose rest is read without h11."""
    return conn.trailing_data[0]


async def receive_data(receive: Receive, conn: h11.Connection) -> bytes:
    """Return the next dechunked piece of a body; empty at the end, which only that call consumes."""
    while True:
        event = _next_event(conn)
        if event is h11.NEED_DATA:
            await asyncio.sleep(0)  # a socket that always has data would otherwise be read forever without yielding
            await _feed(receive, conn)
        elif isinstance(event, h11.EndOfMessage):
            return b""
        elif not isinstance(event, h11.Data):
            raise HttpError("connection closed in the middle of a body")
        elif event.data:
            return _join_chunks(conn, event)


async def _feed(receive: Receive, conn: h11.Connection) -> int:
    data = await receive()
    if not data and conn.trailing_data[1]:
        raise HttpError("connection closed in the middle of a message")
    conn.receive_data(data)
    return len(data)


def _join_chunks(conn: h11.Connection, event: h11.Data) -> bytes:
    """Join a chunk with all received chunks after it, except the empty last chunk, which ends the message."""
    rest = conn.trailing_data[0]
    left = max(MAX_CHUNKS, len(rest) // SMALL_CHUNK)
    pieces = [bytes(event.data)]
    while event.chunk_end and _NEXT_CHUNK.match(rest):
        if not left:
            raise HttpError("body in too many tiny chunks")
        left -= 1
        following = _next_event(conn)
        if not isinstance(following, h11.Data):
            break  # only the head of this chunk has arrived
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
