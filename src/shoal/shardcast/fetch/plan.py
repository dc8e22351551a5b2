"""Which version a client fetches, and by which blobs: the cheapest way from the versions that it holds.

A version is reached by its full blob, or by its delta on top of its parent, which is reached in the same two ways
unless it is held. Costs are bytes over the network. The full blob of an anchor is counted a little cheaper
(`ANCHOR_SHARE`): relays hold anchors and deltas ahead of any request, other full blobs only after one.

A delta that is not settled (its publisher is still encoding it, or its record has not arrived) counts as free, but only
in a chain on top of a version that is held: then waiting for it is nearly always faster. Nothing else is waited for.

Known versions are those that are complete here or announced by an upstream. The target is the newest of them, unless it
has stalled (`StallTable`): a publisher may die in the middle of a version, or a relay may announce what it cannot hold,
and nothing reports either. A stalled version is tried again after a new line, from a new upstream, or after a pause
that doubles.

Invariants:
- nothing is chosen, and no version is reported as gone, before all upstreams have responded or `LISTING_S` has passed;
- a target is abandoned for a newer version only if that one costs no more than what is missing of the target. So a
  client that is behind goes straight to the newest, and a slow one still completes something.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.shardcast.fetch.upstream_stats import Upstream, UpstreamTable
from shoal.shardcast.fetch.upstreams import GoneError, UpstreamPool
from shoal.shardcast.store.store import StoredVersion, VersionStore
from shoal.util.aio import Backoff

ANCHOR_SHARE = 0.8
"""Cost of a byte of an anchor relative to a byte of anything else."""

BlobName = Literal["full", "delta"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """The data about one version that the plan needs."""

    version: int
    parent: int | None
    """version its delta builds on; None if there is no usable delta"""
    anchor: bool
    full_bytes: int
    """bytes of the full blob that are still missing"""
    delta_bytes: int | None = None
    """bytes of the delta that are still missing; None while it is not settled"""
    held: bool = False
    """complete on disk"""


@dataclass(frozen=True, slots=True)
class FetchStep:
    """One version to complete, by one of its blobs."""

    version: int
    blob: BlobName


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Steps in the order in which they must be taken; empty if the version is held."""

    steps: tuple[FetchStep, ...]
    cost: float


def plan_pull(candidates: Mapping[int, Candidate], target: int) -> FetchPlan:
    """The cheapest way to `target`; at equal cost the one with fewer steps."""
    rooted = _is_rooted(candidates, target)
    chain: list[Candidate] = []
    plans: list[FetchPlan] = []
    spent = 0.0
    version: int | None = target
    while version is not None and version in candidates and len(chain) <= len(candidates):
        candidate = candidates[version]
        ways = tuple(FetchStep(link.version, "delta") for link in reversed(chain))
        if candidate.held:
            plans.append(FetchPlan(ways, spent))
            break
        share = ANCHOR_SHARE if candidate.anchor else 1.0
        steps = (FetchStep(candidate.version, "full"), *ways)
        plans.append(FetchPlan(steps, spent + share * candidate.full_bytes))
        cost = 0 if candidate.delta_bytes is None and rooted else candidate.delta_bytes
        if cost is None:
            break
        spent += cost
        chain.append(candidate)
        version = candidate.parent
    return min(plans, key=lambda plan: plan.cost)  # the first of equal ones has the fewest steps


def _is_rooted(candidates: Mapping[int, Candidate], target: int) -> bool:
    """Whether deltas alone could lead to the target from a version that is held."""
    version: int | None = target
    for _ in range(len(candidates)):
        candidate = candidates.get(version) if version is not None else None
        if candidate is None or candidate.held:
            return candidate is not None
        version = candidate.parent
    return False


LISTING_S = 1.0
"""How long to wait for slow upstreams to be measured and listed before continuing without them."""
FIRST_PAUSE = 4
"""The first pause of a stalled version, as a multiple of the time it was waited for."""
MAX_PAUSE_S = 600.0


