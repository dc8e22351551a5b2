"""Requests to one source over connections that are kept and used again.

Invariants:
- every wait has a deadline, and all that can go wrong with a source becomes a `SourceError` here and nowhere else, so
  that errors of our own disk are never taken for a fault of the other side;
- an answer other than 200 or 206 has no body for us: redirects are not followed, error texts are not read;
- no more bytes are taken than the answer's head announced, and a connection goes back into the pool only if its answer
  was read to the last byte and nothing came after it.
"""

import asyncio
import math
import os
import select
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h11

from shoal.shardcast.http import (
    HttpError,
    Reply,
    Url,
    build_request,
    connect,
    new_client,
    parse_reply,
    read_data,
    read_head,
    receive_into,
    send_event,
    take_rest,
)

MAX_IDLE = 8
"""Idle connections kept per source."""
_MISSING = (404, 410)
_DENIED = (401, 403)
_BUSY = 503


class SourceError(Exception):
    """What a source did wrong, in a few words. `pause` is how long it asked to be left alone."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class MissingError(SourceError):
    """The source does not have it (any more)."""


class BusyError(SourceError):
    """The source cannot give it now (503), which says nothing about what else it has."""


class DeniedError(SourceError):
    """The source serves only who shows a ticket, and ours does not do."""


class WrongError(SourceError):
    """The source sent what its signer never signed."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a client waits for what, in seconds, and the rate below which a body is given up."""

    connect_s: float = 5.0
    head_s: float = 15.0
    """until the first byte of an answer: a relay answers when it has the first byte itself"""
    rest_s: float = 5.0
    """for the rest of the head"""
    window_s: float = 5.0
    """time in which a body must advance by `window_s` x `min_rate` bytes"""
    min_rate: float = 32 * 1024
    """bytes per second that a client takes for alive, over all shards in flight together"""
    stall_s: float = 30.0
    """without a byte or a line of a version, before another one is tried"""


@dataclass(slots=True)
class Answer:
    """One answer while its body is read, in exactly one way.

    `receive` and `read_piece` belong to the event loop, `wait_bytes` and `try_receive` to a thread: while it has the
    answer, the loop does not look at the socket.
    """

    reply: Reply
    sock: socket.socket
    conn: h11.Connection
    left: int = 0
    """bytes of the body not handed out yet, if it has a length"""
    ended: bool = False
    _raw: bool = False
    _mark: int = 1
    """bytes from which on the socket counts as readable"""
    _rest: memoryview = field(default_factory=lambda: memoryview(b""))

    def start_body(self, length: int) -> None:
        """Read the body past h11 from now on; it has that length or this raises."""
        if self.reply.length != length:
            raise SourceError(f"announced {self.reply.length} bytes instead of {length}")
        self._raw, self.left = True, length
        self._rest = memoryview(take_rest(self.conn))
        if len(self._rest) > length:
            raise SourceError(f"sent more than the {length} bytes it announced")
        self._count_down(0)

    def wait_bytes(self, num_bytes: int, timeout_s: float) -> None:
        """Block until so many bytes have come, or all that are left, or the connection ended, or the time is over."""
        if self._rest:
            return
        self._set_mark(min(num_bytes, self.left))
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        poller.poll(math.ceil(timeout_s * 1000))

    def try_receive(self, view: memoryview) -> int:
        """What has arrived already, into `view`; 0 if nothing has."""
        if self._rest:
            return self._take_rest(view)
        try:
            received = self.sock.recv_into(view[: self.left])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise SourceError(_phrase_error(error)) from error
        if not received:
            raise SourceError("closed in the middle of a body")
        self._count_down(received)
        return received

    async def receive(self, view: memoryview) -> int:
        """At least one byte of the body into `view`. Called inside a timeout."""
        if self._rest:
            return self._take_rest(view)
        try:
            received = await receive_into(self.sock, view[: self.left])
        except (OSError, HttpError) as error:
            raise SourceError(_phrase_error(error)) from error
        self._count_down(received)
        return received

    async def read_piece(self, timeout_s: float) -> bytes:
        """The next piece of a short or chunked body through h11; empty at its end. `TimeoutError` if it is late."""
        try:
            async with asyncio.timeout(timeout_s):
                data = await read_data(self.sock, self.conn)
        except TimeoutError:
            raise
        except (OSError, HttpError) as error:
            raise SourceError(_phrase_error(error)) from error
        self.ended = not data
        return data

    @property
    def reusable(self) -> bool:
        """Whether the next answer can begin on this connection: nothing of this one is left, and nothing follows it."""
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
            raise SourceError(_phrase_error(error)) from error
        self._mark = num_bytes


