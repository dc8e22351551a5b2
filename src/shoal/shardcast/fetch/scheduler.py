"""Keeps several shards in flight: decides which one to start next, and which to request a second time.

An order asks for all missing shards of one blob. Orders are served newest version first, deltas before full blobs, and
the shards of an order in ascending order, since every server up the tree has them in that order. Spare orders, for
blobs that nobody needs now, start a shard only while there is no other order. Shards that a peer is waiting for right
now (`hold_urgent`) bypass all of that; of two urgent shards the one of the newer version comes first.

Invariants:
- at most `in_flight` shards are being sent, not counting late ones (three times slower than the median), which would
  otherwise occupy all slots; late ones included, at most twice as many. Urgent shards have as many slots again, and
  only those: whatever is requested, orders make progress;
- a shard is urgent only while one of its callers waits. One peer has at most `MAX_PER_PEER` urgent requests, all
  together at most `MAX_URGENT` shards; requests beyond that are fetched with their blob;
- an urgent shard that is not ordered, and has not begun to arrive when its last caller leaves, is cancelled;
- shards beyond the known hashes are started only a few ahead;
- an order ends with its blob, with `GoneError`, with an `OSError` of the disk, or by `cancel`.
"""

import asyncio
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shoal.shardcast.errors import StaleError
from shoal.shardcast.fetch.shard import ShardJob
from shoal.shardcast.fetch.upstreams import GoneError, UpstreamPool
from shoal.shardcast.format.manifest import FULL
from shoal.shardcast.store.blob import Blob

MAX_URGENT = 1024
MAX_PER_PEER = 64

Key = tuple[Blob, int]
"""A shard: its blob and its number there."""


@dataclass(slots=True)
class _QueuedShard:
    num_callers: int = 0


class UrgentRequests:
    """Which peers wait for which shard."""

    def __init__(self) -> None:
        self._requests: dict[Key, _QueuedShard] = {}
        """in the order of their first request"""
        self._peers: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: Key) -> bool:
        return key in self._requests

    @contextmanager
    def hold(self, key: Key, peer: str, on_end: Callable[[], None]) -> Iterator[bool]:
        """Make the shard urgent while the block runs; False if there are too many. `on_end`: its last caller left."""
        if self._peers[peer] >= MAX_PER_PEER or (key not in self._requests and len(self) >= MAX_URGENT):
            yield False
            return
        request = self._requests.setdefault(key, _QueuedShard())
        request.num_callers += 1
        self._peers[peer] += 1
        try:
            yield True
        finally:
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]
            request.num_callers -= 1
            if not request.num_callers and self._requests.get(key) is request:
                del self._requests[key]
                on_end()

    def list_missing(self) -> list[Key]:
        """Urgent shards that are still missing, the most urgent first."""
        missing = [(blob, index) for blob, index in self._requests if not (blob.entry.gone or blob.has(index))]
        return sorted(missing, key=lambda key: -key[0].entry.version)

    def forget(self, key: Key) -> None:
        """Stop treating the shard as urgent: its callers have it, or get an error."""
        self._requests.pop(key, None)


LATE_FACTOR = 3.0
"""A transfer that is this many times slower than the median is late."""
LATE_S = 0.5
"""No transfer is late before this."""
FIRST_LATE_S = 3.0
"""Time after which a transfer is late while there is no median."""
MAX_HEDGES = 2
_TICK_S = 0.1
_MEDIAN_OF = 32

DiskRefusal = Callable[[Blob, OSError], None]
"""Called when the disk accepts no more of a blob."""


@dataclass(eq=False)
class FetchOrder:
    """All missing shards of one blob."""

    blob: Blob
    spare: bool
    """whether it yields to all others"""
    done: "asyncio.Future[None]" = field(repr=False)

    @property
    def rank(self) -> tuple[bool, int, bool]:
        return self.spare, -self.blob.entry.version, self.blob.name == FULL