class StallDetector:
    """Detects when a count stops growing. Only a new maximum is progress: refetched bytes do not count."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._what: object = None
        self._most = -1
        self._moved_at = clock()

    def is_over(self, what: object, count: int) -> bool:
        """Whether the count of this object has reached no new maximum for too long.

        A different object, and a positive result, restart the time.
        """
        now = self._clock()
        if what != self._what or count > self._most:
            self._what, self._most, self._moved_at = what, count, now
        if now - self._moved_at < self._limit_s:
            return False
        self._moved_at = now
        return True


@dataclass(frozen=True, slots=True)
class _StalledVersion:
    num_lines: int
    upstreams: frozenset[Upstream]
    until: float
    count: int


class StallTable:
    """Versions that made no progress. Used from one event loop."""

    def __init__(self, upstreams: UpstreamTable, stall_s: float) -> None:
        self._upstreams = upstreams
        self._backoff = Backoff.steady(FIRST_PAUSE * stall_s, MAX_PAUSE_S)
        self._stalls: dict[str, _StalledVersion] = {}

    def add(self, entry: StoredVersion) -> None:
        """Note that an entry made no progress for too long."""
        count = self._stalls[entry.digest].count + 1 if entry.digest in self._stalls else 0
        until = self._upstreams.clock() + self._backoff.pause_s(count)
        announcers = frozenset(self._upstreams.list_announcers(entry.digest))
        self._stalls[entry.digest] = _StalledVersion(len(entry.log.lines), announcers, until, count)

    def is_stalled(self, entry: StoredVersion) -> bool:
        """Whether nothing has changed since that would make another attempt worthwhile."""
        stall = self._stalls.get(entry.digest)
        if stall is None or self._upstreams.clock() >= stall.until or len(entry.log.lines) > stall.num_lines:
            return False
        return stall.upstreams.issuperset(self._upstreams.list_announcers(entry.digest))


class TargetSelector:
    """Chooses the version to fetch from a store and its upstreams."""

    def __init__(self, store: VersionStore, upstreams: UpstreamPool, *, deltas: bool) -> None:
        self._store = store
        self._upstreams = upstreams
        self._deltas = deltas
        self._begun = upstreams.clock()
        self._refused: set[str] = set()
        """digests of versions whose delta must not be used"""
        self.stalls = StallTable(upstreams, upstreams.deadlines.stall_s)

    def choose_newest(self) -> StoredVersion | None:
        """The newest version with progress, or the newest of all; None before enough upstreams responded."""
        listed = [upstream.listed for upstream in self._upstreams.all]
        if not all(listed) and not (any(listed) and self._upstreams.clock() - self._begun > LISTING_S):
            return None
        known = self._list_known()
        moving = [entry for entry in known if entry.complete or not self.stalls.is_stalled(entry)]
        return max(moving or known, key=lambda entry: entry.version, default=None)

    def choose_version(self, version: int) -> StoredVersion | None:
        """That version; None if it may still appear; `GoneError` once every upstream has responded and none has it."""
        known = self._list_known()
        for entry in known:
            if entry.version == version:
                return entry
        newest = max((entry.version for entry in known), default=-1)
        may_come = newest < version and self._store.newest is None
        if may_come or not all(upstream.answered for upstream in self._upstreams.all):
            return None
        silent = [str(upstream) for upstream in self._upstreams.all if not upstream.listed]
        hint = f" (no response from {', '.join(silent)})" if silent else ""
        state = "not published yet" if newest < version else "no longer available"
        raise GoneError(f"{state}; the newest is {newest}{hint}")

    def find_better(self, target: StoredVersion) -> int | None:
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

    def plan_fetch(self, target: StoredVersion) -> FetchPlan:
        """The cheapest way to a version; `GoneError` if no upstream has it any more."""
        candidates = self._list_candidates()
        if target.version not in candidates:
            raise GoneError("no source has this version any more")
        return plan_pull(candidates, target.version)

    def is_plannable(self, target: StoredVersion) -> bool:
        """Whether enough is known to plan: the chain back to a held version or an anchor is known, or the time is up.

        A client that has just started holds heads whose manifests are still being read, and would fetch full blobs
        instead of deltas.
        """
        if self._upstreams.clock() - self._begun > LISTING_S:
            return True
        entry: StoredVersion | None = target
        while entry is not None and not entry.complete and not entry.log.head.anchor:
            if not entry.log.delta_settled:
                return False
            entry = self.find_parent(entry)
        return True

    def find_parent(self, entry: StoredVersion) -> StoredVersion | None:
        """The version that the entry's delta can be applied to; None if the delta must not be used."""
        return None if not self._deltas or entry.digest in self._refused else self._store.find_parent(entry)

    def refuse_delta(self, entry: StoredVersion) -> None:
        """Never use the delta of this version again."""
        self._refused.add(entry.digest)

    def describe_wait(self, version: int | None) -> str:
        """Describe what is being waited for while there is nothing to choose."""
        if any(upstream.listed for upstream in self._upstreams.all):
            return "a version to be published" if version is None else f"version {version} to be published"
        reasons = [f"{upstream} ({upstream.counts.reason or 'no response yet'})" for upstream in self._upstreams.all]
        return "a response from any source: " + ", ".join(reasons)

    def _list_known(self) -> list[StoredVersion]:
        entries = [entry for entry in self._store.entries() if not entry.gone]
        return [entry for entry in entries if entry.complete or self._upstreams.list_holders(entry.digest)]

    def _list_candidates(self) -> dict[int, Candidate]:
        return {entry.version: self._describe_entry(entry) for entry in self._list_known()}

    def _describe_entry(self, entry: StoredVersion) -> Candidate:
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
