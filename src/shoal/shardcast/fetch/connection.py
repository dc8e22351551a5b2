"""Requests to one upstream over connections that are kept and reused.

Invariants:
- every wait has a deadline, and every failure of an upstream becomes an `UpstreamError` here and nowhere else, so that
  errors of our own disk are never attributed to the other side;
- the body of a response other than 200 or 206 is ignored: redirects are not followed, error texts are not read;
- no more bytes are read than the head of the response announced. A connection returns to the pool only if its response
  was read to the last byte and nothing came after it.
"""

import asyncio
import math
import select
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h11

from shoal.net import sockets
from shoal.net.http import HttpError, ResponseHead, Url, new_client, parse_reply, take_rest

MAX_IDLE = 8
"""Idle connections kept per upstream."""
_MISSING = (404, 410)
_DENIED = (401, 403)
_BUSY = 503


class UpstreamError(Exception):
    """A failure of an upstream, with a short reason. `pause` is how long it asked us to wait."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class MissingError(UpstreamError):
    """The upstream does not have it, or no longer."""


class BusyError(UpstreamError):
    """The upstream cannot send it now (503), which says nothing about what else it has."""


class DeniedError(UpstreamError):
    """The upstream requires a ticket, and ours is missing or not accepted."""


class InvalidDataError(UpstreamError):
    """The upstream sent data that does not match the publisher's signature."""


@dataclass(frozen=True, slots=True)
class FetchDeadlines:
    """Timeouts of a client in seconds, and the minimum rate of a body."""

    connect_s: float = 5.0
    head_s: float = 15.0
    """until the first byte of a response: a relay responds when it has the first byte itself"""
    rest_s: float = 5.0
    """for the rest of the head"""
    window_s: float = 5.0
    """time in which a body must advance by `window_s` x `min_rate` bytes"""
    min_rate: float = 32 * 1024
    """minimum bytes per second for an upstream to count as alive, over all shards in flight together"""
    stall_s: float = 30.0
    """time without a byte or a line of a version before another version is tried"""