class ShardScheduler:
    """Runs shard jobs for orders and urgent requests. `run` is its only task."""

    def __init__(self, upstreams: UpstreamPool, *, in_flight: int = 4) -> None:
        self._upstreams = upstreams
        self._in_flight = in_flight
        self._orders: list[FetchOrder] = []
        self._urgent = UrgentRequests()
        self._jobs: dict[Key, ShardJob] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._paces: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._wake = asyncio.Event()
        self._bug: BaseException | None = None
        self.on_refusal: DiskRefusal = lambda blob, error: None
        """for observers other than the owner of the order"""

    def order(self, blob: Blob, *, spare: bool = False) -> FetchOrder:
        """Fetch a blob; `done` completes when it has arrived."""
        order = FetchOrder(blob, spare, asyncio.get_running_loop().create_future())
        if blob.complete:
            order.done.set_result(None)
            return order
        self._orders.append(order)
        self._orders.sort(key=lambda order: order.rank)
        self._wake.set()
        return order

    def cancel(self, order: FetchOrder) -> None:
        """Withdraw an order; its shards in flight are cancelled unless another order needs them."""
        if order in self._orders:
            self._orders.remove(order)
        order.done.cancel()
        if self._is_ordered(order.blob):
            return
        for key, task in self._tasks.items():
            if key[0] is order.blob and key not in self._urgent:
                task.cancel()

    @contextmanager
    def hold_urgent(self, blob: Blob, index: int, peer: str) -> Iterator[bool]:
        """While the block runs, this peer waits for the shard; False if there are too many requests."""
        key = (blob, index)
        with self._urgent.hold(key, peer, lambda: self._end_urgent(key)) as taken:
            self._wake.set()
            yield taken

    def is_working(self, order: FetchOrder) -> bool:
        """Whether shards of an order are in flight."""
        return any(key[0] is order.blob for key in self._jobs)

    def is_wanted(self, blob: Blob) -> bool:
        """Whether missing shards of a blob have been requested, so that they are or soon will be written."""
        return self._is_ordered(blob) or any(key[0] is blob for key in [*self._jobs, *self._urgent.list_missing()])

    def count_arrived(self, blob: Blob) -> int:
        """Bytes of a blob that have arrived, including shards in flight."""
        jobs = [job for job in self._jobs.values() if job.blob is blob and not blob.has(job.index)]
        return blob.have_bytes + sum(job.written for job in jobs)

    async def run(self) -> None:
        """Work until cancelled, or until a bug ended a job; then nothing is left running."""
        try:
            while True:
                self._wake.clear()
                if self._bug is not None:
                    raise self._bug
                self._upstreams.late = {
                    job.part.upstream for job in self._jobs.values() if job.part and self._is_late(job)
                }
                self._start_jobs()
                if self._upstreams.late:
                    self._start_hedges()
                await self._pause()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _pause(self) -> None:
        """Wait until something happens; with work in flight also periodically, to detect late transfers."""
        try:
            async with asyncio.timeout(_TICK_S if self._orders or len(self._urgent) else None):
                await self._wake.wait()
        except TimeoutError:
            return

    def _start_jobs(self) -> None:
        """Start jobs while there are free slots."""
        for key in self._urgent.list_missing():
            if key in self._jobs:
                continue
            if not self._has_room(urgent=True):
                break
            self._start(key, urgent=True)
        for key in self._list_ordered():
            if not self._has_room(urgent=False):
                break
            self._start(key, urgent=False)

    def _start(self, key: Key, *, urgent: bool) -> None:
        job = ShardJob(self._upstreams, *key, self._count_sending, urgent)
        self._jobs[key] = job
        task = asyncio.create_task(job.run())
        self._tasks[key] = task
        task.add_done_callback(lambda task: self._reap(key, task))

    def _list_ordered(self) -> Iterator[Key]:
        """Shards to start for orders, the most wanted first."""
        for order in list(self._orders):
            blob = order.blob
            if blob.complete or blob.entry.gone:
                self._end(order, None if blob.complete else GoneError("the version was replaced or dropped"))
                continue
            if order.spare and not self._orders[0].spare:
                break
            end, log = len(blob.layout.shards), blob.entry.log
            if blob.name == FULL and not log.ended:
                end = log.num_hashes + 2 * self._in_flight  # from there on they are too far ahead of the known hashes
            for index in blob.missing():
                if index >= end:
                    break
                if (blob, index) not in self._jobs:
                    yield blob, index

    def _is_ordered(self, blob: Blob) -> bool:
        return any(order.blob is blob for order in self._orders)

    def _end_urgent(self, key: Key) -> None:
        """Nobody waits for this shard any more."""
        job = self._jobs.get(key)
        if job is not None and job.is_urgent and not self._is_ordered(job.blob) and not job.written:
            self._tasks[key].cancel()

    def _has_room(self, *, urgent: bool) -> bool:
        jobs = [job for job in self._jobs.values() if job.is_urgent == urgent]
        if len(jobs) >= 4 * self._in_flight:
            return False  # all wait for hashes
        sending = [job for job in jobs if not job.arrived]
        if len(sending) >= 2 * self._in_flight:
            return False
        return sum(not self._is_late(job) for job in sending) < self._in_flight

    def _count_sending(self) -> int:
        return max(1, sum(job.part is not None for job in self._jobs.values()))

    def _is_late(self, job: ShardJob) -> bool:
        if job.part is None:
            return False
        age = asyncio.get_running_loop().time() - job.part.begun
        if not self._paces:
            return age > FIRST_LATE_S
        size = job.blob.layout.shards[job.index].size
        return age > max(LATE_S, LATE_FACTOR * statistics.median(self._paces) * size)

    def _start_hedges(self) -> None:
        """Request late shards again from another upstream, unless the link is full anyway."""
        if sum(not job.arrived and not self._is_late(job) for job in self._jobs.values()) >= self._in_flight:
            return
        room = MAX_HEDGES - sum(job.is_hedged for job in self._jobs.values())
        for job in self._jobs.values():
            if room > 0 and not job.is_hedged and self._is_late(job):
                room -= job.hedge()

    def _reap(self, key: Key, task: "asyncio.Task[None]") -> None:
        """Handle the end of a job: record its pace, and fail its orders if they cannot continue."""
        job = self._jobs.pop(key)
        del self._tasks[key]
        self._wake.set()
        if task.cancelled():
            return
        self._urgent.forget(key)
        error = task.exception()
        if job.pace_s is not None:
            self._paces.append(job.pace_s)
        if error is not None and not isinstance(error, GoneError | StaleError | OSError):
            self._bug = error
        elif isinstance(error, OSError):
            self.on_refusal(job.blob, error)
        for order in list(self._orders):
            if order.blob is job.blob and (error is not None or job.blob.complete):
                self._end(order, error)

    def _end(self, order: FetchOrder, error: BaseException | None) -> None:
        self._orders.remove(order)
        if order.done.done():
            return
        if error is None:
            order.done.set_result(None)
        else:
            order.done.set_exception(error)
            order.done.exception()  # the owner of the order may be gone, and then nobody retrieves it
