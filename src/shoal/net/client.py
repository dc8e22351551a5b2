"""HTTP client: reusable connections to one server, with one request at a time on each.

Invariants:
- every wait has a deadline, and every failure of the other side becomes an `HttpClientError` here and nowhere else;
- the client reads no more of a response than the caller allows. It returns redirects like any other response and never
  follows them;
- a connection is reused only if its response was read to the last byte;
- a file is sent to a coordinator only after `100 Continue`, so a refused upload costs only its head;
- a `Download` keeps no more bytes than allowed, whatever the other side announces or sends. Its path holds either the
  complete file with the right hash or nothing; a partial file is removed when the block ends.
"""

import asyncio
import hashlib
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import h11

from shoal.net import sockets
from shoal.net.http import Headers, HttpError, Url, new_client, parse_count, parse_url, receive_data, receive_head
from shoal.net.limits import RateGuard, keep_rate
from shoal.util.disk import is_full

MAX_IDLE = 4
CHUNK_BYTES = 1 << 17


class HttpClientError(Exception):
    """No response, with a short reason. `is_stale`: it failed on a reused connection; a new one may work."""

    def __init__(self, reason: str, *, is_stale: bool = False) -> None:
        super().__init__(reason)
        self.is_stale = is_stale


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server, and the certificates trusted for it."""

    url: Url
    tls: ssl.SSLContext | None

    @property
    def authority(self) -> str:
        """Host and port as in a Host header."""
        return self.url.authority

    def __str__(self) -> str:
        return str(self.url)


@dataclass(frozen=True, slots=True)
class HttpDeadlines:
    """Timeouts of a node in seconds, and the minimum rate of a body."""

    connect_s: float = 10.0
    answer_s: float = 60.0
    """until the first byte of the response"""
    rest_s: float = 10.0
    """for the rest of the head"""
    window_s: float = 20.0
    min_rate: int = 4 * 1024
    """minimum bytes per second of a body, measured over a window"""


GLANCE = HttpDeadlines(connect_s=5.0, answer_s=5.0)
"""for quick requests on behalf of a waiting user: a server that is silent for this long counts as down"""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response, read to its end."""

    status: int
    body: bytes
    retry_after_s: int | None
    signature_input: str = ""
    signature: str = ""
    """headers of a signed response (RFC 9421); empty if there is none, or more than one"""
    is_signed: bool = False
    """whether the signature was checked: the server answered this very request"""


def parse_endpoint(text: str, authority: Path | None = None) -> Endpoint:
    """Parse a server address given by the user; `authority` replaces the system's trusted certificates."""
    url = parse_url(text)
    return Endpoint(url, None if url.scheme == "http" else sockets.load_client_tls(authority))


class ClientConnection:
    """One connection with minimum rates: a server that is too slow raises `HttpError`."""

    def __init__(self, sock: socket.socket, deadlines: HttpDeadlines) -> None:
        self.sock = sock
        self._reading = RateGuard(deadlines.min_rate, deadlines.window_s)
        self._writing = RateGuard(deadlines.min_rate, deadlines.window_s)
        self.received_bytes = self._sent_bytes = 0
        self.is_ended = False
        """whether the server has closed its side"""

    async def receive(self) -> bytes:
        """Return the next bytes; empty at the end. Must be called inside a timeout."""
        data = await sockets.receive(self.sock)
        self.received_bytes += len(data)
        self.is_ended = not data
        return data

    async def receive_rated(self) -> bytes:
        """Like `receive`, but at the minimum rate; for data that the server has announced."""
        return await keep_rate(self._reading, lambda: self.received_bytes, self.receive)

    async def send(self, *parts: bytes | None) -> None:
        """Send data; raises `HttpError` if the server reads it below the minimum rate."""
        view = memoryview(b"".join(part or b"" for part in parts))
        while view:
            sent = sockets.try_send(self.sock, view)
            self._sent_bytes += sent
            view = view[sent:]
            if not sent:
                await keep_rate(self._writing, lambda: self._sent_bytes, partial(sockets.wait_writable, self.sock))


