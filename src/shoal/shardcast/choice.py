"""Which version a client goes for, and what it could be built from.

Known is what is complete here or announced by a source. Of these the newest is wanted, unless it has not moved for a
while (`StallBook`): then the newest that does.

Invariants:
- nothing is chosen, and nothing said to be gone, before the sources have been heard, or were given the time to speak;
- a target is left for a newer version only if that one costs no more than what is missing of the target. So a client
  that is behind goes straight to the newest, and one that is slow still finishes something.
"""

from shoal.shardcast.crew import Crew, GoneError
from shoal.shardcast.patience import StallBook
from shoal.shardcast.plan import Candidate, Plan, plan_pull
from shoal.shardcast.store import Entry, Store

PATIENCE_S = 1.0
"""How long the slower sources may take to be measured, and to be listed, before the others are enough."""


class Chooser:
    """What there is to choose from in a store and from its sources."""

    def __init__(self, store: Store, crew: Crew, *, deltas: bool) -> None:
        self._store = store
        self._crew = crew
        self._deltas = deltas
        self._begun = crew.book.clock()
        self._refused: set[str] = set()
        """digests of versions whose delta is not to be used"""
        self.stalls = StallBook(crew.book, crew.deadlines.stall_s)

    def choose_newest(self) -> Entry | None:
        """The newest version that moves, or the newest of all if none does; None before enough sources are heard."""
        if not self._is_informed():
            return None
        known = self._list_known()
        moving = [entry for entry in known if entry.complete or not self.stalls.is_stalled(entry)]
        return max(moving or known, key=lambda entry: entry.version, default=None)

    def choose_version(self, version: int) -> Entry | None:
        """That version, None if it may still come; `GoneError` once every source has spoken and none has it."""
        known = self._list_known()
        for entry in known:
            if entry.version == version:
                return entry
        newest = max((entry.version for entry in known), default=-1)
        if newest < version or not all(source.heard for source in self._crew.book.sources):
            return None
        silent = [str(source) for source in self._crew.book.sources if not source.listed]
        hint = f" (not heard: {', '.join(silent)})" if silent else ""
        raise GoneError(f"version {version} is not to be had any more; the newest is {newest}{hint}")

    def find_better(self, target: Entry) -> int | None:
        """A newer version that costs no more than what is missing of the target."""
        newest = self.choose_newest()
        if newest is None or newest.version <= target.version:
            return None
        candidates = self._list_candidates()
        if target.version not in candidates:
            return newest.version
        plan = plan_pull(candidates, newest.version)
        if any(step.version == target.version for step in plan.steps):
            return None
        return newest.version if plan.cost <= plan_pull(candidates, target.version).cost else None

    def plan_way(self, target: Entry) -> Plan:
        """The cheapest way to a version; `GoneError` if no source has it any more."""
        candidates = self._list_candidates()
        if target.version not in candidates:
            raise GoneError("no source has this version any more")
        return plan_pull(candidates, target.version)

    def is_clear(self, target: Entry) -> bool:
        """Whether enough is known to plan: of the way back to a held version or an anchor, or no time is left.

        Who has just begun holds heads whose manifests are still being read, and would fetch in full what deltas give.
        """
        if self._crew.book.clock() - self._begun > PATIENCE_S:
            return True
        entry: Entry | None = target
        while entry is not None and not entry.complete and not entry.log.head.anchor:
            if not entry.log.delta_settled:
                return False
            entry = self.find_parent(entry)
        return True

    def find_parent(self, entry: Entry) -> Entry | None:
        """The version that the entry's delta can be applied to, as far as is known by now."""
        log = entry.log
        if not self._deltas or log.head.parent is None or entry.digest in self._refused:
            return None
        if log.delta_settled and log.delta is None:
            return None
        parent = self._store.find(log.head.parent)
        if parent is None or parent.gone:
            return None
        if log.parent_root is not None and parent.log.root not in (None, log.parent_root):
            return None  # the parent was published anew after the delta was made
        return parent

    def refuse_delta(self, entry: Entry) -> None:
        """Never again try to come to this version by its delta."""
        self._refused.add(entry.digest)

    def phrase_wait(self, version: int | None) -> str:
        """What is being waited for while there is nothing to choose."""
        sources = self._crew.book.sources
        if any(source.listed for source in sources):
            return "a version to be published" if version is None else f"version {version} to be published"
        reasons = [f"{source} ({source.tally.reason or 'no answer yet'})" for source in sources]
        return "any source to answer: " + ", ".join(reasons)

    def _list_known(self) -> list[Entry]:
        entries = [entry for entry in self._store.entries() if not entry.gone]
        return [entry for entry in entries if entry.complete or self._crew.book.list_holders(entry.digest)]

    def _is_informed(self) -> bool:
        listed = [source.listed for source in self._crew.book.sources]
        return all(listed) or (any(listed) and self._crew.book.clock() - self._begun > PATIENCE_S)

    def _list_candidates(self) -> dict[int, Candidate]:
        return {entry.version: self._describe_entry(entry) for entry in self._list_known()}

    def _describe_entry(self, entry: Entry) -> Candidate:
        delta = entry.delta
        parent = self.find_parent(entry)
        return Candidate(
            version=entry.version,
            parent=None if parent is None else parent.version,
            anchor=entry.log.head.anchor,
            full_bytes=entry.full.layout.total - entry.full.have_bytes,
            delta_bytes=None if delta is None else delta.layout.total - delta.have_bytes,
            held=entry.complete,
        )