@dataclass(slots=True)
class UpstreamResponse:
    """One response while its body is read, in exactly one way.

    `read_piece` belongs to the event loop, `wait_bytes` and `try_receive` to a thread. While a thread uses the
    response, the event loop does not touch the socket.
    """

    reply: ResponseHead
    sock: socket.socket
    conn: h11.Connection
    left: int = 0
    """bytes of the body not returned yet, if it has a length"""
    ended: bool = False
    _raw: bool = False
    _mark: int = 1
    """number of received bytes from which the socket counts as readable"""
    _rest: memoryview = field(default_factory=lambda: memoryview(b""))

    def start_body(self, length: int) -> None:
        """Read the body without h11 from now on; raises if it does not have that length."""
        if self.reply.length != length:
            raise UpstreamError(f"announced {self.reply.length} bytes instead of {length}")
        self._raw, self.left = True, length
        self._rest = memoryview(take_rest(self.conn))
        if len(self._rest) > length:
            raise UpstreamError(f"sent more than the {length} bytes it announced")
        self._count_down(0)

    def wait_bytes(self, num_bytes: int, timeout_s: float) -> None:
        """Block until this many bytes (or all that are left) have arrived, the connection ends, or on timeout."""
        if self._rest:
            return
        if isinstance(self.sock, ssl.SSLSocket):
            if self.sock.pending():
                return  # already decrypted; the mark would count bytes that TLS has read ahead
        else:
            self._set_mark(min(num_bytes, self.left))
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        poller.poll(math.ceil(timeout_s * 1000))

    def try_receive(self, view: memoryview) -> int:
        """Read what has already arrived into `view`; 0 if nothing has."""
        if self._rest:
            return self._take_rest(view)
        try:
            received = sockets.try_receive_into(self.sock, view[: self.left])
        except OSError as error:
            raise UpstreamError(sockets.phrase_error(error)) from error
        if received is None:
            return 0
        if not received:
            raise UpstreamError("closed the connection in the middle of a body")
        self._count_down(received)
        return received

    async def read_piece(self, timeout_s: float) -> bytes:
        """Read the next piece of a short or chunked body through h11; empty at its end. `TimeoutError` if late."""
        try:
            async with asyncio.timeout(timeout_s):
                data = await sockets.read_data(self.sock, self.conn)
        except TimeoutError:
            raise
        except (OSError, HttpError) as error:
            raise UpstreamError(sockets.phrase_error(error)) from error
        self.ended = not data
        return data

    @property
    def reusable(self) -> bool:
        """Whether this connection can be reused: the response was read completely, and nothing follows it."""
        followed = not self._raw and take_rest(self.conn)
        return self.ended and self.reply.keep_alive and not (self.left or followed)

    def _take_rest(self, view: memoryview) -> int:
        size = min(len(view), len(self._rest))
        view[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        self._count_down(size)
        return size

    def _count_down(self, size: int) -> None:
        self.left -= size
        self.ended = not self.left
        if self.ended:
            self._set_mark(1)  # the next head on this connection may be shorter than any piece of a body

    def _set_mark(self, num_bytes: int) -> None:
        if num_bytes == self._mark:
            return
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
        except OSError as error:
            raise UpstreamError(sockets.phrase_error(error)) from error
        self._mark = num_bytes


class UpstreamConnections:
    """The connections to one upstream. They are closed by `close`, or individually when a response fails."""

    def __init__(
        self,
        url: Url,
        deadlines: FetchDeadlines | None = None,
        ticket: str | None = None,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls`: certificates to trust at an https URL instead of the system's."""
        self._url, self._tls = url, tls
        self._proxy = sockets.find_proxy(url)
        self._deadlines = deadlines or FetchDeadlines()
        self._headers = [("Authorization", f"Shoal {ticket}")] if ticket else []
        self._idle: list[socket.socket] = []
        self._closed = False

    @asynccontextmanager
    async def request(
        self, target: str, *headers: tuple[str, str], head_s: float | None = None
    ) -> AsyncIterator[UpstreamResponse]:
        """GET `target`. `UpstreamError` for any status but 200 and 206; the connection is kept if the body was read."""
        sock, answer = await self._ask(target, list(headers), self._deadlines.head_s if head_s is None else head_s)
        try:
            check_status(answer.reply)
            yield answer
        finally:
            if answer.reusable and not self._closed and len(self._idle) < MAX_IDLE:
                self._idle.append(sock)
            else:
                sock.close()

    def close(self) -> None:
        """Close idle connections at once, and those in use when they are returned."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def _ask(
        self, target: str, headers: list[tuple[str, str]], head_s: float
    ) -> tuple[socket.socket, UpstreamResponse]:
        """Send a request and read the head of its response; an idle connection closed by the server is replaced."""
        while self._idle:
            sock = self._idle.pop()
            try:
                return sock, await self._converse(sock, target, headers, head_s)
            except _StaleConnectionError:
                continue
        try:
            sock = await sockets.connect(self._url, self._deadlines.connect_s, tls=self._tls, proxy=self._proxy)
        except (OSError, UnicodeError, HttpError) as error:
            raise UpstreamError(f"no connection ({sockets.phrase_error(error)})") from error
        try:
            return sock, await self._converse(sock, target, headers, head_s)
        except _StaleConnectionError as error:
            raise UpstreamError("closed the connection without a response") from error

    async def _converse(
        self, sock: socket.socket, target: str, headers: list[tuple[str, str]], head_s: float
    ) -> UpstreamResponse:
        conn = new_client()
        request = sockets.build_request(self._url, target, *self._headers, *headers, proxy=self._proxy)
        try:
            async with asyncio.timeout(self._deadlines.connect_s):
                await sockets.send_event(sock, conn, request, h11.EndOfMessage())
            response = await sockets.read_head(sock, conn, first_s=head_s, rest_s=self._deadlines.rest_s)
            if response is None:
                raise _StaleConnectionError
            assert isinstance(response, h11.Response)
            return UpstreamResponse(parse_reply(response), sock, conn)
        except BaseException as error:
            sock.close()
            if isinstance(error, ConnectionError) or (
                isinstance(error, HttpError) and conn.trailing_data == (b"", True)
            ):
                raise _StaleConnectionError from error  # closed before the first byte
            if isinstance(error, OSError | HttpError):
                raise UpstreamError(sockets.phrase_error(error)) from error
            raise


class _StaleConnectionError(Exception):
    """The other side closed the connection before it began to respond."""


def check_status(reply: ResponseHead) -> None:
    """Raise for every response without the requested bytes."""
    if reply.status in (200, 206):
        return
    if reply.status in _MISSING:
        raise MissingError(f"does not have it (status {reply.status})")
    if 300 <= reply.status < 400:
        raise UpstreamError(f"sent a redirect (status {reply.status}), which is not followed")
    if reply.status in _DENIED:
        raise DeniedError(f"requires a ticket, or rejected ours (status {reply.status})")
    kind = BusyError if reply.status == _BUSY else UpstreamError
    raise kind(f"responded with status {reply.status}", pause=float(reply.retry_after_s or 0))
