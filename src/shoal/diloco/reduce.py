"""One round from its updates to the new outer state: what a reducer does, and what every peer repeats.

Invariants:
- `close_round` is pure: the same state, updates and residual give the same outcome everywhere;
- `apply_outcome` gives every peer the state that the outcome names, or raises, so a peer with different bits finds out;
- outcomes of two fragments may be applied in either order and lead to the same state;
- a peer moves only its own data lanes, and only forwards; an open peer (`OpenPeers`) moves none, and its claims of
  speed count for itself only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_high

import numpy as np

from shoal.diloco.aggregate import NO_OPEN_PEERS, Aggregate, OpenPeers, aggregate_updates
from shoal.diloco.codecs import CodecError, find_codec
from shoal.diloco.outer import DilocoPlan, step_outer
from shoal.diloco.round import MAX_TOKENS, RoundKey, RoundOutcome, Update
from shoal.diloco.state import FragmentState, OuterState

NEARLY = 0.85


class StateMismatchError(Exception):
    """The outcome does not fit the state it is applied to, or leads to a different one than it names."""


@dataclass(frozen=True, slots=True)
class FinishedRound:
    """The result of a closed round."""

    outcome: RoundOutcome
    state: OuterState
    aggregate: Aggregate


def close_round(
    plan: DilocoPlan,
    state: OuterState,
    key: RoundKey,
    updates: Sequence[Update],
    *,
    members: Iterable[str] = (),
    residual: np.ndarray | None = None,
    open_peers: OpenPeers = NO_OPEN_PEERS,
) -> FinishedRound | Aggregate:
    """The round's outcome and the state after it; only the aggregate, with the reasons, if no update could be used.

    `members` read the data from now on, besides the peers whose updates are included.
    """
    assert key == plan.name_round(state, key.fragment), "only the open round can be closed"
    rules = plan.rules
    found = aggregate_updates(key, updates, plan.sizes[key.fragment], rules.codec, rules.guard, residual, open_peers)
    if not found.peers:
        return found
    part = _step_fragment(plan, state.fragments[key.fragment], found.payload)
    counted = [update for update in updates if update.peer in set(found.peers)]
    known = [update for update in counted if update.peer not in open_peers.peers]
    outcome = RoundOutcome(
        key=key,
        peers=found.peers,
        payload=found.payload,
        state=part.hash,
        step=max(state.step, plan.find_step(key.round, key.fragment)),
        members=tuple(sorted({*found.peers, *members})),
        lanes=settle_lanes(state, known),
        steps=share_steps(counted, plan.span_steps(key.round, key.fragment), known) if rules.dynamic else (),
        number=1 + sum(state.rounds),
    )
    return FinishedRound(outcome, _replace_part(state, part, outcome), found)


def apply_outcome(plan: DilocoPlan, state: OuterState, outcome: RoundOutcome) -> OuterState:
    """The state after a round."""
    if not 0 <= outcome.key.fragment < len(plan.sizes):
        raise StateMismatchError(f"unknown fragment {outcome.key.fragment}")
    return settle_part(state, move_part(plan, state.fragments[outcome.key.fragment], outcome), outcome)


def move_part(plan: DilocoPlan, part: FragmentState, outcome: RoundOutcome) -> FragmentState:
    """The fragment after its round: the part of `apply_outcome` that does not need the other fragments."""
    key = outcome.key
    if key != RoundKey(plan.run, part.round, part.index, part.hash):
        raise StateMismatchError(f"round {key.round} of fragment {key.fragment} does not start from this state")
    try:
        moved = _step_fragment(plan, part, outcome.payload)
    except CodecError as error:
        raise StateMismatchError(f"round {key.round} of fragment {key.fragment}: {error}") from None
    if moved.hash != outcome.state:
        raise StateMismatchError(f"round {key.round} of fragment {key.fragment} does not lead to the named state")
    return moved


def settle_part(state: OuterState, part: FragmentState, outcome: RoundOutcome) -> OuterState:
    """The state with the fragment after its round, and the positions after it."""
    if len(outcome.lanes) != len(state.lanes):
        raise StateMismatchError(f"{len(outcome.lanes)} data lanes instead of {len(state.lanes)}")
    return _replace_part(state, part, outcome)


def find_lanes(state: OuterState, peer: str) -> tuple[int, ...]:
    """The data lanes that a peer reads in this state; empty if it is not a member."""
    if peer not in state.members:
        return ()
    return tuple(range(state.members.index(peer), len(state.lanes), len(state.members)))


def settle_lanes(state: OuterState, updates: Iterable[Update]) -> tuple[int, ...]:
    """How far every lane has been read after these updates."""
    lanes = list(state.lanes)
    for update in updates:
        owned = set(find_lanes(state, update.peer))
        for lane, count in update.lanes:
            if lane in owned and count <= MAX_TOKENS:
                lanes[lane] = max(lanes[lane], count)
    return tuple(lanes)


def share_steps(updates: Iterable[Update], span: int, known: Sequence[Update]) -> tuple[int, ...]:
    """Inner steps for each peer, in order of id, so that each takes about as long as the median peer takes for `span`.

    H_i = H v_i / v with v the median speed, at most H and at least 1 (dynamic local updates, Liu et al., arXiv
    2401.09135, who divide by the fastest): nobody waits for a slow peer, and a peer that lies about its speed changes
    only its own share. A peer that is nearly as fast as the median, or that measured nothing, takes all H steps. The
    median is that of the `known` updates.
    """
    ordered = sorted(updates, key=lambda update: update.peer)
    speeds = [_find_speed(update) for update in ordered]
    measured = [speed for update in known if (speed := _find_speed(update)) > 0]
    if not measured:
        return (span,) * len(ordered)
    middle = median_high(measured)
    return tuple(span if not v or v >= NEARLY * middle else max(1, round(span * v / middle)) for v in speeds)


def _find_speed(update: Update) -> float:
    return update.steps / update.compute_ms if update.compute_ms > 0 else 0.0


def _step_fragment(plan: DilocoPlan, part: FragmentState, payload: bytes) -> FragmentState:
    delta = find_codec(plan.rules.codec).decode(payload, plan.sizes[part.index])
    return step_outer(plan.rules.outer, part, delta)


def _replace_part(state: OuterState, part: FragmentState, outcome: RoundOutcome) -> OuterState:
    parts = tuple(part if old.index == part.index else old for old in state.fragments)
    if outcome.number < state.number:
        # Rounds of two fragments may close in one order and be applied in another; the positions of the later one
        # count.
        return OuterState(parts, state.step, state.members, state.lanes, state.number)
    return OuterState(parts, outcome.step, outcome.members, outcome.lanes, outcome.number)