class LinkPool:
    """The connections to one source. They are closed by `close`, or one by one when an answer ends badly."""

    def __init__(self, url: Url, deadlines: Deadlines | None = None, ticket: str | None = None) -> None:
        self._url = url
        self._deadlines = deadlines or Deadlines()
        self._headers = [("Authorization", f"Shoal {ticket}")] if ticket else []
        self._idle: list[socket.socket] = []
        self._closed = False

    @asynccontextmanager
    async def request(
        self, target: str, *headers: tuple[str, str], head_s: float | None = None
    ) -> AsyncIterator[Answer]:
        """GET `target`. `SourceError` for anything but 200 and 206; the connection is kept if the body was read."""
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
        """Close what is idle, and what is in use as soon as it is handed back."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def _ask(self, target: str, headers: list[tuple[str, str]], head_s: float) -> tuple[socket.socket, Answer]:
        """Send a request and read the head of its answer; an idle connection the server gave up is replaced."""
        while self._idle:
            sock = self._idle.pop()
            try:
                return sock, await self._converse(sock, target, headers, head_s)
            except _StaleLinkError:
                continue
        try:
            sock = await connect(self._url, self._deadlines.connect_s)
        except (OSError, UnicodeError) as error:
            raise SourceError(f"no connection ({_phrase_error(error)})") from error
        try:
            return sock, await self._converse(sock, target, headers, head_s)
        except _StaleLinkError as error:
            raise SourceError("closed without an answer") from error

    async def _converse(
        self, sock: socket.socket, target: str, headers: list[tuple[str, str]], head_s: float
    ) -> Answer:
        conn = new_client()
        request = build_request(self._url, target, *self._headers, *headers)
        try:
            async with asyncio.timeout(self._deadlines.connect_s):
                await send_event(sock, conn, request, h11.EndOfMessage())
            response = await read_head(sock, conn, first_s=head_s, rest_s=self._deadlines.rest_s)
            if response is None:
                raise _StaleLinkError
            assert isinstance(response, h11.Response)
            return Answer(parse_reply(response), sock, conn)
        except BaseException as error:
            sock.close()
            if isinstance(error, ConnectionError) or (
                isinstance(error, HttpError) and conn.trailing_data == (b"", True)
            ):
                raise _StaleLinkError from error  # closed before the first byte
            if isinstance(error, TimeoutError):
                raise SourceError("no answer in time") from error
            if isinstance(error, OSError | HttpError):
                raise SourceError(_phrase_error(error)) from error
            raise


class _StaleLinkError(Exception):
    """The other side closed the connection before it began to answer."""


def check_status(reply: Reply) -> None:
    """Refuse every answer that brings no bytes."""
    if reply.status in (200, 206):
        return
    if reply.status in _MISSING:
        raise MissingError(f"does not have it ({reply.status})")
    if 300 <= reply.status < 400:
        raise SourceError(f"redirects ({reply.status}), which is never followed")
    if reply.status in _DENIED:
        raise DeniedError(f"asks for a ticket, or for another one ({reply.status})")
    kind = BusyError if reply.status == _BUSY else SourceError
    raise kind(f"answered {reply.status}", pause=float(reply.retry_after_s or 0))


def _phrase_error(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)  # the event loop's own text repeats the address
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
