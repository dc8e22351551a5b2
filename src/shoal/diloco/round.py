"""Rounds: the messages between a peer and an averager, and the interface that every averager implements.

One update per peer, fragment and round goes in; one outcome, the same for everyone, comes out.

Invariants of the records:
- a round is named by its starting state: an update made from a different outer state has a different key and is not
  averaged;
- `RoundOutcome.peers` are exactly the peers whose whole vector is in the payload;
- everyone applies the payload of an outcome bit for bit, the averager included.

Invariants of every averager:
- `submit` returns at once or raises; the transfer runs in the background;
- the same update may be submitted again (after a restart, or without an answer): a peer counts once in a round;
- `collect` never waits longer than `timeout_s`, and returns the same for everyone;
- a round without a usable update has no outcome;
- a round that closed without the caller raises `StaleRoundError` and never returns an outcome for another key.

    submitted -> collected
              -> stale: fetch_state, train from there
"""

from dataclasses import dataclass
from typing import Protocol

from shoal.diloco.state import OuterState

MAX_STEPS = 1 << 32
MAX_TOKENS = 1 << 48


@dataclass(frozen=True, slots=True, order=True)
class RoundKey:
    """The name of a round."""

    run: str
    round: int
    """number of the round of this fragment, from 0"""
    fragment: int
    base: str
    """`FragmentState.hash` of the fragment before this round, in hex"""


@dataclass(frozen=True, slots=True)
class Update:
    """One peer's pseudo-gradient of one fragment: start weights minus current weights."""

    key: RoundKey
    peer: str
    tokens: int
    """tokens trained on since the fragment's last round: the weight in the mean"""
    steps: int
    """inner steps since then; a slow peer takes fewer"""
    payload: bytes
    codec: str
    lanes: tuple[tuple[int, int], ...] = ()
    """(lane, sequences read of it so far) for the data lanes that this peer reads; see `data`"""
    compute_ms: int = 0
    """compute time of the steps, without waiting; 0 if not measured"""


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The result of a round. Applying it to the base gives the state named in it."""

    key: RoundKey
    peers: tuple[str, ...]
    """peers whose whole vector was averaged, in order of id; at least one"""
    payload: bytes
    """the aggregate, in the plan's codec"""
    state: str
    """`FragmentState.hash` of the fragment after this round, in hex"""
    step: int
    """position of the inner schedule after this round, the same for all peers"""
    members: tuple[str, ...] = ()
    """peers that read the data from now on, in order of id; lane l belongs to member l mod their number"""
    lanes: tuple[int, ...] = ()
    """sequences read so far of every data lane"""
    steps: tuple[int, ...] = ()
    """inner steps that each of `peers` should take until the next round, by its measured speed"""
    number: int = 0
    """number of closed rounds of all fragments, including this one; shows which of two outcomes closed later"""


class StaleRoundError(Exception):
    """The round is over, or starts from a different outer state: fetch the state and continue from it."""

    def __init__(self, key: RoundKey, reason: str) -> None:
        super().__init__(f"round {key.round} of fragment {key.fragment}: {reason}")


class RefusedUpdateError(Exception):
    """The update is invalid; sending it again does not help, and the round continues without it."""

    def __init__(self, key: RoundKey, reason: str) -> None:
        super().__init__(f"round {key.round} of fragment {key.fragment}: refused, {reason}")


class AveragerUnavailableError(Exception):
    """The averager does not answer; the caller keeps its update and continues with inner steps."""


class Averager(Protocol):
    """The averager of a run, as seen by one peer."""

    def submit(self, update: Update) -> None:
        """Start submitting an update; raises `StaleRoundError` or `RefusedUpdateError` if that is already known."""

    def collect(self, key: RoundKey, timeout_s: float) -> RoundOutcome | None:
        """The outcome of a submitted round, or None if it is still open after `timeout_s` (0: do not wait).

        Raises `StaleRoundError`, `RefusedUpdateError`, or `AveragerUnavailableError` if no averager can be reached.
        """

    def fetch_state(self, timeout_s: float) -> OuterState:
        """The newest outer state; raises `AveragerUnavailableError` after `timeout_s`."""

    def close(self) -> None:
        """Abandon everything in flight."""
