"""One round from its updates to the new outer state: what a reducer does, and what every peer repeats.

Invariants:
- `close_round` is pure: whoever holds the state, the updates and the residual gets the same outcome;
- `apply_outcome` gives every peer the state that the outcome names, or raises, so a peer with other bits finds out;
- outcomes of two fragments may be applied in either order, and lead to one state;
- a peer moves only the data lanes that are its own, and only forwards.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.diloco.aggregate import Aggregate, aggregate_updates
from shoal.diloco.codecs import CodecError, find_codec
from shoal.diloco.outer import step_outer
from shoal.diloco.plan import Plan
from shoal.diloco.round import MAX_TOKENS, Outcome, RoundKey, Update
from shoal.diloco.state import FragmentState, OuterState

NEARLY = 0.85


class StateMismatchError(Exception):
    """The outcome does not fit the state it is applied to, or leads elsewhere than it says: fetch the state."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A finished round."""

    outcome: Outcome
    state: OuterState
    aggregate: Aggregate


def close_round(
    plan: Plan,
    state: OuterState,
    key: RoundKey,
    updates: Sequence[Update],
    *,
    members: Iterable[str] = (),
    residual: np.ndarray | None = None,
) -> Closed | Aggregate:
    """The round's outcome and the state after it; only the aggregate, which says why, if no update could be used.

    `members` read the data from now on, besides those whose updates are in.
    """
    assert key == plan.name_round(state, key.fragment), "only the round that is open can be closed"
    rules = plan.rules
    found = aggregate_updates(key, updates, plan.sizes[key.fragment], rules.codec, rules.guard, residual)
    if not found.peers:
        return found
    part = _step_fragment(plan, state.fragments[key.fragment], found.payload)
    counted = [update for update in updates if update.peer in set(found.peers)]
    outcome = Outcome(
        key=key,
        peers=found.peers,
        payload=found.payload,
        state=part.hash,
        step=max(state.step, plan.find_step(key.round, key.fragment)),
        members=tuple(sorted({*found.peers, *members})),
        lanes=settle_lanes(state, counted),
        steps=share_steps(counted, plan.span_steps(key.round, key.fragment)) if rules.dynamic else (),
        number=1 + sum(part.round for part in state.fragments),
    )
    return Closed(outcome, _replace_part(state, part, outcome), found)


def apply_outcome(plan: Plan, state: OuterState, outcome: Outcome) -> OuterState:
    """The state after a round."""
    if not 0 <= outcome.key.fragment < len(plan.sizes):
        raise StateMismatchError(f"there is no fragment {outcome.key.fragment}")
    return settle_part(state, move_part(plan, state.fragments[outcome.key.fragment], outcome), outcome)


def move_part(plan: Plan, part: FragmentState, outcome: Outcome) -> FragmentState:
    """The fragment after its round: the work of `apply_outcome`, which needs nothing of the other fragments."""
    key = outcome.key
    if key != RoundKey(plan.run, part.round, part.index, part.hash):
        raise StateMismatchError(f"round {key.round} of fragment {key.fragment} does not start from this state")
    try:
        moved = _step_fragment(plan, part, outcome.payload)
    except CodecError as error:
        raise StateMismatchError(f"round {key.round} of fragment {key.fragment}: {error}") from None
    if moved.hash != outcome.state:
        raise StateMismatchError(f"round {key.round} of fragment {key.fragment} leads to another state than it says")
    return moved


def settle_part(state: OuterState, part: FragmentState, outcome: Outcome) -> OuterState:
    """The state with the fragment that its round led to, and the positions after it."""
    if len(outcome.lanes) != len(state.lanes):
        raise StateMismatchError(f"{len(outcome.lanes)} data lanes instead of {len(state.lanes)}")
    return _replace_part(state, part, outcome)


def find_lanes(state: OuterState, peer: str) -> tuple[int, ...]:
    """The data lanes that a peer reads in this state; none if it is no member."""
    if peer not in state.members:
        return ()
    return tuple(range(state.members.index(peer), len(state.lanes), len(state.members)))


def settle_lanes(state: OuterState, updates: Iterable[Update]) -> tuple[int, ...]:
    """How far every lane has been read once these updates count."""
    lanes = list(state.lanes)
    for update in updates:
        owned = set(find_lanes(state, update.peer))
        for lane, count in update.lanes:
            if lane in owned and count <= MAX_TOKENS:
                lanes[lane] = max(lanes[lane], count)
    return tuple(lanes)


def share_steps(updates: Iterable[Update], span: int) -> tuple[int, ...]:
    """Inner steps for each peer, in order of id, that take each about as long as the middle one takes for `span`.

    H_i = H v_i / v with v the median speed, at most H and at least 1 (dynamic local updates, Liu et al., arXiv
    2401.09135, who divide by the fastest): nobody waits for a slow peer, and one peer's lie about its speed moves only
    its own share. Who is nearly as fast as the middle takes them all, and so does who measured nothing.
    """
    ordered = sorted(updates, key=lambda update: update.peer)
    speeds = [update.steps / update.compute_ms if update.compute_ms > 0 else 0.0 for update in ordered]
    measured = sorted(speed for speed in speeds if speed > 0)
    if not measured:
        return (span,) * len(ordered)
    middle = measured[len(measured) // 2]
    return tuple(span if not v or v >= NEARLY * middle else max(1, round(span * v / middle)) for v in speeds)


def _step_fragment(plan: Plan, part: FragmentState, payload: bytes) -> FragmentState:
    delta = find_codec(plan.rules.codec).decode(payload, plan.sizes[part.index])
    return step_outer(plan.rules.outer, part, delta)


def _replace_part(state: OuterState, part: FragmentState, outcome: Outcome) -> OuterState:
    parts = tuple(part if old.index == part.index else old for old in state.fragments)
    if outcome.number < state.number:
        # Two fragments' rounds may close in one order and be applied in another; the positions are those of the later.
        return OuterState(parts, state.step, state.members, state.lanes, state.number)
    return OuterState(parts, outcome.step, outcome.members, outcome.lanes, outcome.number)