class Download:
    """One incoming file, counted and hashed; used as a context manager."""

    def __init__(self, path: Path, blob: str, size: int) -> None:
        """`size`: the maximum number of bytes."""
        self.blob, self.size = blob, size
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
        self._file = self._temporary.open("wb")
        self._found = hashlib.sha256()
        self.received = 0

    def restart(self) -> None:
        """Discard everything received so far."""
        self._file.seek(0)
        self._file.truncate()
        self._found = hashlib.sha256()
        self.received = 0

    def take(self, piece: bytes) -> None:
        """Append the next bytes; `HttpError` if there are more than allowed."""
        if self.received + len(piece) > self.size:
            raise HttpError(f"response exceeds the limit of {self.size} bytes")
        self._found.update(piece)
        self._file.write(piece)
        self.received += len(piece)

    @property
    def is_whole(self) -> bool:
        """Whether the received bytes are the requested file."""
        return self._found.hexdigest() == self.blob

    def keep(self) -> None:
        """Move the file to its final path."""
        assert self.is_whole, "only a verified file is kept"
        self._file.close()
        self._temporary.replace(self._path)

    def __enter__(self) -> "Download":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


class HttpClient:
    """The connections to one server, through the proxy that the environment names for it."""

    def __init__(self, endpoint: Endpoint, deadlines: HttpDeadlines | None = None) -> None:
        self._endpoint, self._deadlines = endpoint, deadlines or HttpDeadlines()
        self._proxy = sockets.find_proxy(endpoint.url)
        self._idle: list[ClientConnection] = []

    async def ask(self, method: str, target: str, headers: Headers, body: bytes, max_bytes: int) -> HttpResponse:
        """Send a request with a short body."""
        async with self._take_connection() as (conn, exchange):
            end = [h11.Data(data=body), h11.EndOfMessage()]
            await _send(conn, exchange, self._build_request(method, target, headers), *end)
            response = await self._read_response(conn, exchange)
            return await _read_answer(conn, exchange, response, max_bytes)

    async def send_file(
        self, target: str, headers: Headers, path: Path, max_bytes: int, *, waits: bool = True
    ) -> HttpResponse:
        """Send a request with a file as its body; `waits`: send the body only after `100 Continue`."""
        async with self._take_connection() as (conn, exchange):
            expect = [("Expect", "100-continue")] if waits else []
            await _send(conn, exchange, self._build_request("PUT", target, [*headers, *expect]))
            # A final response instead of `100 Continue` means that the server does not want the body.
            response = await self._read_any(conn, exchange) if waits else None
            if not isinstance(response, h11.Response):
                await _send_contents(conn, exchange, path)
                response = await self._read_response(conn, exchange)
            return await _read_answer(conn, exchange, response, max_bytes)

    async def fetch(self, target: str, headers: Headers, intake: Download, max_bytes: int) -> HttpResponse:
        """Send a GET request. The file, or its missing rest, goes to `intake`; otherwise like `ask`."""
        is_begun = intake.received > 0
        async with self._take_connection() as (conn, exchange):
            await _send(conn, exchange, self._build_request("GET", target, headers), h11.EndOfMessage())
            response = await self._read_response(conn, exchange)
            if response.status_code != 200 and not (is_begun and response.status_code == 206):
                return await _read_answer(conn, exchange, response, max_bytes)
            if response.status_code == 200:
                intake.restart()
            while piece := await receive_data(conn.receive_rated, exchange):
                intake.take(piece)
            return HttpResponse(200, b"", None)

    def close(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop().sock.close()

    @asynccontextmanager
    async def _take_connection(self) -> AsyncIterator[tuple[ClientConnection, h11.Connection]]:
        """Provide a connection for one exchange; its failures become an `HttpClientError`."""
        conn = self._find_idle()
        is_kept = conn is not None
        if conn is None:
            conn = await self._connect()
        before, exchange = conn.received_bytes, new_client()
        try:
            yield conn, exchange
        except (OSError, HttpError) as error:
            if is_full(error):
                conn.sock.close()
                raise  # an error of our own disk, while storing the response
            is_closed = conn.received_bytes == before and (conn.is_ended or isinstance(error, ConnectionError))
            conn.sock.close()
            if is_closed:
                self.close()  # other idle connections are just as old, and attempts are limited
            reason = self._phrase_close(is_kept=is_kept) if is_closed else sockets.phrase_error(error)
            raise HttpClientError(f"{self._endpoint}: {reason}", is_stale=is_kept and is_closed) from error
        except BaseException:
            conn.sock.close()
            raise
        self._keep(conn, exchange)

    def _phrase_close(self, *, is_kept: bool) -> str:
        """Why there may be no response; a TLS server closes a new connection that begins in plain text."""
        hint = "" if is_kept or self._endpoint.url.scheme == "https" else "; does it expect https://?"
        return f"connection closed without a response{hint}"

    def _find_idle(self) -> ClientConnection | None:
        while self._idle:
            conn = self._idle.pop()
            if sockets.is_idle(conn.sock):
                return conn
            conn.sock.close()
        return None

    def _keep(self, conn: ClientConnection, exchange: h11.Connection) -> None:
        is_done = exchange.our_state is h11.DONE and exchange.their_state is h11.DONE
        if is_done and not conn.is_ended and not exchange.trailing_data[0] and len(self._idle) < MAX_IDLE:
            self._idle.append(conn)
        else:
            conn.sock.close()

    async def _connect(self) -> ClientConnection:
        endpoint = self._endpoint
        try:
            sock = await sockets.connect(endpoint.url, self._deadlines.connect_s, tls=endpoint.tls, proxy=self._proxy)
        except (OSError, UnicodeError, HttpError) as error:
            raise HttpClientError(f"{endpoint}: no connection ({sockets.phrase_error(error)})") from error
        return ClientConnection(sock, self._deadlines)

    def _build_request(self, method: str, target: str, headers: Headers) -> h11.Request:
        if method != "GET" and not any(name.lower() == "content-length" for name, _ in headers):
            headers = [*headers, ("Content-Length", "0")]
        return sockets.build_request(self._endpoint.url, target, *headers, proxy=self._proxy, method=method)

    async def _read_response(self, conn: ClientConnection, exchange: h11.Connection) -> h11.Response:
        async with asyncio.timeout(self._deadlines.answer_s):
            while isinstance(head := await self._read_any(conn, exchange), h11.InformationalResponse):
                pass
        return head

    async def _read_any(
        self, conn: ClientConnection, exchange: h11.Connection
    ) -> h11.Response | h11.InformationalResponse:
        limits = self._deadlines
        head = await receive_head(conn.receive, exchange, first_s=limits.answer_s, rest_s=limits.rest_s)
        if head is None:
            raise HttpError("connection closed without a response")
        assert not isinstance(head, h11.Request), "a client reads responses"
        return head


async def _send(conn: ClientConnection, exchange: h11.Connection, *events: h11.Event) -> None:
    await conn.send(*(exchange.send(event) for event in events))


async def _send_contents(conn: ClientConnection, exchange: h11.Connection, path: Path) -> None:
    """Send a file. A server may respond and close before the end of the body; its response is read then."""
    with path.open("rb") as file:
        try:
            while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                await _send(conn, exchange, h11.Data(data=data))
            await _send(conn, exchange, h11.EndOfMessage())
        except ConnectionError:
            return


async def _read_answer(
    conn: ClientConnection, exchange: h11.Connection, response: h11.Response, max_bytes: int
) -> HttpResponse:
    pieces: list[bytes] = []
    size = 0
    while piece := await receive_data(conn.receive_rated, exchange):
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise HttpError(f"response exceeds the limit of {max_bytes} bytes")
    body, retry = b"".join(pieces), _read_field(response, b"retry-after")
    signed = _read_field(response, b"signature-input"), _read_field(response, b"signature")
    return HttpResponse(response.status_code, body, parse_count(retry), *signed)


def _read_field(response: h11.Response, name: bytes) -> str:
    """The value of a header; empty if it is missing or ambiguous."""
    values = [value for found, value in response.headers if found == name]
    return values[0].decode("ascii", "replace") if len(values) == 1 else ""
