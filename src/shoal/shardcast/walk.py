"""The way to a version: plan, fetch, apply, verify.

    plan -> first step (full: fetch; delta: fetch, apply) -> plan again ... -> complete

Invariants:
- after every step the plan is made anew from what is there, and every step either completes a version or rules out a
  delta, so planning ends;
- nothing counts before its hashes held: a delta on a wrong or damaged parent costs one note, and what it got right
  stays; the rest is fetched.
"""

import asyncio
from collections.abc import Callable

from shoal.shardcast.build import make_full
from shoal.shardcast.choice import Chooser
from shoal.shardcast.crew import Crew, GoneError
from shoal.shardcast.errors import DeltaError, ShardError
from shoal.shardcast.plan import Step
from shoal.shardcast.pump import Pump
from shoal.shardcast.store import Entry, Store

SETTLE_S = (10.0, 1e8)
"""How long a delta still being encoded is waited for: seconds, and bytes of the full version per second more."""
_LOOK_S = 0.5
_LEARN_S = 0.02


class Walker:
    """Takes one version after the other to where it is complete."""

    def __init__(self, store: Store, crew: Crew, pump: Pump, chooser: Chooser, note: Callable[[str], None]) -> None:
        self._store = store
        self._crew = crew
        self._pump = pump
        self._chooser = chooser
        self._note = note
        self.current: tuple[Entry, str] | None = None
        """what is being worked on, and how: waiting, full, delta or applying"""

    async def walk(self, target: Entry) -> Entry:
        """Complete a version; `GoneError` if that cannot be any more."""
        try:
            with target.hold():
                await self._learn_way(target)
                while not is_ready(target):
                    steps = self._chooser.plan_way(target).steps
                    await self._take(next(iter(steps), Step(target.version, "full")))
        finally:
            self.current = None
        return target

    def count_progress(self, target: Entry) -> int:
        """A number that grows with every line and byte of what is being worked on."""
        entries = {target, self.current[0]} if self.current else {target}
        blobs = [(entry, blob) for entry in entries for blob in entry.blobs]
        held = sum(blob.have_bytes + self._pump.count_partial(entry, blob.name) for entry, blob in blobs)
        return held + sum(len(entry.log.lines) for entry in entries)

    async def _learn_way(self, target: Entry) -> None:
        self.current = (target, "waiting")
        with self._crew.wait_for(f"the manifests on the way to version {target.version}"):
            while not self._chooser.is_clear(target):
                await asyncio.sleep(_LEARN_S)

    async def _take(self, step: Step) -> None:
        entry = self._store.find(step.version)
        assert entry is not None, "the plan names entries"
        with entry.hold():
            await (self._take_full(entry) if step.blob == "full" else self._take_delta(entry))

    async def _take_full(self, entry: Entry) -> None:
        await self._fetch(entry, "full")
        await self._await_end(entry)
        await entry.full.settle()

    async def _take_delta(self, entry: Entry) -> None:
        """Fetch a delta and apply it; if that does not lead to the version, it is ruled out."""
        self.current = (entry, "waiting")
        if not await self._await_delta(entry):
            self._chooser.refuse_delta(entry)
            return
        if entry.delta is None:
            return  # the publisher decided against one
        await self._fetch(entry, "delta")
        await entry.delta.settle()
        await self._await_end(entry)
        self.current = (entry, "applying")
        parent = self._chooser.find_parent(entry)
        if parent is None or not parent.complete:
            return
        with parent.hold():
            missing = await self._apply(parent, entry)
        if missing:
            self._chooser.refuse_delta(entry)
            self._note(f"version {entry.version}: its delta left {missing} shards wrong, they are fetched in full")
        else:
            await entry.full.settle()

    async def _fetch(self, entry: Entry, name: str) -> None:
        self.current = (entry, name)
        order = self._pump.order(entry, name)
        try:
            await order.done
        finally:
            self._pump.cancel(order)

    async def _apply(self, parent: Entry, entry: Entry) -> int:
        """Build the full blob from its parent; the number of shards that are not right."""
        try:
            return await make_full([parent, entry])
        except (DeltaError, ShardError) as error:
            self._note(f"version {entry.version}: its delta cannot be used ({error})")
            return entry.full.num_missing

    async def _await_end(self, entry: Entry) -> None:
        with self._crew.wait_for(f"the end of the manifest of version {entry.version}"):
            while not entry.log.ended:
                await self._await_growth(entry)

    async def _await_delta(self, entry: Entry) -> bool:
        """Wait until the publisher said whether there is a delta; False if that takes too long."""
        seconds, rate = SETTLE_S
        deadline = _now() + seconds + entry.full.layout.total / rate
        with self._crew.wait_for(f"the delta of version {entry.version} to be encoded"):
            while not entry.log.delta_settled:
                if _now() > deadline:
                    return False
                await self._await_growth(entry)
        return True

    async def _await_growth(self, entry: Entry) -> None:
        if entry.gone:
            raise GoneError("it was replaced or dropped")
        waiter = entry.grown.wait()
        await asyncio.wait({waiter}, timeout=_LOOK_S)
        waiter.cancel()


def is_ready(entry: Entry) -> bool:
    """Whether a version is complete and under its final name."""
    return entry.complete and entry.full.settled


def _now() -> float:
    return asyncio.get_running_loop().time()
