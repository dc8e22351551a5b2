"""Averaging inside one process, for tests, the benchmark and `shoal diloco train`.

A round closes when every member has delivered or left; a refused update counts as delivered. One lock guards all state.
"""

import threading
import time
from dataclasses import dataclass, field, replace

import numpy as np

from shoal.diloco.aggregate import RejectionReason
from shoal.diloco.outer import DilocoPlan
from shoal.diloco.reduce import FinishedRound, close_round
from shoal.diloco.round import RefusedUpdateError, RoundKey, RoundOutcome, StaleRoundError, Update
from shoal.diloco.state import OuterState


@dataclass
class LocalGroup:
    """The peers of one process and the outer state they share."""

    plan: DilocoPlan
    state: OuterState
    refused: list[tuple[RoundKey, RejectionReason]] = field(default_factory=list)
    residuals: dict[int, np.ndarray | None] = field(default_factory=dict)
    """what the codec of the aggregate lost so far, by fragment"""
    members: set[str] = field(default_factory=set)
    waiting: dict[RoundKey, dict[str, Update]] = field(default_factory=dict)
    outcomes: dict[RoundKey, RoundOutcome] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def join(self, peer: str) -> "LocalAverager":
        """Add a peer. Rounds wait for it from now on, and it reads data from the next round on."""
        with self.changed:
            assert peer not in self.members, f"{peer} has joined already"
            self.members.add(peer)
            if not any(self.state.rounds) and not self.waiting:
                self.state = replace(self.state, members=tuple(sorted(self.members)))
        return LocalAverager(self, peer)

    def close_full(self) -> None:
        """Close every round for which all members have delivered. The lock must be held."""
        for key, found in list(self.waiting.items()):
            if self.members <= found.keys():
                self._close(key, list(found.values()))

    def _close(self, key: RoundKey, updates: list[Update]) -> None:
        residual = self.residuals.get(key.fragment)
        closed = close_round(self.plan, self.state, key, updates, members=self.members, residual=residual)
        del self.waiting[key]
        aggregate = closed.aggregate if isinstance(closed, FinishedRound) else closed
        self.refused += [(key, refusal) for refusal in aggregate.refused]
        if isinstance(closed, FinishedRound):
            self.state = closed.state
            self.residuals[key.fragment] = aggregate.residual
            self.outcomes[key] = closed.outcome
            for old in [old for old in self.outcomes if old.fragment == key.fragment and old.round < key.round - 1]:
                del self.outcomes[old]
        self.changed.notify_all()


@dataclass(frozen=True)
class LocalAverager:
    """One member of a group."""

    group: LocalGroup
    peer: str

    def submit(self, update: Update) -> None:
        """Deliver at once, and close the round if this was the last update."""
        group = self.group
        with group.changed:
            if update.key in group.outcomes:
                return
            if update.key != group.plan.name_round(group.state, update.key.fragment):
                raise StaleRoundError(update.key, "already closed, or starts from a different state")
            group.waiting.setdefault(update.key, {}).setdefault(update.peer, update)
            group.close_full()

    def collect(self, key: RoundKey, timeout_s: float) -> RoundOutcome | None:
        """Wait for the other members."""
        group, end = self.group, time.monotonic() + timeout_s
        with group.changed:
            while key not in group.outcomes:
                if key != group.plan.name_round(group.state, key.fragment):
                    raise StaleRoundError(key, "already closed")
                left = end - time.monotonic()
                if left <= 0:
                    return None
                group.changed.wait(left)
            for refused_key, refusal in group.refused:
                if (refused_key, refusal.peer) == (key, self.peer):
                    raise RefusedUpdateError(key, refusal.reason)
            return group.outcomes[key]

    def fetch_state(self, timeout_s: float) -> OuterState:
        """The group's state."""
        return self.group.state

    def close(self) -> None:
        """Leave the group: rounds close without this peer."""
        with self.group.changed:
            self.group.members.discard(self.peer)
            self.group.close_full()
