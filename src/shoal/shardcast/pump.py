"""Keeps several shards in flight: what to start next, what to start once more.

An order asks for all missing shards of one blob. Orders are served newest version first, deltas before full blobs; the
shards of an order from the first to the last, as everyone up the tree has them in that order. Spare orders, for what
nobody needs now, begin a shard only while there is no other order. Shards that somebody is waiting for right now
(`urge`) need not wait for any of that.

Invariants:
- at most `in_flight` shards are being sent, not counting laggards (three times slower than the median), which would
  otherwise hold all places; laggards included, at most twice as many. Urgent shards have as many places again, and
  those only: whatever is asked for, orders go on;
- what was urgent and not ordered, and has not begun to come when its last caller leaves, is given up;
- shards beyond the hashes that are known are started only a few ahead;
- an order ends: with its blob, with `GoneError`, with an `OSError` of the disk, or by `cancel`.
"""

import asyncio
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shoal.shardcast.blob import Blob
from shoal.shardcast.crew import Crew, GoneError
from shoal.shardcast.errors import StaleError
from shoal.shardcast.job import ShardJob
from shoal.shardcast.store import Entry
from shoal.shardcast.urgent import Key, UrgentBook

LATE_FACTOR = 3.0
"""A transfer this many times slower than the median is late."""
LATE_S = 0.5
"""No transfer is late before this."""
FIRST_LATE_S = 3.0
"""Late, as long as there is no median."""
MAX_HEDGES = 2
MOVING_S = 2.0
_TICK_S = 0.1
_MEDIAN_OF = 32

DiskRefusal = Callable[[Entry, str, OSError], None]
"""Told when the disk takes no more of a blob."""


@dataclass(eq=False)
class Order:
    """All missing shards of one blob."""

    entry: Entry
    name: str
    spare: bool
    """whether it gives way to all others"""
    done: "asyncio.Future[None]" = field(repr=False)

    @property
    def blob(self) -> Blob:
        blob = self.entry.full if self.name == "full" else self.entry.delta
        assert blob is not None, "a delta is ordered only after its record came"
        return blob

    @property
    def rank(self) -> tuple[bool, int, bool]:
        return self.spare, -self.entry.version, self.name == "full"


