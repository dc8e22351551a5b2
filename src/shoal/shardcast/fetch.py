"""The bytes of one shard from one source into its writer.

Two buffers take turns: while the pool hashes and writes one, the socket fills the other. A buffer is handed on when it
is full or the socket has nothing more at the moment. Meanwhile the kernel receives: on a fast link pieces grow large,
on a slow one every byte goes on at once, and whoever reads the shard from us gets it at once too.

The writer keeps what an interrupted source sent; the next source continues behind it. Only its hash, over all bytes,
makes a shard of them.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from shoal.shardcast.blob import ShardWriter
from shoal.shardcast.crew import Crew
from shoal.shardcast.link import Answer, SourceError
from shoal.shardcast.sources import Source
from shoal.shardcast.store import Entry

BUFFER_BYTES = 1 << 20
_MAX_SPARE = 16
_spare: list[bytearray] = []


class Pace:
    """The deadline of a body: from window to window it must have advanced by a certain number of bytes."""

    def __init__(self, window_s: float, min_rate: float, now: float) -> None:
        self._window_s = window_s
        self._quota = max(1, int(window_s * min_rate))
        self._seen = 0
        self.deadline = now + window_s

    def advance(self, num_bytes: int, now: float) -> bool:
        """Count bytes; True if the deadline moved."""
        self._seen += num_bytes
        if self._seen < self._quota:
            return False
        self._seen = 0
        self.deadline = now + self._window_s
        return True

    def forgive(self, seconds: float) -> None:
        """Move the deadline by time that was not the source's."""
        self.deadline += seconds


async def fetch_shard(
    crew: Crew,
    source: Source,
    entry: Entry,
    name: str,
    index: int,
    writer: ShardWriter,
    *,
    share: int = 1,
    count: Callable[[int], None] = lambda _: None,
) -> None:
    """Give the writer all that it lacks of one shard; it is not finished here.

    `share` is the number of transfers that share the line; `count` is told of bytes as they come.
    """
    start, size = writer.written, writer.size
    target = f"/v/{entry.version}/{entry.digest[:16]}/{name}/{index}"
    headers = [("Range", f"bytes={start}-")] if start else []
    async with crew.ask(source, target, *headers) as answer:
        check_range(answer, start, size)
        pace = Pace(crew.deadlines.window_s, crew.deadlines.min_rate / share, _now())
        await _Stream(answer, writer, pace, count).run()


def check_range(answer: Answer, start: int, size: int) -> None:
    """Refuse an answer that is not exactly the bytes from `start` to the end of a shard of that size."""
    status, ranged = answer.reply.status, answer.reply.content_range
    if start and (status != 206 or ranged != f"bytes {start}-{size - 1}/{size}"):
        raise SourceError(f"answered {status} with range {ranged} when asked for bytes from {start} of {size}")
    if not start and status != 200:
        raise SourceError(f"answered {status} when asked for a whole shard")
    answer.start_body(size - start)


class _Stream:
    """One body on its way into a writer."""

    def __init__(self, answer: Answer, writer: ShardWriter, pace: Pace, count: Callable[[int], None]) -> None:
        self._answer = answer
        self._writer = writer
        self._pace = pace
        self._count = count
        self._pending: asyncio.Task[None] | None = None

    async def run(self) -> None:
        with _borrow_buffer() as one, _borrow_buffer() as other:
            try:
                view, spare = memoryview(one), memoryview(other)
                while self._answer.left:
                    filled = await self._fill(view)
                    await self._drain()
                    self._pending = asyncio.create_task(self._writer.write(view[:filled]))
                    view, spare = spare, view
                await self._drain()
            finally:
                await self._abandon()

    async def _fill(self, view: memoryview) -> int:
        """Receive until the buffer is full, or nothing more is there at the moment."""
        filled = 0
        try:
            async with asyncio.timeout_at(self._pace.deadline) as deadline:
                while filled < len(view) and self._answer.left:
                    received = self._answer.try_receive(view[filled:])
                    if not received and filled:
                        break
                    if not received:
                        received = await self._answer.receive(view[filled:])
                    filled += received
                    self._count(received)
                    if self._pace.advance(received, _now()):
                        deadline.reschedule(self._pace.deadline)
        except TimeoutError as error:
            raise SourceError("too slow or stalled in the middle of a shard") from error
        return filled

    async def _drain(self) -> None:
        """Wait for the write under way. Its errors are the disk's or the shard's; its time is not the source's."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        begun = _now()
        await pending
        self._pace.forgive(_now() - begun)

    async def _abandon(self) -> None:
        """After a failure: let the write under way end, since what it writes is kept and its buffer is not ours yet."""
        if self._pending is not None:
            await asyncio.wait({self._pending})
            if not self._pending.cancelled():
                self._pending.exception()  # what ended the stream is raised already; a full disk will say so again


@contextlib.contextmanager
def _borrow_buffer() -> Iterator[bytearray]:
    """A buffer whose pages are there already: fresh ones cost more than what is done with them."""
    buffer = _spare.pop() if _spare else bytearray(BUFFER_BYTES)
    try:
        yield buffer
    finally:
        if len(_spare) < _MAX_SPARE:
            _spare.append(buffer)


def _now() -> float:
    return asyncio.get_running_loop().time()
