"""Bringing a store up to a version: the tasks that fetch, and the choice made anew whenever something changes.

    find a target -> walk there -> complete; or leave it: it is gone, a newer one is cheaper, or it does not move

Invariants:
- a version that no source has any more is not waited for, and one that does not move only if there is no other;
- after whatever end nothing is left running, and what is on disk stays.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterable
from types import TracebackType
from typing import Any

from shoal.errors import ConfigError
from shoal.shardcast.blob import Blob
from shoal.shardcast.choice import PATIENCE_S, Chooser
from shoal.shardcast.crew import Crew, GoneError
from shoal.shardcast.errors import StaleError
from shoal.shardcast.link import Deadlines
from shoal.shardcast.patience import Patience
from shoal.shardcast.progress import Progress, RateMeter, SourceShare
from shoal.shardcast.pump import Pump
from shoal.shardcast.store import Entry, Store
from shoal.shardcast.walk import Walker, is_ready
from shoal.shardcast.watch import Watcher

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
        self._chooser = Chooser(store, self.crew, deltas=deltas)
        self._walker = Walker(store, self.crew, self.pump, self._chooser, note)
        self._note = note
        self._tasks: list[asyncio.Task[None]] = []
        self._meter = RateMeter()

    async def __aenter__(self) -> "Puller":
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
        """That version, or the newest there is, complete. `GoneError` if that version is not to be had any more.

        A newest one that does not move for `Deadlines.stall_s` is left for the next one that does.
        """
        while True:
            target = await self._find_target(version)
            if is_ready(target):
                return target
            try:
                return await self._reach(target, fixed=version is not None)
            except (GoneError, StaleError) as error:
                self._note(f"version {target.version}: {error}")
            except _LeftError as error:
                self._note(str(error))

    async def follow(self) -> AsyncGenerator[Entry, None]:
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
        entry, stage = self._walker.current or (None, "idle")
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

    async def _find_target(self, version: int | None) -> Entry:
        choose = self._chooser
        while True:
            target = choose.choose_newest() if version is None else choose.choose_version(version)
            if target is not None:
                return target
            if all(source.denied and not source.listed for source in self.crew.book.sources):
                raise ConfigError("every source asks for a ticket, or for another one: see --ticket")
            with self.crew.wait_for(choose.phrase_wait(version)):
                await self._wait_change()

    async def _reach(self, target: Entry, *, fixed: bool) -> Entry:
        """Walk to the target, but stop when it is gone or another version is the better goal."""
        patience = Patience(self.crew.deadlines.stall_s, self.crew.book.clock)
        walk = asyncio.create_task(self._walker.walk(target))
        try:
            while not walk.done():
                await self._wait_change(walk)
                if walk.done():
                    break
                if target.gone:
                    raise GoneError("it was replaced or dropped")
                if not fixed:
                    self._reconsider(target, patience)
            return walk.result()
        finally:
            walk.cancel()
            await asyncio.gather(walk, return_exceptions=True)

    def _reconsider(self, target: Entry, patience: Patience) -> None:
        """Raise `_LeftError` if another version is the better goal."""
        if (newer := self._chooser.find_better(target)) is not None:
            raise _LeftError(f"version {target.version} is left for version {newer}")
        entry, stage = self._walker.current or (target, "idle")
        what = (entry.digest, stage)
        if not patience.is_over(what, self._walker.count_progress(target)) or stage == "applying":
            return  # what is applied needs no source
        self._chooser.stalls.add(target)
        other = self._chooser.choose_newest()
        if other is not None and other is not target:
            seconds = self.crew.deadlines.stall_s
            raise _LeftError(
                f"version {target.version} is left for version {other.version}: nothing came of it for {seconds:.0f} s"
            )

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


class _LeftError(Exception):
    """The target was left for another version; the text says why."""


def _find_blob(entry: Entry, stage: str) -> Blob | None:
    return entry.delta if stage in ("delta", "applying") else entry.full
