"""Rivals: weights that a cheat may have used, to which its work is compared as well as to the stated ones.

In bfloat16 rounding is as large as what int8 weights or an older version change, and differs between engines by a
factor of two. So the size of a deviation says little. Its direction says much: work of a rival is closer to a replay
with the rival than to one with the stated weights, and honest work hardly ever is. For a chunk let d be its distance
from the replay with the stated weights, and d' that from the replay with the rival (of states: the mean difference of
mantissas; of log-probs: the mean difference). Its lean towards the rival is

    lean = (d - d') / (d + d')        from -1 to 1; 0 if both are 0

Both replays are made by one program and share their noise, so that it cancels. Honest work does not depend on the
rival: however noisy its engine is, noise moves both distances alike and the lean towards 0, not beyond the positive
values that are bet on. Work of other altered weights is about as far from both, which honest work is not.

Bets. For a level c > 0 let y = 1 if a chunk's lean exceeds c, and let m be the calibrated bound of how often honest
chunks do, over all engines and all rivals of one kind, near or far. With stakes f_i >= 0, sum f_i < 1, over all levels

    odds of a chunk    = 1 + sum_i f_i (y_i / m_i - 1)            expectation <= 1 for honest work
    odds of a rollout  E = the product over its chunks
    odds of several    prod (1 - x + x E)                         for a share x of cheated ones

The stakes are those with the largest mean logarithm on measured work of the rival (Cover's algorithm). Odds are
products of terms with a conditional expectation of at most 1, so P(odds ever reach 1 / a) <= a for honest work. A
submission whose odds reach that is rejected; weaker odds are reported with the verdict, and the coordinator multiplies
them over an owner's submissions (coordinator/rules/suspicion.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from pydantic import Field, model_validator
from torch import Tensor
from transformers import PreTrainedModel

from shoal.config.run import Settings
from shoal.policy.altered import round_bytes, round_channels
from shoal.toploc.chunks import ChunkStats
from shoal.toploc.finding import SHARES, sum_odds
from shoal.toploc.sequential_test import Level

NUM_LEVELS = 8
"""levels of the lean of states, then of log-probs, half of each"""
_ROWS = 1024
"""rows of a tensor that are compared at a time"""


class Rival(StrEnum):
    """Weights that work is compared with."""

    INT8 = "int8"
    """255 levels per row"""
    INT8_GROUPS = "int8_groups"
    """255 levels per 32 values of a row"""
    PREVIOUS = "previous"
    """the version before the stated one"""


@dataclass(frozen=True, slots=True)
class Lean:
    """How much closer one chunk is to a rival than to the stated weights."""

    is_full: bool
    states: float
    logprobs: float


class RivalBet(Settings):
    """What is bet on the chunks of one kind, full or short."""

    levels: tuple[Level, ...] = Field(min_length=NUM_LEVELS, max_length=NUM_LEVELS)
    stakes: tuple[float, ...] = Field(min_length=NUM_LEVELS, max_length=NUM_LEVELS)

    @model_validator(mode="after")
    def _is_fair(self) -> "RivalBet":
        if min(self.stakes) < 0.0 or sum(self.stakes) >= 1.0:
            raise ValueError("stakes must not be negative, and their sum must be below 1")
        return self

    def weigh(self, leans: Sequence[Lean]) -> np.ndarray:
        """The logarithm of the odds of each chunk."""
        if not leans:
            return np.zeros(0)
        gains = list_gains(leans, self.levels)
        log: np.ndarray = np.log1p((gains - 1.0) @ np.array(self.stakes))
        return log


class RivalBets(Settings):
    """The bets on one rival."""

    full: RivalBet
    short: RivalBet
    least_change: float = 0.0
    """how far the rival must be from the stated weights, see `measure_change`: nothing is bet on one that is closer"""

    def weigh(self, leans: Sequence[Lean]) -> float:
        """The logarithm of the odds of a rollout."""
        kinds = ((self.full, True), (self.short, False))
        return float(sum(bet.weigh([own for own in leans if own.is_full is kind]).sum() for bet, kind in kinds))


def list_gains(leans: Sequence[Lean], levels: Sequence[Level]) -> np.ndarray:
    """y / m (chunks, levels). A value that is not a number counts as the worst."""
    half = NUM_LEVELS // 2
    found = np.array([[own.states] * half + [own.logprobs] * half for own in leans])
    exceeds = ~(found <= np.array([level.value for level in levels]))
    gains: np.ndarray = exceeds / np.array([level.chance for level in levels])
    return gains


def compare_replays(stated: Sequence[ChunkStats], rival: Sequence[ChunkStats]) -> list[Lean]:
    """The lean of each chunk of a rollout, from its statistics under the stated weights and under a rival."""
    return [
        Lean(own.is_full, _lean(own.mantissa, other.mantissa), _lean(own.logprob_mean, other.logprob_mean))
        for own, other in zip(stated, rival, strict=True)
    ]


def _lean(stated: float, rival: float) -> float:
    if not math.isfinite(stated):  # fails elsewhere; no evidence here
        return 0.0
    if not math.isfinite(rival):
        return -1.0
    total = stated + rival
    return (stated - rival) / total if total > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class RivalWeights:
    """The weights of a rival: those of a model, with every matrix of its layers changed while it runs.

    Rounded weights take no memory of their own: of a large model a validator holds the stated version and the one
    before it.
    """

    model: PreTrainedModel
    change: Callable[[Tensor], Tensor] | None = None


def make_rivals(model: PreTrainedModel, previous: PreTrainedModel | None) -> dict[Rival, RivalWeights]:
    """The rivals of a model; without a previous version there is one less."""
    rivals = {Rival.INT8: RivalWeights(model, round_channels), Rival.INT8_GROUPS: RivalWeights(model, round_bytes)}
    return rivals if previous is None else rivals | {Rival.PREVIOUS: RivalWeights(previous)}


def measure_change(model: PreTrainedModel, other: PreTrainedModel) -> float:
    """How far two versions are apart: the root mean square of the differences of their weights."""
    total, count = 0.0, 0
    for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
        pairs = zip(own.detach().split(_ROWS), theirs.detach().split(_ROWS), strict=True)
        total += sum(float((rows.float() - others.float()).double().square().sum()) for rows, others in pairs)
        count += own.numel()
    return math.sqrt(total / count)


def judge_odds(rollouts: Mapping[Rival, Sequence[float]]) -> tuple[float, str]:
    """The logarithm of the mean odds over all rivals and shares, and the rival with the largest."""
    sums = {rival: [sum_odds(logs, share) for share in SHARES] for rival, logs in rollouts.items() if logs}
    if not sums:
        return 0.0, "none"
    every = [log for logs in sums.values() for log in logs]
    mean = float(np.logaddexp.reduce(every) - math.log(len(every)))
    return mean, str(max(sums, key=lambda rival: max(sums[rival])))


def fit_stakes(gains: np.ndarray, *, turns: int = 200, cash: float = 0.02) -> tuple[float, ...]:
    """Stakes with the largest mean logarithm of odds, from y / m (chunks, levels) of a rival's work; at least `cash`
    is kept back."""
    if not len(gains):
        return (0.0,) * NUM_LEVELS
    pays = np.concatenate([np.ones((len(gains), 1)), gains], axis=1)
    held = np.full(pays.shape[1], 1.0 / pays.shape[1])
    for _ in range(turns):
        held = held * (pays / (pays @ held)[:, None]).mean(axis=0)
    held *= (1.0 - cash) / held.sum()
    return tuple(round(float(value), 6) for value in held[1:])
