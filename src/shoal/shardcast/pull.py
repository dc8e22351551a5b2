"""Bringing a store up to a version: plan, fetch, apply, verify.

    find a target -> plan -> first step (full: fetch; delta: fetch, apply) -> plan again ... -> complete

Invariants:
- after every step the plan is made anew from what is there, and every step either completes a version or rules out a
  delta, so planning ends;
- nothing counts before its hashes held: a delta on a wrong or damaged parent costs one note, and what it got right
  stays; the rest is fetched;
- the target is left for a newer version only if that one costs no more than what is missing here. So a client that is
  behind goes straight to the newest, and one that is slow still finishes something;
- a version that no source has any more is not waited for.
"""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.shardcast.blob import Blob
from shoal.shardcast.crew import Crew, GoneError
from shoal.shardcast.errors import DeltaError, ShardError, StaleError
from shoal.shardcast.layout import is_single_pair
from shoal.shardcast.link import Deadlines
from shoal.shardcast.plan import Candidate, Step, plan_pull
from shoal.shardcast.pool import run_blocking
from shoal.shardcast.progress import Progress, RateMeter, SourceShare
from shoal.shardcast.pump import Pump
from shoal.shardcast.store import Entry, Store
from shoal.shardcast.watch import Watcher

PATIENCE_S = 1.0
"""How long the slower sources may take to be measured, and to be listed, before the others are enough."""
SETTLE_S = (10.0, 1e8)
"""How long a delta still being encoded is waited for: seconds, and bytes of the full version per second more."""
_LOOK_S = 0.5


