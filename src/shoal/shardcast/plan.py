"""Which blobs to fetch for a version: the cheapest way there from the versions already held.

A version is reached by its full blob, or by its delta on top of its parent, which is reached in the same two ways
unless it is held. Costs are bytes over the network. The full blob of an anchor is counted a little cheaper
(`ANCHOR_SHARE`): relays hold anchors and deltas ahead of any request, other full blobs only after one.

A delta that is not settled (its publisher is still encoding it, or we have not read so far) counts as free, but only in
a chain that stands on a version that is held: then waiting for it is nearly always the faster way. Nothing else is
worth waiting for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ANCHOR_SHARE = 0.8
"""What a byte of an anchor costs, against a byte of anything else."""

BlobName = Literal["full", "delta"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the plan has to know about one version."""

    version: int
    parent: int | None
    """version its delta builds on; None if there is no usable one"""
    anchor: bool
    full_bytes: int
    """bytes of the full blob that are still missing"""
    delta_bytes: int | None = None
    """bytes of the delta that are still missing; None while it is not settled"""
    held: bool = False
    """complete on disk"""


@dataclass(frozen=True, slots=True)
class Step:
    """One version to complete, by one of its blobs."""

    version: int
    blob: BlobName


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in the order in which they must be taken; none if the version is held."""

    steps: tuple[Step, ...]
    cost: float


def plan_pull(candidates: Mapping[int, Candidate], target: int) -> Plan:
    """The cheapest way to `target`; on equal cost the one with fewer steps."""
    rooted = _is_rooted(candidates, target)
    chain: list[Candidate] = []
    best: Plan | None = None
    spent = 0.0
    version: int | None = target
    while version is not None and version in candidates and len(chain) <= len(candidates):
        candidate = candidates[version]
        ways = _deltas_onto(chain)
        if candidate.held:
            return _pick_cheaper(best, Plan(ways, spent))
        share = ANCHOR_SHARE if candidate.anchor else 1.0
        full = Plan((Step(candidate.version, "full"), *ways), spent + share * candidate.full_bytes)
        best = _pick_cheaper(best, full)
        cost = 0 if candidate.delta_bytes is None and rooted else candidate.delta_bytes
        if cost is None:
            break
        spent += cost
        chain.append(candidate)
        version = candidate.parent
    assert best is not None, "the target is among the candidates"
    return best


def _deltas_onto(chain: list[Candidate]) -> tuple[Step, ...]:
    return tuple(Step(candidate.version, "delta") for candidate in reversed(chain))


def _is_rooted(candidates: Mapping[int, Candidate], target: int) -> bool:
    """Whether deltas alone could lead to the target from a version that is held."""
    version: int | None = target
    for _ in range(len(candidates)):
        candidate = candidates.get(version) if version is not None else None
        if candidate is None or candidate.held:
            return candidate is not None
        version = candidate.parent
    return False


def _pick_cheaper(one: Plan | None, other: Plan) -> Plan:
    if one is None or other.cost < one.cost:
        return other
    return one
