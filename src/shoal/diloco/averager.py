"""The engines' interface: hand in an update, go on training, take the outcome.

Invariants that every engine keeps:
- `submit` returns at once or raises; the transfer goes on behind the caller's back;
- the same update may be submitted again (after a restart, or when nothing was heard): a peer counts once in a round;
- `collect` never waits longer than it was told to, and what it returns is for everyone the same;
- an outcome names the peers whose whole vector was averaged. A round that came to nothing has no outcome;
- a round that went on without the caller is a `StaleRoundError`, never an outcome for another key.

    submitted -> collected
              -> stale: fetch_state, train from there
"""

from typing import Protocol

from shoal.diloco.round import Outcome, RoundKey, Update
from shoal.diloco.state import OuterState


class StaleRoundError(Exception):
    """The round is over, or starts from another outer state than the caller's: fetch the state and go on from it."""

    def __init__(self, key: RoundKey, reason: str) -> None:
        super().__init__(f"round {key.round} of fragment {key.fragment}: {reason}")
        self.key = key


class RefusedUpdateError(Exception):
    """The update itself was found bad; sending it again does not help, and the round goes on without it."""

    def __init__(self, key: RoundKey, reason: str) -> None:
        super().__init__(f"round {key.round} of fragment {key.fragment}: refused, {reason}")
        self.key = key
        self.reason = reason


class AveragerAwayError(Exception):
    """Whoever averages does not answer now; the caller keeps its update and goes on with inner steps."""


class Averager(Protocol):
    """One peer's way to the others."""

    def submit(self, update: Update) -> None:
        """Start to hand in an update; raises `StaleRoundError` or `RefusedUpdateError` if that is already known."""

    def collect(self, key: RoundKey, timeout_s: float) -> Outcome | None:
        """The outcome of a round submitted to, or None if there is none yet after `timeout_s` (0: only look).

        Raises `StaleRoundError`, `RefusedUpdateError`, or `AveragerAwayError` where nobody can be asked.
        """

    def fetch_state(self, timeout_s: float) -> OuterState:
        """The newest outer state, for who joins or fell behind; raises `AveragerAwayError` after `timeout_s`."""

    def close(self) -> None:
        """Give up what is under way."""