class Puller:
    """Fetches versions into a store. Use it as `async with Puller(store, urls) as puller`."""

    def __init__(
        self,
        store: Store,
        urls: Iterable[str],
        *,
        in_flight: int = 4,
        deltas: bool = True,
        deadlines: Deadlines | None = None,
        ticket: str | None = None,
        rng: random.Random | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.store = store
        self.crew = Crew(urls, deadlines=deadlines, ticket=ticket, rng=rng, note=note)
        self.pump = Pump(self.crew, in_flight=in_flight)
        self.watcher = Watcher(store, self.crew)
        self._deltas = deltas
        self._note = note
        self._refused: set[str] = set()
        """digests of versions whose delta is not to be used"""
        self._tasks: list[asyncio.Task[None]] = []
        self._begun = 0.0
        self._current: tuple[Entry, str] | None = None
        self._meter = RateMeter()

    async def __aenter__(self) -> "Puller":
        self._begun = _now()
        self._tasks = [asyncio.create_task(self.pump.run()), asyncio.create_task(self.watcher.run())]
        try:
            await self.crew.probe_all(PATIENCE_S)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop fetching; what is on disk stays. Closing twice is harmless."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.crew.close()

    async def pull(self, version: int | None = None) -> Entry:
        """That version, or the newest there is, complete. `GoneError` if that version is not to be had any more."""
        while True:
            target = await self._find_target(version)
            if _is_ready(target):
                return target
            try:
                return await self._reach(target, fixed=version is not None)
            except (GoneError, StaleError) as error:
                self._note(f"version {target.version}: {error}")
            except _NewerError as error:
                self._note(f"version {target.version} is left for version {error.version}")

    async def follow(self) -> AsyncIterator[Entry]:
        """Versions as they become complete, always the newest; those that were overtaken are left out."""
        last = (-1, -1)
        while True:
            entry = await self.pull()
            if (entry.version, entry.serial) > last:
                last = (entry.version, entry.serial)
                yield entry
                continue
            with self.crew.wait_for("a newer version"):
                await self._wait_change()

    def revive_watcher(self) -> None:
        """Look for versions again after an error of the disk ended that."""
        if self._tasks[-1].done():
            self._tasks[-1] = asyncio.create_task(self.watcher.run())

    def check_tasks(self) -> None:
        """Raise what ended a task that must not end: a disk that refuses, or a bug."""
        for task in self._tasks:
            if task.done():
                task.result()

    @property
    def progress(self) -> Progress:
        """How far it is. Look a few times per second: the rate is measured from look to look."""
        rate = self._meter.update(self.crew.received_bytes)
        entry, stage = self._current or (None, "idle")
        done = total = 0
        if entry is not None and (blob := _find_blob(entry, stage)) is not None:
            total = blob.layout.total
            done = min(total, blob.have_bytes + self.pump.count_partial(entry, blob.name))
        waits = list(self.crew.waits.values())
        return Progress(
            version=None if entry is None else entry.version,
            stage=stage,
            bytes_done=done,
            bytes_total=total,
            rate=rate,
            eta_s=(total - done) / rate if rate > 1 and total else None,
            waiting_for=waits[-1] if waits and not self.pump.is_moving() and stage != "applying" else None,
            sources=self._list_shares(),
        )

    def _list_shares(self) -> tuple[SourceShare, ...]:
        weights = self.crew.book.weigh_all()
        total = sum(weights.values())
        return tuple(
            SourceShare(
                url=str(source),
                bytes=source.tally.bytes,
                shards=source.tally.shards,
                failures=source.tally.failures,
                wrong=source.tally.wrong,
                weight=weight / total,
                reason=source.tally.reason,
            )
            for source, weight in weights.items()
        )

    # Which version.

    async def _find_target(self, version: int | None) -> Entry:
        while True:
            target = self._choose_newest() if version is None else self._choose_version(version)
            if target is not None:
                return target
            with self.crew.wait_for(self._phrase_wait(version)):
                await self._wait_change()

    def _choose_newest(self) -> Entry | None:
        """The newest version that is here or announced, once enough sources have been heard."""
        return max(self._list_known(), key=lambda entry: entry.version, default=None) if self._is_informed() else None

    def _choose_version(self, version: int) -> Entry | None:
        known = self._list_known()
        for entry in known:
            if entry.version == version:
                return entry
        newest = max((entry.version for entry in known), default=-1)
        if self._is_informed() and newest > version:
            raise GoneError(f"version {version} is not to be had any more; the newest is {newest}")
        return None

    def _list_known(self) -> list[Entry]:
        entries = [entry for entry in self.store.entries() if not entry.gone]
        return [entry for entry in entries if entry.complete or self.crew.book.list_holders(entry.digest)]

    def _is_informed(self) -> bool:
        listed = len(self.watcher.listed)
        return listed == len(self.crew.book.sources) or (listed > 0 and _now() - self._begun > PATIENCE_S)

    def _phrase_wait(self, version: int | None) -> str:
        if self.watcher.listed:
            return "a version to be published" if version is None else f"version {version} to be published"
        reasons = [f"{source} ({source.tally.reason or 'no answer yet'})" for source in self.crew.book.sources]
        return "any source to answer: " + ", ".join(reasons)

    # The way there.

    async def _reach(self, target: Entry, *, fixed: bool) -> Entry:
        """Walk to the target, but stop when it is gone or a newer version is the better goal."""
        walk = asyncio.create_task(self._walk(target))
        try:
            while not walk.done():
                await self._wait_change(walk)
                if target.gone and not walk.done():
                    raise GoneError("it was replaced or dropped")
                if not fixed and not walk.done() and (newer := self._find_better(target)) is not None:
                    raise _NewerError(newer)
            return walk.result()
        finally:
            walk.cancel()
            await asyncio.gather(walk, return_exceptions=True)
            self._current = None

    def _find_better(self, target: Entry) -> int | None:
        """A newer version that costs no more than what is missing of the target."""
        newest = self._choose_newest()
        if newest is None or newest.version <= target.version:
            return None
        candidates = self._list_candidates()
        if target.version not in candidates:
            return newest.version
        plan = plan_pull(candidates, newest.version)
        if any(step.version == target.version for step in plan.steps):
            return None
        return newest.version if plan.cost <= plan_pull(candidates, target.version).cost else None

    async def _walk(self, target: Entry) -> Entry:
        with target.hold():
            while not _is_ready(target):
                candidates = self._list_candidates()
                if target.version not in candidates:
                    raise GoneError("no source has this version any more")
                step = next(iter(plan_pull(candidates, target.version).steps), Step(target.version, "full"))
                entry = self.store.find(step.version)
                assert entry is not None, "the plan names entries"
                with entry.hold():
                    await (self._take_full(entry) if step.blob == "full" else self._take_delta(entry))
        return target

    def _list_candidates(self) -> dict[int, Candidate]:
        return {entry.version: self._describe_entry(entry) for entry in self._list_known()}

    def _describe_entry(self, entry: Entry) -> Candidate:
        log, delta = entry.log, entry.delta
        parent = self._find_parent(entry)
        return Candidate(
            version=entry.version,
            parent=None if parent is None else parent.version,
            anchor=log.head.anchor,
            full_bytes=entry.full.layout.total - entry.full.have_bytes,
            delta_bytes=None if delta is None else delta.layout.total - delta.have_bytes,
            held=entry.complete,
        )

    def _find_parent(self, entry: Entry) -> Entry | None:
        """The version that the entry's delta can be applied to, as far as is known by now."""
        log = entry.log
        if not self._deltas or log.head.parent is None or entry.digest in self._refused:
            return None
        if log.delta_settled and log.delta is None:
            return None
        parent = self.store.find(log.head.parent)
        if parent is None or parent.gone:
            return None
        if log.parent_root is not None and parent.log.root not in (None, log.parent_root):
            return None  # the parent was published anew after the delta was made
        return parent

    async def _take_full(self, entry: Entry) -> None:
        await self._fetch(entry, "full")
        await self._await_end(entry)
        await entry.full.settle()

    async def _take_delta(self, entry: Entry) -> None:
        """Fetch a delta and apply it; if that does not lead to the version, it is ruled out."""
        self._current = (entry, "waiting")
        if not await self._await_delta(entry):
            self._refused.add(entry.digest)
            return
        if entry.delta is None:
            return  # the publisher decided against one
        await self._fetch(entry, "delta")
        await entry.delta.settle()
        self._current = (entry, "applying")
        await self._await_end(entry)
        parent = self._find_parent(entry)
        if parent is None or not parent.complete:
            return
        with parent.hold():
            missing = await self._apply(parent, entry)
        if missing:
            self._refused.add(entry.digest)
            self._note(f"version {entry.version}: its delta left {missing} shards wrong, they are fetched in full")
        else:
            await entry.full.settle()

    async def _fetch(self, entry: Entry, name: str) -> None:
        self._current = (entry, name)
        order = self.pump.order(entry, name)
        try:
            await order.done
        finally:
            self.pump.cancel(order)

    async def _apply(self, parent: Entry, entry: Entry) -> int:
        """Build the full blob from its parent; the number of shards that are not right."""
        assert entry.delta is not None, "the delta is there"
        built = entry.folder / "built"
        try:
            await run_blocking(None, build_full, parent.full, entry.delta.folder, entry.full, built)
            return await entry.full.take_over(built)
        except (DeltaError, ShardError) as error:
            self._note(f"version {entry.version}: its delta cannot be used ({error})")
            return entry.full.num_missing
        finally:
            await run_blocking(None, shutil.rmtree, built, True)

    # Waiting.

    async def _wait_change(self, *others: "asyncio.Task[Entry]") -> None:
        """Until versions or sources change, one of the others ends, or a while passed. Raises what broke our tasks."""
        waiters = [self.store.changed.wait(), self.crew.changed.wait()]
        waited: set[asyncio.Future[Any]] = {*waiters, *others, *self._tasks}
        try:
            await asyncio.wait(waited, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
        self.check_tasks()

    async def _await_end(self, entry: Entry) -> None:
        with self.crew.wait_for(f"the end of the manifest of version {entry.version}"):
            while not entry.log.ended:
                await self._await_growth(entry, _LOOK_S)

    async def _await_delta(self, entry: Entry) -> bool:
        """Wait until the publisher said whether there is a delta; False if that takes too long."""
        seconds, rate = SETTLE_S
        deadline = _now() + seconds + entry.full.layout.total / rate
        with self.crew.wait_for(f"the delta of version {entry.version} to be encoded"):
            while not entry.log.delta_settled:
                if _now() > deadline:
                    return False
                await self._await_growth(entry, _LOOK_S)
        return True

    async def _await_growth(self, entry: Entry, seconds: float) -> None:
        if entry.gone:
            raise GoneError("it was replaced or dropped")
        waiter = entry.grown.wait()
        await asyncio.wait({waiter}, timeout=seconds)
        waiter.cancel()


class _NewerError(Exception):
    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


def build_full(parent: Blob, delta: Path, full: Blob, built: Path) -> None:
    """Apply a delta to the parent's files and leave the result in the folder `built`, under the names of `full`.

    Blocking. Between versions of one file each, the names do not matter.
    """
    from shoal.shardcast.delta import apply_delta  # numpy and pyarrow: dear at start, and not every client needs them

    shutil.rmtree(built, ignore_errors=True)
    limit = full.layout.total
    if not is_single_pair(parent.layout, full.layout):
        apply_delta(parent.folder, delta, built, max_bytes=limit, sync=False)
        return
    built.mkdir()
    old, new = parent.layout.files[0].name, full.layout.files[0].name
    apply_delta(parent.path_of(old), delta, built / new, max_bytes=limit, sync=False)


def _is_ready(entry: Entry) -> bool:
    return entry.complete and entry.full.settled


def _find_blob(entry: Entry, stage: str) -> Blob | None:
    return entry.delta if stage in ("delta", "applying") else entry.full


def _now() -> float:
    return asyncio.get_running_loop().time()
