"""Evidence that grows chunk by chunk, over a rollout or a node's whole history, and may be evaluated at any time.

A deviation too small to show in one chunk shows in how often many chunks exceed honest ones. For a statistic x of a
chunk and a level c, let y = 1 if x > c, else 0, and let m be the calibrated upper bound of how often honest chunks have
y = 1. A bet of a share f of the wealth that it happens more often updates the wealth as

    W_f <- W_f (1 + f (y / m - 1)),    0 < f < 1.

As long as E[y | all before] <= m, W_f cannot grow in expectation. In addition to these bets there are the exact odds of
toploc/token_checks.py and toploc/shape_test.py, which need no m. A bet against an honest node loses for as long as the
node is honest, so the stake is spread over time: rollout r adds a new stake s_r to every bet, sum_r s_r <= 1. The mean
over all bets then has an expectation of at most 1 at any time, and by Ville's inequality

    P(the mean ever reaches 1 / a) <= a

for any length of observation and any stopping time. Neither the tail of x nor the independence of chunks matters: only
that an honest node's chance to exceed c, given everything before, stays below m. A node whose every rollout is on
prompts noisier than those of the calibration would violate that.

Power: levels are quantiles of honest chunks from the median up, so a shift of the whole distribution shows at the low
levels and rare large values at the high ones. A node that exceeds a level with chance p gains up to p ln(p / m) + (1 -
p) ln((1 - p) / (1 - m)) per chunk. A node that starts cheating at rollout r is detected ln(1 / s_r) nats later, which
is 8 nats after 100 honest rollouts and 14 after 10,000.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

import numpy as np
from pydantic import Field

from shoal.config.run import Settings
from shoal.engine.base import CHUNK
from shoal.toploc.chunks import ChunkStats
from shoal.toploc.finding import Check, CheckResult
from shoal.toploc.shape_test import average_wealth
from shoal.util.units import count_things

FRACTIONS = (0.05, 0.2, 0.5, 0.9)
NUM_LEVELS = 4
_STAKE_SUM = 2.11
"""More than the sum of 1 / (n ln(n)^2) over n = 2, 3, ..."""


class EvidenceStream(StrEnum):
    """What is bet on. The first six are statistics of chunks against honest ones, the last three exact odds."""

    EXPONENT = "exponent"
    MANTISSA = "mantissa"
    DISTANCE = "distance_mean"
    LOGPROB = "logprob_mean"
    ABOVE = "bias_above"
    BELOW = "bias_below"
    HAZARD = "hazard"
    SHAPE = "shape"
    TAIL = "tail"


EXACT = (EvidenceStream.HAZARD, EvidenceStream.SHAPE, EvidenceStream.TAIL)
CALIBRATED: tuple[EvidenceStream, ...] = tuple(stream for stream in EvidenceStream if stream not in EXACT)
_STATISTIC = {EvidenceStream.ABOVE: "bias", EvidenceStream.BELOW: "bias"}
"""statistics of chunks whose names differ from their streams"""


class Level(Settings):
    """A value, and an upper bound of how often an honest node's chunks exceed it."""

    value: float
    chance: float = Field(gt=0.0, le=1.0)
    """at 1 the bet can never gain: some honest node always exceeds the value"""


class Bet(Settings):
    """The levels of one stream."""

    levels: tuple[Level, ...] = Field(min_length=NUM_LEVELS, max_length=NUM_LEVELS)


BetTable = Mapping[bool, Mapping[EvidenceStream, Bet]]
"""Bets on full chunks (True) and short ones (False)."""


