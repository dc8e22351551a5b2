"""What goes between a peer and whoever averages: one update per peer, fragment and round, one outcome for all.

Invariants:
- a round is named by what it starts from: an update made from another outer state has another key and is not averaged;
- `Outcome.peers` are the peers whose whole vector is in the payload, never more;
- the payload of an outcome is what everyone applies, bit for bit, the averager included.
"""

from dataclasses import dataclass

MAX_STEPS = 1 << 32
MAX_TOKENS = 1 << 48


@dataclass(frozen=True, slots=True, order=True)
class RoundKey:
    """The name of a round."""

    run: str
    round: int
    """of this fragment, from 0"""
    fragment: int
    base: str
    """`FragmentState.hash` of the fragment before this round, in hex"""


@dataclass(frozen=True, slots=True)
class Update:
    """One peer's pseudo-gradient of one fragment: where it started minus where it arrived."""

    key: RoundKey
    peer: str
    tokens: int
    """trained on since the fragment's last round: the weight in the mean"""
    steps: int
    """inner steps since then; a slow peer takes fewer"""
    payload: bytes
    codec: str
    lanes: tuple[tuple[int, int], ...] = ()
    """(lane, sequences read of it so far) of the data lanes that this peer reads; see `data`"""
    compute_ms: int = 0
    """time the steps took, without waiting; 0 if not measured"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a round; everyone who applies it to the base holds the state named in it."""

    key: RoundKey
    peers: tuple[str, ...]
    """whose whole vector was averaged, in order of id; at least one"""
    payload: bytes
    """the aggregate, in the plan's codec"""
    state: str
    """`FragmentState.hash` of the fragment after this round, in hex"""
    step: int
    """position of the inner schedule after this round, the same for all peers"""
    members: tuple[str, ...] = ()
    """who reads the data from now on, in order of id; lane l belongs to member l mod their number"""
    lanes: tuple[int, ...] = ()
    """sequences read so far of every data lane"""
    steps: tuple[int, ...] = ()
    """inner steps that each of `peers` should take until the next round, by its measured speed"""
    number: int = 0
    """rounds of all fragments that are over with this one: which of two outcomes closed later"""
