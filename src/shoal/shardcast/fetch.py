"""The bytes of one shard from one source into its writer.

From the head of the answer on, one thread stays on the body: it waits for the socket, receives, hashes and writes. The
event loop hears of it only when somebody reads along, and now and then for the count.

A piece is what comes in about two milliseconds: few calls on a fast link, no delay worth the name on a slow one, and
what stops coming is handed on at once. Meanwhile the kernel receives.

The writer keeps what an interrupted source sent; the next source continues behind it. Only its hash, over all bytes,
makes a shard of them.
"""

import asyncio
import time
from collections.abc import Callable

from shoal.shardcast.blob import ShardWriter
from shoal.shardcast.crew import Crew
from shoal.shardcast.link import Answer, SourceError
from shoal.shardcast.sources import Source
from shoal.shardcast.store import Entry

PIECE_S = 0.002
"""A piece is what comes in this time, within the bounds below."""
MIN_PIECE, MAX_PIECE = 1 << 14, 1 << 20
PATIENCE_S = 0.005
"""How long a piece is waited for; then what is there goes on."""
LOOK_S = 0.02
"""How long a thread waits where nothing comes, before it looks whether it is still wanted."""
COUNT_S = 0.1
"""How often the bytes are counted while they come."""


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
        pace = Pace(crew.deadlines.window_s, crew.deadlines.min_rate / share, time.monotonic())
        intake = Intake(answer, pace, count)
        try:
            await writer.receive(intake.pull)
        finally:
            intake.report()
        if intake.failure is not None and answer.left:
            raise intake.failure


def check_range(answer: Answer, start: int, size: int) -> None:
    """Refuse an answer that is not exactly the bytes from `start` to the end of a shard of that size."""
    status, ranged = answer.reply.status, answer.reply.content_range
    if start and (status != 206 or ranged != f"bytes {start}-{size - 1}/{size}"):
        raise SourceError(f"answered {status} with range {ranged} when asked for bytes from {start} of {size}")
    if not start and status != 200:
        raise SourceError(f"answered {status} when asked for a whole shard")
    answer.start_body(size - start)


class Intake:
    """One body on its way into a writer. `pull` runs in the writer's thread, all else on the event loop."""

    def __init__(self, answer: Answer, pace: Pace, count: Callable[[int], None]) -> None:
        self._answer = answer
        self._pace = pace
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._begun = self._left_at = self._told_at = time.monotonic()
        self._idle = True
        self._arrived = self._counted = 0
        self.failure: SourceError | None = None
        """what the source did wrong; the writer hears only that no more comes, and keeps what came before"""

    def pull(self, view: memoryview) -> int | None:
        """The next piece, as a writer asks for it."""
        if self.failure is not None:
            return 0
        now = time.monotonic()
        self._pace.forgive(now - self._left_at)  # the time since the last piece was our disk's
        try:
            received = self._receive(view, now)
        except SourceError as error:
            self.failure = error
            return 0
        self._left_at = time.monotonic()
        self._advance(received, self._left_at)
        return received or (0 if self.failure else None)

    def report(self) -> None:
        """Count what came since the last time."""
        news = self._arrived - self._counted
        self._counted += news
        if news:
            self._count(news)

    def _receive(self, view: memoryview, now: float) -> int:
        patience_s = LOOK_S if self._idle else PATIENCE_S
        num_bytes = 1 if self._idle else size_piece(self._arrived, now - self._begun)
        self._answer.wait_bytes(num_bytes, max(0.0, min(patience_s, self._pace.deadline - now)))
        return self._answer.try_receive(view)

    def _advance(self, received: int, now: float) -> None:
        self._idle = not received
        self._arrived += received
        self._pace.advance(received, now)
        if now >= self._pace.deadline:
            self.failure = SourceError("too slow or stalled in the middle of a shard")
        if self._arrived > self._counted and now - self._told_at >= COUNT_S:
            self._told_at = now
            self._loop.call_soon_threadsafe(self.report)


def size_piece(num_bytes: int, seconds: float) -> int:
    """Bytes to wait for on a line that brought so many in so long; powers of two, so that it seldom changes."""
    wanted = int(num_bytes * PIECE_S / max(seconds, PIECE_S))
    return min(MAX_PIECE, max(MIN_PIECE, 1 << wanted.bit_length() >> 1))