class Pump:
    """Runs shard jobs for orders and urgent requests. `run` is its only task."""

    def __init__(self, crew: Crew, *, in_flight: int = 4) -> None:
        self._crew = crew
        self._in_flight = in_flight
        self._orders: list[Order] = []
        self._urgent = UrgentBook()
        self._extra: set[Key] = set()
        """jobs in the places of urgent shards"""
        self._jobs: dict[Key, ShardJob] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._paces: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._wake = asyncio.Event()
        self._bug: BaseException | None = None
        self._seen_bytes, self._moved_at = 0, -MOVING_S
        self.on_refusal: DiskRefusal = self._note_refusal
        self._noted: set[tuple[str, str]] = set()

    def order(self, entry: Entry, name: str, *, spare: bool = False) -> Order:
        """Fetch a blob; `done` tells when it is there."""
        order = Order(entry, name, spare, asyncio.get_running_loop().create_future())
        if order.blob.complete:
            order.done.set_result(None)
            return order
        self._orders.append(order)
        self._orders.sort(key=lambda order: order.rank)
        self._wake.set()
        return order

    def cancel(self, order: Order) -> None:
        """Take an order back; its shards under way are given up unless another order wants them."""
        if order in self._orders:
            self._orders.remove(order)
        order.done.cancel()
        wanted = {(other.entry.digest, other.name) for other in self._orders}
        for key, task in self._tasks.items():
            if key[:2] == (order.entry.digest, order.name) and key[:2] not in wanted and key not in self._urgent:
                task.cancel()

    @contextmanager
    def urge(self, entry: Entry, name: str, index: int, peer: str) -> Iterator[bool]:
        """While the block runs, this peer waits for the shard; False if it, or all together, wait for too many."""
        key = (entry.digest, name, index)
        with self._urgent.hold(entry, key, peer, lambda: self._end_urge(key)) as taken:
            self._wake.set()
            yield taken

    def is_working(self, order: Order) -> bool:
        """Whether shards of an order are under way."""
        return any(key[:2] == (order.entry.digest, order.name) for key in self._jobs)

    def is_wanted(self, entry: Entry, name: str) -> bool:
        """Whether anybody asked for shards of a blob that did not come yet, so that somebody writes, or soon will."""
        blob = (entry.digest, name)
        ordered = any((order.entry.digest, order.name) == blob for order in self._orders)
        return ordered or any(
            key[:2] == blob for key in [*self._jobs, *(key for key, _ in self._urgent.list_missing())]
        )

    def count_partial(self, entry: Entry, name: str) -> int:
        """Bytes that are there of shards under way."""
        jobs = [job for key, job in self._jobs.items() if key[:2] == (entry.digest, name)]
        return sum(job.written for job in jobs if not job.blob.has(job.index))

    def is_moving(self) -> bool:
        """Whether bytes came lately, so that there is nothing to explain."""
        moved = self._crew.received_bytes != self._seen_bytes
        now = asyncio.get_running_loop().time()
        if moved:
            self._seen_bytes, self._moved_at = self._crew.received_bytes, now
        return now - self._moved_at < MOVING_S

    async def run(self) -> None:
        """Work until cancelled, or until a bug of ours ended a job; then nothing is left running."""
        try:
            while True:
                self._wake.clear()
                if self._bug is not None:
                    raise self._bug
                self._crew.late = {job.part.source for job in self._jobs.values() if job.part and self._is_late(job)}
                self._start_jobs()
                if self._crew.late:
                    self._start_hedges()
                await self._pause()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _pause(self) -> None:
        """Until something happened; with work under way also now and then, to see what is late."""
        try:
            async with asyncio.timeout(_TICK_S if self._orders or len(self._urgent) else None):
                await self._wake.wait()
        except TimeoutError:
            return

    def _start_jobs(self) -> None:
        """Start what there is room for."""
        for key, entry in self._urgent.list_missing():
            if key in self._jobs:
                continue
            if not self._has_room(urgent=True):
                break
            self._extra.add(key)
            self._start(key, entry)
        for key, entry in self._list_ordered():
            if not self._has_room(urgent=False):
                break
            self._start(key, entry)

    def _start(self, key: Key, entry: Entry) -> None:
        job = ShardJob(self._crew, entry, key[1], key[2], self._count_sending)
        self._jobs[key] = job
        task = asyncio.create_task(job.run())
        self._tasks[key] = task
        task.add_done_callback(lambda task: self._reap(key, task))

    def _list_ordered(self) -> Iterator[tuple[Key, Entry]]:
        """Shards to start for orders, the most wanted first."""
        for order in list(self._orders):
            if order.blob.complete or order.entry.gone:
                self._close(order)
                continue
            if order.spare and not self._orders[0].spare:
                break
            end = self._find_end(order)
            for index in order.blob.missing():
                if index >= end:
                    break
                key = (order.entry.digest, order.name, index)
                if key not in self._jobs:
                    yield key, order.entry

    def _end_urge(self, key: Key) -> None:
        """Nobody waits for this shard any more."""
        ordered = any((order.entry.digest, order.name) == key[:2] for order in self._orders)
        if key in self._extra and not ordered and not self._jobs[key].written:
            self._tasks[key].cancel()

    def _find_end(self, order: Order) -> int:
        """Shards from here on are too far ahead of the known hashes."""
        if order.name == "full" and not order.entry.log.ended:
            return order.entry.log.num_hashes + 2 * self._in_flight
        return len(order.blob.layout.shards)

    def _has_room(self, *, urgent: bool) -> bool:
        jobs = [job for key, job in self._jobs.items() if (key in self._extra) == urgent]
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
        """Ask for what is late once more, elsewhere, unless what is not late fills the line anyway."""
        if sum(not job.arrived and not self._is_late(job) for job in self._jobs.values()) >= self._in_flight:
            return
        room = MAX_HEDGES - sum(job.hedged for job in self._jobs.values())
        for job in self._jobs.values():
            if room > 0 and not job.hedged and self._is_late(job):
                room -= job.hedge()

    def _reap(self, key: Key, task: "asyncio.Task[None]") -> None:
        """A job ended: remember its pace, and tell its orders if they cannot go on."""
        job = self._jobs.pop(key)
        del self._tasks[key]
        self._extra.discard(key)
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
            self.on_refusal(job.entry, job.name, error)
        for order in list(self._orders):
            if (order.entry.digest, order.name) == key[:2]:
                if error is not None:
                    self._fail(order, error)
                elif order.blob.complete:
                    self._close(order)

    def _note_refusal(self, entry: Entry, name: str, error: OSError) -> None:
        """Say it once, though it happens to every shard under way."""
        if (entry.digest, name) not in self._noted:
            self._noted.add((entry.digest, name))
            self._crew.note(f"version {entry.version}: {error.strerror or error}")

    def _close(self, order: Order) -> None:
        if order.entry.gone and not order.blob.complete:
            self._fail(order, GoneError("the version was replaced or dropped"))
            return
        self._orders.remove(order)
        if not order.done.done():
            order.done.set_result(None)

    def _fail(self, order: Order, error: BaseException) -> None:
        self._orders.remove(order)
        if not order.done.done():
            order.done.set_exception(error)
            order.done.exception()  # whoever ordered may be gone by now, and then nobody asks
