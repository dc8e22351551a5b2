"""Fetching one shard: from one upstream after the other until its hash is right.

From the head of the response on, one thread handles the body: it waits for the socket, receives, hashes and writes. The
event loop is involved only while the shard is read as it arrives, and occasionally for the byte count. A piece is what
arrives in about two milliseconds: few calls on a fast link, no delay on a slow one.

Invariants:
- if an upstream fails in the middle, the next one continues after the bytes that have arrived;
- wrong bytes are blamed on an upstream only if all of them came from it. After a wrong mixture nobody is blamed, and
  from then on every attempt at this shard starts from the beginning, so that the next wrong one has a single sender;
- a late shard is requested a second time from another upstream (`hedge`); the first with the right bytes wins.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal.shardcast.errors import ShardError, StaleError
from shoal.shardcast.fetch.connection import InvalidDataError, UpstreamError, UpstreamResponse
from shoal.shardcast.fetch.upstream_stats import Upstream
from shoal.shardcast.fetch.upstreams import GoneError, UpstreamPool, wait_growth
from shoal.shardcast.store.blob import Blob, ShardWriter
from shoal.shardcast.store.store import StoredVersion

PIECE_S = 0.002
"""A piece is what arrives in this time, within the bounds below."""
MIN_PIECE, MAX_PIECE = 1 << 14, 1 << 20
MAX_PIECE_WAIT_S = 0.005
"""Maximum wait for a full piece; then the bytes that have arrived are processed."""
POLL_S = 0.02
"""How long a thread waits for data before it checks whether it is still needed."""
COUNT_S = 0.1
"""How often bytes are counted while they arrive."""


class BodyDeadline:
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
        """Extend the deadline by time that the upstream is not responsible for."""
        self.deadline += seconds


def check_range(answer: UpstreamResponse, start: int, size: int) -> None:
    """Reject a response that is not exactly the bytes from `start` to the end of a shard of that size."""
    status, ranged = answer.reply.status, answer.reply.content_range
    if start and (status != 206 or ranged != f"bytes {start}-{size - 1}/{size}"):
        raise UpstreamError(f"status {status} with range {ranged} for a request from byte {start} of {size}")
    if not start and status != 200:
        raise UpstreamError(f"responded with status {status} to a request for a whole shard")
    answer.start_body(size - start)


class BodyReceiver:
    """One body that is received into a writer. Only `pull` runs in the writer's thread."""

    def __init__(self, answer: UpstreamResponse, pace: BodyDeadline, count: Callable[[int], None]) -> None:
        self._answer = answer
        self._pace = pace
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._begun = self._left_at = self._reported_at = time.monotonic()
        self._idle = True
        self._arrived = self._counted = 0
        self.failure: UpstreamError | None = None
        """the upstream's failure; the writer only sees the end of the data, and keeps what came before"""

    def pull(self, view: memoryview) -> int | None:
        """Return the next piece; called by the writer."""
        if self.failure is not None:
            return 0
        now = time.monotonic()
        self._pace.forgive(now - self._left_at)  # the time since the last piece was spent on our disk
        try:
            received = self._receive(view, now)
        except UpstreamError as error:
            self.failure = error
            return 0
        self._left_at = time.monotonic()
        self._advance(received, self._left_at)
        return received or (0 if self.failure else None)

    def report(self) -> None:
        """Count the bytes since the last call."""
        changes = self._arrived - self._counted
        self._counted += changes
        if changes:
            self._count(changes)

    def _receive(self, view: memoryview, now: float) -> int:
        wait_s = POLL_S if self._idle else MAX_PIECE_WAIT_S
        num_bytes = 1 if self._idle else size_piece(self._arrived, now - self._begun)
        self._answer.wait_bytes(num_bytes, max(0.0, min(wait_s, self._pace.deadline - now)))
        return self._answer.try_receive(view)

    def _advance(self, received: int, now: float) -> None:
        self._idle = not received
        self._arrived += received
        self._pace.advance(received, now)
        if now >= self._pace.deadline:
            self.failure = UpstreamError("too slow or stalled in the middle of a shard")
        if self._arrived > self._counted and now - self._reported_at >= COUNT_S:
            self._reported_at = now
            self._loop.call_soon_threadsafe(self.report)


def size_piece(num_bytes: int, seconds: float) -> int:
    """Bytes to wait for at this rate; a power of two, so that it seldom changes."""
    wanted = int(num_bytes * PIECE_S / max(seconds, PIECE_S))
    return min(MAX_PIECE, max(MIN_PIECE, 1 << wanted.bit_length() >> 1))


@dataclass(slots=True)
class ShardPart:
    """The part of a shard that one upstream sent."""

    upstream: Upstream
    begun: float
    num_bytes: int = 0
    seconds: float | None = None
    """None until it has ended and is complete"""


