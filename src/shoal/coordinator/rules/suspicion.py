"""Whether an owner's work was made with other weights than stated: odds that are multiplied over its submissions.

A verdict states, for each rival and each assumed share of cheated rollouts, the odds E that the replayed rollouts of a
submission were made with that rival (toploc/rivals.py). Honest work has E[E | all before] <= 1. With r replayed
rollouts, the wealth of a bet is

    W <- (W + r) E            and, for an owner that cheats in one of ten submissions,    W <- (W + r) (0.9 + 0.1 E)

Fresh money for each replayed rollout makes a change show however late it comes (a Shiryaev-Roberts detector). W minus
the number of rollouts replayed so far cannot grow in expectation, and neither can the mean over all bets. So an honest
owner, of whose work N rollouts are replayed, ever reaches 1 / a with probability at most a N: false alarms are at most
a = 1e-9 per replayed rollout.

The verdicts of each owner of validators are weighed apart from those of others. A conviction takes `CONVICTIONS` of
them, each sufficient alone, as a conviction by verdicts does. So a single liar convicts nobody, and protects nobody
from the others.

An appeal has the last of these submissions replayed in full by validators that did not judge it. Its odds, from zero,
are below `DOUBT` with a probability of at least 1 - 1 / `DOUBT` if the owner is honest.

Invariants:
- all arithmetic uses integers rounded down: everyone computes the same, and rounding never raises evidence;
- an owner has one row of 12 numbers for each owner of validators that judged its work.

Changing breaks: every ledger with a conviction by odds.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.protocol.params import MILLION

RIVALS = ("int8", "int8_groups", "previous")
NUM_BETS = 4
"""of each rival: for three shares of cheated rollouts, and for one cheated submission in ten"""
LINE = 10**9
"""mean wealth from which on work is proven to be made with other weights: one false alarm per as many rollouts"""
CONVICTIONS = 2
"""owners of validators whose evidence must each reach the line"""
DOUBT = 10
"""odds for other weights, in the replay for an appeal, from which on a validator does not clear an owner"""
_UNIT = 1 << 32
_MOST = LINE * _UNIT << 16
_RARELY = 10
"""one submission in so many is cheated, in the last bet"""


class Suspicion(NamedTuple):
    """What one owner of validators has found about the work of one owner."""

    wealth: Mapping[str, Sequence[int]]
    """of each bet, by rival"""

    @property
    def evidence(self) -> int:
        """The mean wealth."""
        return sum(map(sum, self.wealth.values())) // (len(RIVALS) * NUM_BETS * _UNIT)

    @property
    def leader(self) -> str:
        """The rival with the largest wealth."""
        return max(self.wealth, key=lambda rival: sum(self.wealth[rival]), default="")

    def weigh(self, odds: Mapping[str, Sequence[int]], rollouts: int) -> "Suspicion":
        """After one more verdict: odds in millionths by rival, and the number of rollouts replayed for it."""
        return Suspicion({**self.wealth, **{rival: self._bet(rival, own, rollouts) for rival, own in odds.items()}})

    def _bet(self, rival: str, odds: Sequence[int], rollouts: int) -> list[int]:
        factors = [*odds, ((_RARELY - 1) * MILLION + odds[-1]) // _RARELY]
        held = self.wealth.get(rival, (0,) * NUM_BETS)
        fresh = rollouts * _UNIT
        return [min((own + fresh) * factor // MILLION, _MOST) for own, factor in zip(held, factors, strict=True)]

    def to_text(self) -> str:
        """The wealth in the form that is stored."""
        return json.dumps(self.wealth, separators=(",", ":"), sort_keys=True)


def is_doubtful(evidence: int, rollouts: int) -> bool:
    """Whether the replay of so many rollouts, without any before, speaks for other weights."""
    return evidence >= DOUBT * rollouts


def read_suspicion(text: str) -> Suspicion:
    """Parse what `to_text` wrote; empty for none."""
    return Suspicion(json.loads(text) if text else {})
