"""One connection, plain or TLS, as two functions that wait: `receive` and `send`.

Invariants:
- what came and was not asked for yet is bounded by `held_bytes` and one read; beyond it the peer has to wait;
- `send` returns when the kernel has everything, so nothing is left to flush when the connection is closed;
- a peer is judged by the bytes that went over while we waited for it (`RateGuard`): too few and the wait ends with
  `HttpError`, whatever it dribbles. Time in which nobody waited for it does not count.

For one reader and one writer at a time.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

from shoal.shardcast.http import HttpError
from shoal.shardcast.limits import RateGuard

HELD_BYTES = 1 << 15
BULK_BYTES = 1 << 18
"""the same where few peers send much: a read for every 32 KB costs more than the bytes"""


class _Scratch(threading.local):
    """Where a loop puts what it reads, to be copied before it reads again: one for all connections of a thread."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(BULK_BYTES))


_scratch = _Scratch()


class Wire(asyncio.BufferedProtocol):
    """A connection's two directions."""

    def __init__(self, *, min_rate: int, window_s: float, held_bytes: int = HELD_BYTES) -> None:
        assert held_bytes <= BULK_BYTES
        self._held_bytes = held_bytes
        self._reading = RateGuard(min_rate, window_s)
        self._writing = RateGuard(min_rate, window_s)
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._is_paused = self._is_ended = self._is_full = False
        self._waiter: asyncio.Future[None] | None = None
        self._drainer: asyncio.Future[None] | None = None
        self._lost = asyncio.get_running_loop().create_future()
        self._ended = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self.received_bytes = 0
        self.sent_bytes = 0

    @property
    def transport(self) -> asyncio.Transport:
        """What the loop made for this connection."""
        assert self._transport is not None, "used once it is connected"
        return self._transport

    @property
    def is_tls(self) -> bool:
        """Whether the bytes are encrypted on their way."""
        return self.transport.get_extra_info("ssl_object") is not None

    @property
    def is_open(self) -> bool:
        """Whether the peer may still send."""
        return not self._is_ended

    async def receive(self) -> bytes:
        """What came since the last call, or comes next; empty once the peer has closed. Called inside a timeout."""
        while not self._chunks and not self._is_ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._take_held()

    async def receive_rated(self) -> bytes:
        """The same at a rate, for what the peer has announced: `HttpError` with 408 if it is too slow."""
        if self._chunks or self._is_ended:
            return self._take_held()
        return await _keep_rate(self._reading, lambda: self.received_bytes, self.receive)

    async def send(self, data: bytes) -> None:
        """Hand bytes to the kernel, at the rate at which the peer takes them."""
        if self._lost.done():
            raise ConnectionResetError("the peer has gone")
        self.sent_bytes += len(data)
        self.transport.write(data)
        if self._is_full:
            await _keep_rate(self._writing, self._count_taken, self._wait_room)

    async def wait_lost(self) -> None:
        """Return when the connection has ended."""
        await asyncio.shield(self._lost)

    async def wait_ended(self) -> None:
        """Return when the peer has ended its side: a process that was killed does, before we write to it again."""
        await asyncio.shield(self._ended)

    def end_sending(self) -> None:
        """Say that nothing more comes, where that can be said without closing."""
        if not self._lost.done() and self.transport.can_write_eof():
            self.transport.write_eof()

    def close(self) -> None:
        """End the connection in order."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)
        # A plain transport is full above its limit, one with TLS from its limit on: at 0 it would be full while it is
        # empty, and nothing would wake us.
        self._transport.set_write_buffer_limits(1 if self.is_tls else 0, 0)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the loop before it reads."""
        return _scratch.view[: self._held_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the loop after it has read."""
        self._chunks.append(bytes(_scratch.view[:nbytes]))
        self._held += nbytes
        self.received_bytes += nbytes
        if self._held >= self._held_bytes and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()
        _wake(self._waiter)

    def eof_received(self) -> bool:
        """Called by the loop when the peer sends no more; it may still read, unless TLS ends both ways."""
        self._is_ended = True
        _wake(self._ended)
        _wake(self._waiter)
        return not self.is_tls

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop at the end."""
        self._is_ended = True
        self._is_full = False
        _wake(self._ended)
        _wake(self._lost)
        _wake(self._waiter)
        _wake(self._drainer)

    def pause_writing(self) -> None:
        """Called by the loop when the kernel takes no more."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Called by the loop when it has taken all."""
        self._is_full = False
        _wake(self._drainer)

    def _take_held(self) -> bytes:
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._held = 0
        if self._is_paused and not self._lost.done():
            self._is_paused = False
            self.transport.resume_reading()
        return data

    async def _wait_room(self) -> bytes:
        while self._is_full:
            self._drainer = asyncio.get_running_loop().create_future()
            await self._drainer
        if self._lost.done():
            raise ConnectionResetError("the peer has gone")
        return b""

    def _count_taken(self) -> int:
        return self.sent_bytes - self.transport.get_write_buffer_size()


async def _keep_rate(guard: RateGuard, count: Callable[[], int], wait: Callable[[], Awaitable[bytes]]) -> bytes:
    """Wait for the peer as long as it keeps its rate."""
    clock = asyncio.get_running_loop().time
    while True:
        began_s, data = clock(), None
        guard.begin_wait(count())
        try:
            async with asyncio.timeout(guard.left_s):
                data = await wait()
        except TimeoutError:
            pass  # judged below, by what went over meanwhile
        if not guard.end_wait(clock() - began_s, count()):
            raise HttpError("too slow", 408)
        if data is not None:
            return data


def _wake(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