@dataclass(eq=False, repr=False, slots=True)
class ShardJob:
    """Fetches one shard. `run` ends when the shard has arrived, and raises `GoneError` or an `OSError` of the disk."""

    _upstreams: UpstreamPool
    blob: Blob
    index: int
    _count_sending: Callable[[], int]
    """number of transfers that share the link"""
    is_urgent: bool
    """whether it occupies a slot of urgent shards"""
    part: ShardPart | None = None
    """the current transfer"""
    arrived: bool = False
    """all bytes have arrived, but the hash is not known yet"""
    pace_s: float | None = None
    """seconds per byte of the transfer that completed the shard"""
    _writer: ShardWriter | None = None
    _mixing: bool = True
    _main_task: asyncio.Task[None] | None = None
    _hedge_task: asyncio.Task[None] | None = None

    @property
    def entry(self) -> StoredVersion:
        return self.blob.entry

    @property
    def written(self) -> int:
        """Bytes that have arrived and count if the hash matches."""
        return 0 if self._writer is None else self._writer.written

    @property
    def is_hedged(self) -> bool:
        return self._hedge_task is not None and not self._hedge_task.done()

    async def run(self) -> None:
        with self.entry.hold():
            self._main_task = asyncio.create_task(self._repeat())
            try:
                await asyncio.wait({self._main_task})
                self._raise_failure()
            finally:
                await self._cancel_tasks()

    def hedge(self) -> bool:
        """Request the same shard from another upstream; False if there is no other."""
        busy = [self.part.upstream] if self.part else []
        others = [upstream for upstream in self._upstreams.list_ready(self.entry.digest) if upstream not in busy]
        if self.is_hedged or not others or self.blob.has(self.index):
            return False
        upstream = self._upstreams.draw(self._upstreams.rng, self.entry.digest, busy)
        assert upstream is not None, "there must be another upstream"
        self._hedge_task = asyncio.create_task(self._run_hedge(upstream))
        return True

    async def _repeat(self) -> None:
        while not self.blob.has(self.index):
            if self.entry.gone:
                raise GoneError("the version was replaced or dropped")
            self.arrived = False
            with self.blob.start(self.index) as self._writer:
                try:
                    await self._fill(self._writer)
                except StaleError:
                    if self._hedge_task is not None:  # the hedge won: it has the right bytes and stores them
                        await asyncio.wait({self._hedge_task})

    async def _fill(self, writer: ShardWriter) -> None:
        """Fill one writer and finish it; returns without finishing if the bytes are wrong."""
        parts: list[ShardPart] = []
        while writer.written < writer.size:
            upstream = await self._upstreams.pick(self.entry.digest, avoid=[part.upstream for part in parts[-1:]])
            self.part = ShardPart(upstream, _now())
            try:
                await self._transfer(self.part, writer)
            except StaleError:
                self._record_loss()
                raise
            finally:
                parts += [self.part] if self.part.num_bytes else []
                self.part = None
            if writer.written < writer.size and not self._mixing:
                return
        await self._finish(writer, parts)

    async def _transfer(self, part: ShardPart, writer: ShardWriter) -> None:
        with self._upstreams.charge(part.upstream, self.entry.digest, shard=True):
            await self._receive(part, writer)
            part.seconds = _now() - part.begun

    async def _receive(self, part: ShardPart, writer: ShardWriter) -> None:
        """Receive everything that the writer lacks of the shard; does not finish it."""

        def count(num_bytes: int) -> None:
            part.num_bytes += num_bytes
            self._upstreams.count(part.upstream, num_bytes)

        start, size, limits = writer.written, writer.size, self._upstreams.deadlines
        min_rate = limits.min_rate / self._count_sending()
        target = f"/v/{self.entry.version}/{self.entry.digest[:16]}/{self.blob.name}/{self.index}"
        headers = [("Range", f"bytes={start}-")] if start else []
        async with self._upstreams.ask(part.upstream, target, *headers) as answer:
            check_range(answer, start, size)
            receiver = BodyReceiver(answer, BodyDeadline(limits.window_s, min_rate, time.monotonic()), count)
            try:
                await writer.receive(receiver.pull)
            finally:
                receiver.report()
            if receiver.failure is not None and answer.left:
                raise receiver.failure

    async def _finish(self, writer: ShardWriter, parts: list[ShardPart]) -> None:
        self.arrived = True
        try:
            await self._await_hash()
            await writer.finish()
        except ShardError as error:
            self._blame(parts, str(error))
            return
        for part in parts:
            if part.seconds is not None:
                part.upstream.counts.shards += 1
                self.pace_s = part.seconds / part.num_bytes
                self._upstreams.record_success(part.upstream, part.num_bytes, part.seconds)

    async def _await_hash(self) -> None:
        """Wait until the manifest includes the hash of this shard."""
        with self._upstreams.wait_for(f"the hashes of version {self.entry.version}"):
            while self.blob.hash_of(self.index) is None:
                await wait_growth(self.entry)

    def _record_loss(self) -> None:
        """Record how slow the upstream was that another one overtook."""
        if self.part is not None and self._hedge_task is not None:
            self._upstreams.record_rate(self.part.upstream, self.part.num_bytes, _now() - self.part.begun)

    def _blame(self, parts: list[ShardPart], reason: str) -> None:
        senders = {part.upstream for part in parts}
        if len(senders) > 1:
            self._mixing = False
            return
        with self._upstreams.charge(senders.pop(), self.entry.digest):
            raise InvalidDataError(f"sent a wrong shard {self.index} of version {self.entry.version} ({reason})")

    async def _run_hedge(self, upstream: Upstream) -> None:
        """Run a second attempt, written separately from the first; the first is cancelled if this one wins."""
        part = ShardPart(upstream, _now())
        with self.blob.start(self.index, spare=True) as writer:
            try:
                await self._transfer(part, writer)
                if writer.written == writer.size:
                    await self._finish(writer, [part])
            except StaleError:
                return
        if self.blob.has(self.index) and self._main_task is not None:
            self._record_loss()
            self._main_task.cancel()

    def _raise_failure(self) -> None:
        """Raise the exception that ended the work, unless the shard has arrived anyway."""
        if self.blob.has(self.index):
            return
        for task in (self._main_task, self._hedge_task):
            if task is not None and task.done() and not task.cancelled():
                task.result()

    async def _cancel_tasks(self) -> None:
        tasks = [task for task in (self._main_task, self._hedge_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _now() -> float:
    return asyncio.get_running_loop().time()
