"""Averaging inside one process, for tests, the benchmark and `shoal diloco train`.

A round closes when every seat has delivered or left; a refused update counts as delivered. One lock guards all state.
"""

import threading
import time
from dataclasses import dataclass, field

import numpy as np

from shoal.diloco.aggregate import Refusal
from shoal.diloco.averager import RefusedUpdateError, StaleRoundError
from shoal.diloco.plan import Plan
from shoal.diloco.reduce import Closed, close_round
from shoal.diloco.round import Outcome, RoundKey, Update
from shoal.diloco.state import OuterState


@dataclass
class LocalGroup:
    """The peers of one process and the outer state they share."""

    plan: Plan
    state: OuterState
    refused: list[tuple[RoundKey, Refusal]] = field(default_factory=list)
    residuals: dict[int, np.ndarray | None] = field(default_factory=dict)
    """what the codec of the aggregate lost so far, by fragment"""
    _seats: set[str] = field(default_factory=set)
    _waiting: dict[RoundKey, dict[str, Update]] = field(default_factory=dict)
    _outcomes: dict[RoundKey, Outcome] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def seat(self, peer: str) -> "LocalAverager":
        """A peer's way into the group; it is waited for from now on, and reads data from the next round on."""
        with self._changed:
            assert peer not in self._seats, f"{peer} is seated already"
            self._seats.add(peer)
            fresh = all(part.round == 0 for part in self.state.fragments) and not self._waiting
            if fresh:
                members = tuple(sorted(self._seats))
                self.state = OuterState(self.state.fragments, self.state.step, members, self.state.lanes)
        return LocalAverager(self, peer)

    def deliver(self, update: Update) -> None:
        """Take an update in, and close its round if it was the last."""
        with self._changed:
            if update.key in self._outcomes:
                return
            if update.key != self.plan.name_round(self.state, update.key.fragment):
                raise StaleRoundError(update.key, "it is over, or starts from another state")
            self._waiting.setdefault(update.key, {}).setdefault(update.peer, update)
            self._close_full()

    def wait_outcome(self, key: RoundKey, peer: str, timeout_s: float) -> Outcome | None:
        """The outcome of a round, or None if it is not there in time."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while key not in self._outcomes:
                if key != self.plan.name_round(self.state, key.fragment):
                    raise StaleRoundError(key, "it is over")
                left = end - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
            for refused_key, refusal in self.refused:
                if (refused_key, refusal.peer) == (key, peer):
                    raise RefusedUpdateError(key, refusal.reason)
            return self._outcomes[key]

    def leave(self, peer: str) -> None:
        """Wait for this peer no longer."""
        with self._changed:
            self._seats.discard(peer)
            self._close_full()

    def _close_full(self) -> None:
        for key, found in list(self._waiting.items()):
            if self._seats <= found.keys():
                self._close(key, list(found.values()))

    def _close(self, key: RoundKey, updates: list[Update]) -> None:
        residual = self.residuals.get(key.fragment)
        closed = close_round(self.plan, self.state, key, updates, members=self._seats, residual=residual)
        del self._waiting[key]
        aggregate = closed.aggregate if isinstance(closed, Closed) else closed
        self.refused += [(key, refusal) for refusal in aggregate.refused]
        if isinstance(closed, Closed):
            self.state = closed.state
            self.residuals[key.fragment] = aggregate.residual
            self._outcomes[key] = closed.outcome
            for old in [old for old in self._outcomes if old.fragment == key.fragment and old.round < key.round - 1]:
                del self._outcomes[old]
        self._changed.notify_all()


@dataclass(frozen=True)
class LocalAverager:
    """One seat of a group."""

    group: LocalGroup
    peer: str

    def submit(self, update: Update) -> None:
        """Deliver at once."""
        self.group.deliver(update)

    def collect(self, key: RoundKey, timeout_s: float) -> Outcome | None:
        """Wait for the others."""
        return self.group.wait_outcome(key, self.peer, timeout_s)

    def fetch_state(self, timeout_s: float) -> OuterState:
        """The group's state, which is at hand."""
        return self.group.state

    def close(self) -> None:
        """Leave the group: rounds close without this peer."""
        self.group.leave(self.peer)
