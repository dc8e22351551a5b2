"""Evidence that grows chunk by chunk, over a rollout or over all that a node ever sent, and may be looked at any time.

A deviation too small for one chunk shows in how often many are larger than honest ones. For a statistic x of a chunk
and a level c, let y = 1 if x > c and 0 else, and m the calibrated upper bound of how often that happens to honest
chunks. Whoever bets a share f of their wealth that it happens more often has

    W_f <- W_f (1 + f (y / m - 1)),    0 < f < 1.

As long as E[y | all before] <= m, W_f cannot grow in expectation. Beside these bets stand the exact odds of
toploc/termination.py and toploc/shape.py, which need no m. A bet against an honest node loses for as long as the node
is honest, so not all is staked at once: rollout r adds s_r fresh money to every bet, sum_r s_r <= 1. The mean over
all bets then has an expectation of at most 1 at any time, and by Ville's inequality

    P(the mean ever reaches 1 / a) <= a

however long one watches and whenever one stops. Neither the tail of x nor the independence of chunks matters: only that
an honest node's chance to exceed c, given what came before, stays below m. A node whose every rollout is on prompts
noisier than those of the calibration would break that.

Power: levels are quantiles of honest chunks from the median up, so a shift of the whole distribution shows at the low
ones and rare large values at the high ones. A node that exceeds a level with chance p gains up to p ln(p / m) + (1 -
p) ln((1 - p) / (1 - m)) per chunk. One that begins to cheat at rollout r is noticed ln(1 / s_r) later, which is 8 nats
after 100 honest rollouts and 14 after 10,000.
"""

import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

import numpy as np
from pydantic import Field

from shoal.config import Settings
from shoal.engine.base import CHUNK
from shoal.toploc.chunks import ChunkStats
from shoal.toploc.finding import Check, Finding
from shoal.toploc.wealth import average_wealth

FRACTIONS = (0.05, 0.2, 0.5, 0.9)
NUM_LEVELS = 4
_STAKE_SUM = 2.11
"""More than the sum of 1 / (n ln(n)^2) over n = 2, 3, ..."""


class Stream(StrEnum):
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


EXACT = (Stream.HAZARD, Stream.SHAPE, Stream.TAIL)
CALIBRATED: tuple[Stream, ...] = tuple(stream for stream in Stream if stream not in EXACT)
_STATISTIC = {Stream.ABOVE: "bias", Stream.BELOW: "bias"}
"""statistics of chunks that are not called as their streams are"""


class Level(Settings):
    """A value, and the most often that an honest node's chunks exceed it."""

    value: float
    chance: float = Field(gt=0.0, le=1.0)
    """at 1 the bet can never gain: some honest node exceeds the value always"""


class Bet(Settings):
    """The levels of one stream."""

    levels: tuple[Level, ...] = Field(min_length=NUM_LEVELS, max_length=NUM_LEVELS)


