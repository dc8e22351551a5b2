"""Bringing a store up to a version: the tasks that fetch, and a decision that is repeated whenever something changes.

    find a target -> complete it; or abandon it: it is gone, a newer one is cheaper, or it makes no progress
    to complete it: plan -> first step (full: fetch; delta: fetch, apply) -> plan again ... -> complete

Invariants:
- after every step the plan is made again from the current state, and every step either completes a version or rules out
  a delta, so planning ends;
- nothing counts before its hashes are verified: a delta on a wrong or damaged parent costs one log line, its correct
  shards are kept, and the rest is fetched;
- a version that no upstream has any more is not waited for, and one without progress only if there is no other;
- however it ends, nothing is left running, and what is on disk stays.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from dataclasses import asdict, dataclass
from typing import Unpack

from shoal.errors import ConfigError
from shoal.shardcast.delta.apply import make_full
from shoal.shardcast.errors import DeltaError, ShardError, StaleError
from shoal.shardcast.fetch.plan import LISTING_S, FetchStep, StallDetector, TargetSelector
from shoal.shardcast.fetch.scheduler import ShardScheduler
from shoal.shardcast.fetch.upstream_stats import RequestCounts
from shoal.shardcast.fetch.upstreams import GoneError, UpstreamOptions, UpstreamPool, wait_growth
from shoal.shardcast.fetch.watch import Watcher
from shoal.shardcast.store.blob import Blob
from shoal.shardcast.store.store import StoredVersion, VersionStore
from shoal.util.aio import wait_any

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_MANIFEST_POLL_S = 0.02
SETTLE_S = (10.0, 1e8)
"""Timeout for a delta that is still being encoded: seconds, plus one second per this many bytes of the full version."""


@dataclass(slots=True)
class UpstreamShare(RequestCounts):
    """The statistics of one upstream."""

    url: str = ""
    weight: float = 0.0
    """its share of the draws, 0 to 1"""


@dataclass(frozen=True, slots=True)
class PullProgress:
    """A snapshot of the progress of a pull."""

    version: int | None
    """the version being fetched, if any"""
    stage: str
    """idle, waiting, full, delta or applying"""
    bytes_done: int
    bytes_total: int
    rate: float
    """bytes per second received, over the last few seconds"""
    eta_s: float | None
    """seconds left at that rate; None if unknown"""
    waiting_for: str | None
    """description of what currently blocks the pull"""
    upstreams: tuple[UpstreamShare, ...] = ()


class FetchOptions(UpstreamOptions, total=False):
    """Options of a `Puller`, as its owners pass them on."""

    in_flight: int
    """number of shards fetched concurrently"""
    deltas: bool


class Puller:
    """Fetches versions into a store. Use it as `async with Puller(store, urls) as puller`."""

    def __init__(
        self,
        store: VersionStore,
        urls: Iterable[str],
        *,
        in_flight: int = 4,
        deltas: bool = True,
        **options: Unpack[UpstreamOptions],
    ) -> None:
        self.store = store
        self.upstreams = UpstreamPool(urls, **options)
        self.scheduler = ShardScheduler(self.upstreams, in_flight=in_flight)
        self.watcher = Watcher(store, self.upstreams)
        self._selector = TargetSelector(store, self.upstreams, deltas=deltas)
        self._current: tuple[StoredVersion, str] | None = None
        """the version being worked on, and how: waiting, full, delta or applying"""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Puller":
        self._tasks = [asyncio.create_task(self.scheduler.run()), asyncio.create_task(self.watcher.run())]
        try:
            await self.upstreams.probe_all(LISTING_S)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop fetching; what is on disk stays. Closing twice is harmless."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.upstreams.close()

    async def pull(self, version: int | None = None) -> StoredVersion:
        """Complete that version, or the newest. `GoneError` if that version is no longer available.

        A newest version without progress for `FetchDeadlines.stall_s` is abandoned for the next one with progress.
        """
        while True:
            target = await self._find_target(version)
            if target.ready:
                return target
            try:
                return await self._complete(target, fixed=version is not None)
            except (GoneError, StaleError) as error:
                logger.info(f"version {target.version}: {error}")
            except _RetargetError as error:
                logger.info(str(error))

    async def follow(self) -> AsyncGenerator[StoredVersion, None]:
        """Yield versions as they become complete, always the newest; versions that were overtaken are skipped."""
        last = (-1, -1)
        while True:
            entry = await self.pull()
            if (entry.version, entry.serial) > last:
                last = (entry.version, entry.serial)
                yield entry
                continue
            with self.upstreams.wait_for("a newer version"):
                await self._wait_change()

    def revive_watcher(self) -> None:
        """Watch for versions again after an error of the disk stopped that."""
        if self._tasks[-1].done():
            self._tasks[-1] = asyncio.create_task(self.watcher.run())

    def check_tasks(self) -> None:
        """Raise the exception that ended an essential task: a disk error, or a bug."""
        for task in self._tasks:
            if task.done():
                task.result()

    def new_stall_detector(self) -> StallDetector:
        """A detector for missing progress."""
        return StallDetector(self.upstreams.deadlines.stall_s, self.upstreams.clock)

    @property
    def progress(self) -> PullProgress:
        """The current progress."""
        rate = self.upstreams.window.rate
        entry, stage = self._current or (None, "idle")
        blob = None if entry is None else entry.delta if stage in ("delta", "applying") else entry.full
        total = 0 if blob is None else blob.layout.total
        done = 0 if blob is None else min(total, self.scheduler.count_arrived(blob))
        waits = list(self.upstreams.waits.values())
        return PullProgress(
            version=None if entry is None else entry.version,
            stage=stage,
            bytes_done=done,
            bytes_total=total,
            rate=rate,
            eta_s=(total - done) / rate if rate > 1 and total else None,
            waiting_for=waits[-1] if waits and not self.upstreams.is_moving() and stage != "applying" else None,
            upstreams=self._list_shares(),
        )

    def _list_shares(self) -> tuple[UpstreamShare, ...]:
        weights = self.upstreams.weigh_all()
        total = sum(weights.values())
        return tuple(
            UpstreamShare(url=str(upstream), weight=weight / total, **asdict(upstream.counts))
            for upstream, weight in weights.items()
        )

    async def _find_target(self, version: int | None) -> StoredVersion:
        choose = self._selector
        while True:
            target = choose.choose_newest() if version is None else choose.choose_version(version)
            if target is not None:
                return target
            if all(upstream.denied and not upstream.listed for upstream in self.upstreams.all):
                raise ConfigError("every source requires a ticket or rejected the given one; see --ticket")
            with self.upstreams.wait_for(choose.describe_wait(version)):
                await self._wait_change()

    async def _complete(self, target: StoredVersion, *, fixed: bool) -> StoredVersion:
        """Work towards the target, but stop when it is gone or another version is the better target."""
        detector = self.new_stall_detector()
        execute = asyncio.create_task(self._execute(target))
        try:
            while not execute.done():
                await self._wait_change(execute)
                if execute.done():
                    break
                if target.gone:
                    raise GoneError("the version was replaced or dropped")
                if not fixed:
                    self._reconsider(target, detector)
            return execute.result()
        finally:
            execute.cancel()
            await asyncio.gather(execute, return_exceptions=True)

    def _reconsider(self, target: StoredVersion, detector: StallDetector) -> None:
        """Raise `_RetargetError` if another version is the better target."""
        if (newer := self._selector.find_better(target)) is not None:
            raise _RetargetError(f"abandoning version {target.version} for version {newer}")
        entry, stage = self._current or (target, "idle")
        what = (entry.digest, stage)
        if not detector.is_over(what, self._count_progress(target)) or stage == "applying":
            return  # applying needs no upstream
        self._selector.stalls.add(target)
        other = self._selector.choose_newest()
        if other is not None and other is not target:
            seconds = self.upstreams.deadlines.stall_s
            raise _RetargetError(
                f"abandoning version {target.version} for version {other.version}: no progress for {seconds:.0f} s"
            )

    def _count_progress(self, target: StoredVersion) -> int:
        """A number that grows with every line and byte of what is being worked on."""
        entries = {target, self._current[0]} if self._current else {target}
        arrived = sum(self.scheduler.count_arrived(blob) for entry in entries for blob in entry.blobs)
        return arrived + sum(len(entry.log.lines) for entry in entries)

    async def _execute(self, target: StoredVersion) -> StoredVersion:
        """Complete a version; `GoneError` if that is no longer possible."""
        try:
            with target.hold():
                await self._await_manifests(target)
                while not target.ready:
                    steps = self._selector.plan_fetch(target).steps
                    await self._run_step(next(iter(steps), FetchStep(target.version, "full")))
        finally:
            self._current = None
        return target

    async def _await_manifests(self, target: StoredVersion) -> None:
        self._current = (target, "waiting")
        with self.upstreams.wait_for(f"the manifests needed for version {target.version}"):
            while not self._selector.is_plannable(target):
                await asyncio.sleep(_MANIFEST_POLL_S)

    async def _run_step(self, step: FetchStep) -> None:
        entry = self.store.find(step.version)
        assert entry is not None, "the plan must name known entries"
        with entry.hold():
            if step.blob == "delta":
                await self._complete_by_delta(entry)
                return
            await self._fetch(entry.full)
            await self._await_end(entry)
            await entry.full.settle()

    async def _complete_by_delta(self, entry: StoredVersion) -> None:
        """Fetch a delta and apply it; if that does not lead to the version, the delta is ruled out."""
        self._current = (entry, "waiting")
        if not await self._await_delta(entry):
            self._selector.refuse_delta(entry)
            return
        if entry.delta is None:
            return  # the publisher decided against a delta
        await self._fetch(entry.delta)
        await entry.delta.settle()
        await self._await_end(entry)
        self._current = (entry, "applying")
        parent = self._selector.find_parent(entry)
        if parent is None or not parent.complete:
            return
        with parent.hold():
            missing = await self._apply(parent, entry)
        if missing:
            self._selector.refuse_delta(entry)
            logger.warning(f"version {entry.version}: {missing} shards built from its delta are wrong, fetching them")
        else:
            await entry.full.settle()

    async def _fetch(self, blob: Blob) -> None:
        self._current = (blob.entry, blob.name)
        order = self.scheduler.order(blob)
        try:
            await order.done
        finally:
            self.scheduler.cancel(order)

    async def _apply(self, parent: StoredVersion, entry: StoredVersion) -> int:
        """Build the full blob from its parent; returns the number of wrong shards."""
        try:
            return await make_full([parent, entry])
        except (DeltaError, ShardError) as error:
            logger.warning(f"version {entry.version}: cannot use its delta ({error})")
            return entry.full.num_missing

    async def _await_end(self, entry: StoredVersion) -> None:
        with self.upstreams.wait_for(f"the end of the manifest of version {entry.version}"):
            while not entry.log.ended:
                await wait_growth(entry)

    async def _await_delta(self, entry: StoredVersion) -> bool:
        """Wait until the publisher announces whether there is a delta; False if that takes too long.

        The time runs from the last line of the manifest: a version may be published while it is still being written.
        """
        seconds, rate = SETTLE_S
        num_lines, deadline = -1, 0.0
        with self.upstreams.wait_for(f"the delta of version {entry.version} to be encoded"):
            while not entry.log.delta_settled:
                if len(entry.log.lines) > num_lines:
                    num_lines, deadline = len(entry.log.lines), _now() + seconds + entry.full.layout.total / rate
                if _now() > deadline:
                    return False
                await wait_growth(entry)
        return True

    async def _wait_change(self, *others: "asyncio.Task[StoredVersion]") -> None:
        """Wait for a change, the end of a task, or a while. Raises the exception of a task that ended."""
        await wait_any([self.store.changed, self.upstreams.changed], _POLL_S, *others, *self._tasks)
        self.check_tasks()


class _RetargetError(Exception):
    """The target was abandoned for another version; the text states why."""


def _now() -> float:
    return asyncio.get_running_loop().time()