@dataclass(frozen=True, slots=True)
class SequentialEvidence:
    """The winnings of the bets so far; immutable, extended rollout by rollout."""

    rollouts: int = 0
    chunks: int = 0
    wealth: Mapping[EvidenceStream, tuple[float, ...]] = field(default_factory=dict)
    """log W of each bet of each stream that was bet on; every stream keeps the same share of the mean"""
    peak: float = 0.0
    """largest log of the mean wealth so far, which Ville's inequality bounds"""

    def extend(
        self, chunks: Sequence[ChunkStats], bets: BetTable, odds: Mapping[EvidenceStream, np.ndarray] | None = None
    ) -> "SequentialEvidence":
        """The evidence after one more rollout: its chunks, and paths (tokens, bets) of log wealth of exact odds."""
        assert chunks, "a rollout has at least one chunk"
        stake = _log_stake(self.rollouts + 1)
        before = np.array([self.wealth.get(stream, _NOTHING) for stream in CALIBRATED])
        paths = np.logaddexp(before, stake) + _trace_bets(chunks, bets)
        wealth = dict(self.wealth) | dict(zip(CALIBRATED, map(tuple, paths[-1].tolist()), strict=True))
        means = np.empty((len(chunks), len(EvidenceStream)))
        means[:, : len(CALIBRATED)] = average_wealth(paths)
        ends = np.arange(1, len(chunks) + 1) * CHUNK
        for place, stream in enumerate(EXACT, start=len(CALIBRATED)):
            path = np.array([self.wealth.get(stream, (-math.inf,))])  # a stream without bets this time is unchanged
            if odds is not None and stream in odds:
                path = np.logaddexp(path, stake) + odds[stream][np.minimum(ends, len(odds[stream])) - 1]
                wealth[stream] = tuple(path[-1].tolist())
            means[:, place] = average_wealth(path)
        peak = max(self.peak, float(average_wealth(means).max()))
        return SequentialEvidence(self.rollouts + 1, self.chunks + len(chunks), wealth, peak)

    @property
    def leader(self) -> str:
        """The stream with the largest winnings."""
        return str(max(self.wealth, key=lambda stream: max(self.wealth[stream]), default="nothing"))

    def judge(self, rate: float) -> CheckResult:
        """Whether the evidence ever exceeded what honest work ever exceeds with probability `rate`."""
        return CheckResult(
            Check.SEQUENCE, self.peak, -math.log(rate), f"{self.leader}, {count_things(self.chunks, 'chunk')}"
        )


def read_stream(stats: Mapping[str, np.ndarray], stream: EvidenceStream) -> np.ndarray:
    """The values of a calibrated stream from stacked statistics."""
    if stream is EvidenceStream.ABOVE:
        return stats["bias"]
    if stream is EvidenceStream.BELOW:
        return -stats["bias"]
    return stats[stream.value]


def _trace_bets(chunks: Sequence[ChunkStats], bets: BetTable) -> np.ndarray:
    """Log wealth (chunks, streams, levels x fractions) of one unit staked before the first chunk.

    All streams at once: for short rollouts the calls would cost more than the arithmetic.
    """
    values, chances = _stack_bets(bets)
    kinds = [int(chunk.is_full) for chunk in chunks]
    found = np.array([_read_values(chunk) for chunk in chunks], dtype=np.float64)
    found[:, -1] *= -1.0  # BELOW, the last, is the negated bias
    exceeds = ~(found[:, :, None] <= values[kinds])  # NaN counts as the worst
    odds = (exceeds / chances[kinds])[..., None]
    gains = np.log1p(_FRACTIONS * (odds - 1.0)).cumsum(axis=0)
    return gains.reshape(len(chunks), len(CALIBRATED), -1)


_FRACTIONS = np.array(FRACTIONS)
_NOTHING = (-math.inf,) * (NUM_LEVELS * len(FRACTIONS))
_read_values = attrgetter(*(_STATISTIC.get(stream, stream.value) for stream in CALIBRATED))
_tables: OrderedDict[tuple[int, int], tuple[BetTable, np.ndarray, np.ndarray]] = OrderedDict()
_MAX_TABLES = 8


def _stack_bets(bets: BetTable) -> tuple[np.ndarray, np.ndarray]:
    """Values and chances (short or full, streams, levels) of a table; cached, because tables do not change."""
    kinds = bets[False], bets[True]
    key = id(kinds[0]), id(kinds[1])
    if key not in _tables:
        levels = [[kind[stream].levels for stream in CALIBRATED] for kind in kinds]
        values, chances = (
            np.array([[[getattr(level, name) for level in bet] for bet in kind] for kind in levels])
            for name in ("value", "chance")
        )
        _tables[key] = {False: kinds[0], True: kinds[1]}, values, chances  # keeps the table alive, so ids stay unique
        while len(_tables) > _MAX_TABLES:
            _tables.popitem(last=False)
    return _tables[key][1:]


def _log_stake(rollout: int) -> float:
    """log s_r for r = 1, 2, ...: decreases about as slowly as a convergent sum allows."""
    return -math.log(_STAKE_SUM * (rollout + 1) * math.log(rollout + 1) ** 2)