BetTable = Mapping[bool, Mapping[Stream, Bet]]
"""Bets on full chunks (True) and short ones (False)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the bets won so far. A small value that is stored per node and goes on from where it was."""

    rollouts: int = 0
    chunks: int = 0
    wealth: Mapping[Stream, tuple[float, ...]] = field(default_factory=dict)
    """log W of each bet of each stream that was bet on; every stream has the same share of the mean for ever"""
    peak: float = 0.0
    """largest log of the mean wealth so far, which is what Ville's inequality bounds"""

    def extend(
        self, chunks: Sequence[ChunkStats], bets: BetTable, odds: Mapping[Stream, np.ndarray] | None = None
    ) -> "Evidence":
        """The evidence after one more rollout: its chunks, and paths (tokens, bets) of log wealth of exact odds."""
        assert chunks, "a rollout has at least one chunk"
        stake = _log_stake(self.rollouts + 1)
        paths = np.logaddexp(self._stack_logs(), stake) + _trace_bets(chunks, bets)
        wealth = dict(self.wealth) | dict(zip(CALIBRATED, map(tuple, paths[-1].tolist()), strict=True))
        means = np.empty((len(chunks), len(Stream)))
        means[:, : len(CALIBRATED)] = average_wealth(paths)
        ends = np.arange(1, len(chunks) + 1) * CHUNK
        for place, stream in enumerate(EXACT, start=len(CALIBRATED)):
            path = self._logs(stream)[None]  # a stream without bets this time stands still
            if odds is not None and stream in odds:
                path = np.logaddexp(path, stake) + odds[stream][np.minimum(ends, len(odds[stream])) - 1]
                wealth[stream] = tuple(path[-1].tolist())
            means[:, place] = average_wealth(path)
        peak = max(self.peak, float(average_wealth(means).max()))
        return Evidence(self.rollouts + 1, self.chunks + len(chunks), wealth, peak)

    @property
    def leader(self) -> str:
        """The stream that won most."""
        return str(max(self.wealth, key=lambda stream: max(self.wealth[stream]), default="nothing"))

    def judge(self, rate: float) -> Finding:
        """Whether the evidence ever exceeded what honest work exceeds with probability `rate` in all eternity."""
        return Finding(Check.SEQUENCE, self.peak, -math.log(rate), f"{self.leader}, {self.chunks} chunks")

    def to_json(self) -> str:
        data = {"rollouts": self.rollouts, "chunks": self.chunks, "wealth": dict(self.wealth), "peak": self.peak}
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Evidence":
        """What `to_json` wrote; ValueError for anything else, for evidence that is no number would never alarm."""
        try:
            data = json.loads(text)
            wealth = {Stream(name): tuple(float(log) for log in logs) for name, logs in data["wealth"].items()}
            found = cls(int(data["rollouts"]), int(data["chunks"]), wealth, float(data["peak"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no stored evidence: {error}") from error
        sizes = {stream: NUM_LEVELS * len(FRACTIONS) for stream in CALIBRATED}
        fits = all(len(logs) == sizes.get(stream, len(logs)) > 0 for stream, logs in wealth.items())
        numbers = [found.peak, *(log for logs in wealth.values() for log in logs)]
        if not fits or found.rollouts < 0 or found.chunks < 0 or any(math.isnan(number) for number in numbers):
            raise ValueError("no stored evidence: numbers are missing or out of range")
        return found

    def _logs(self, stream: Stream) -> np.ndarray:
        return np.array(self.wealth.get(stream, (-math.inf,)))

    def _stack_logs(self) -> np.ndarray:
        """Log wealth (streams, bets) of the calibrated streams."""
        return np.array([self.wealth.get(stream, _NOTHING) for stream in CALIBRATED])


def read_stream(stats: Mapping[str, np.ndarray], stream: Stream) -> np.ndarray:
    """The values of a calibrated stream from stacked statistics."""
    if stream is Stream.ABOVE:
        return stats["bias"]
    if stream is Stream.BELOW:
        return -stats["bias"]
    return stats[stream.value]


def _trace_bets(chunks: Sequence[ChunkStats], bets: BetTable) -> np.ndarray:
    """Log wealth (chunks, streams, levels x fractions) of one unit staked before the first chunk.

    All streams at once: for the short rollouts of a small task the calls would cost more than the arithmetic.
    """
    values, chances = _stack_bets(bets)
    kinds = [int(chunk.is_full) for chunk in chunks]
    found = np.array([_read_values(chunk) for chunk in chunks], dtype=np.float64)
    found[:, -1] *= -1.0  # BELOW, the last, is the bias the other way round
    exceeds = ~(found[:, :, None] <= values[kinds])  # what is not a number counts as the worst
    odds = (exceeds / chances[kinds])[..., None]
    gains = np.log1p(_FRACTIONS * (odds - 1.0)).cumsum(axis=0)
    return gains.reshape(len(chunks), len(CALIBRATED), -1)


_FRACTIONS = np.array(FRACTIONS)
_NOTHING = (-math.inf,) * (NUM_LEVELS * len(FRACTIONS))
_read_values = attrgetter(*(_STATISTIC.get(stream, stream.value) for stream in CALIBRATED))
_tables: OrderedDict[tuple[int, int], tuple[BetTable, np.ndarray, np.ndarray]] = OrderedDict()
_MAX_TABLES = 8


def _stack_bets(bets: BetTable) -> tuple[np.ndarray, np.ndarray]:
    """Values and chances (short or full, streams, levels) of a table, which is stacked once and not changed after."""
    kinds = bets[False], bets[True]
    key = id(kinds[0]), id(kinds[1])
    if key not in _tables:
        levels = [[kind[stream].levels for stream in CALIBRATED] for kind in kinds]
        values, chances = (
            np.array([[[getattr(level, name) for level in bet] for bet in kind] for kind in levels])
            for name in ("value", "chance")
        )
        _tables[key] = {False: kinds[0], True: kinds[1]}, values, chances  # kept with it, so that ids stay theirs
        while len(_tables) > _MAX_TABLES:
            _tables.popitem(last=False)
    return _tables[key][1:]


def _log_stake(rollout: int) -> float:
    """log s_r for r = 1, 2, ...: falling as slowly as a convergent sum can."""
    return -math.log(_STAKE_SUM * (rollout + 1) * math.log(rollout + 1) ** 2)
