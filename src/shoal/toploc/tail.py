"""A threshold that honest samples exceed at no more than a stated rate, with a stated confidence.

Three methods, and the result says which one it came from:

- `order`: the (j+1)-th largest of n samples, with the largest j for which P(Binomial(n, rate) <= j) <= 1 -
  confidence. It assumes nothing but that samples are drawn alike and apart. The smallest n it works for is ln(1 -
  confidence) / ln(1 - rate), about 3 / rate at 95 %.
- `tail`: below that n a generalised Pareto tail is laid through the largest tenth, with its mean excess at the upper
  end of a confidence interval and a shape that is never lighter than exponential. This is an extrapolation: it holds
  if the tail goes on as it began. The tests simulate how it errs: for tails up to exponential not at all, for
  log-normal and Pareto ones it may be exceeded several times as often as stated.
- `margin`: where too few samples stand out to fit anything, twice the largest. No rate is claimed by theory.

A `floor` is what rounding on another machine may add to a statistic that is zero or nearly so here; where it is
larger it wins. `proven` is what the samples show without any extrapolation: the upper confidence limit of the rate at
which the chosen threshold is exceeded (Clopper-Pearson).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

import numpy as np

Method = Literal["order", "tail", "margin", "floor"]
MARGIN = 2.0
MIN_TAIL = 20
"""Exceedances from which a tail is fitted."""
_TAIL_SHARE = 0.1
_MAX_SHAPE = 0.5


@dataclass(frozen=True, slots=True)
class Threshold:
    """A limit, how it was found, and the rate of false alarms that the samples alone prove for it."""

    value: float
    method: Method
    proven: float


def pick_threshold(
    samples: Sequence[float] | np.ndarray, rate: float, confidence: float, *, floor: float = 0.0
) -> Threshold:
    """The threshold that honest samples exceed at `rate` or less."""
    falling = np.sort(np.asarray(samples, dtype=np.float64))[::-1]
    if not len(falling) or not np.isfinite(falling).all() or not (0 < rate < 1 and 0 < confidence < 1):
        raise ValueError("a threshold needs finite samples, and a rate and a confidence between 0 and 1")
    value, method = _pick_value(falling, rate, confidence)
    if floor > value:
        value, method = floor, "floor"
    return Threshold(value, method, bound_rate(int((falling > value).sum()), len(falling), confidence))


def bound_rate(hits: int, trials: int, confidence: float) -> float:
    """Upper confidence limit of a rate of which `hits` were seen in `trials` (Clopper-Pearson, one-sided)."""
    if hits >= trials:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _binomial_cdf(hits, trials, middle) > 1 - confidence else (low, middle)
    return high


@lru_cache(maxsize=256)
def bound_hits(trials: int, chance: float, rate: float) -> int:
    """The most hits of `trials`, each with `chance`, that are exceeded with probability `rate` or less."""
    left = 1.0
    for hits in range(trials):
        left -= math.exp(_log_binomial(hits, trials, chance))
        if left <= rate:
            return hits
    return trials


def _pick_value(falling: np.ndarray, rate: float, confidence: float) -> tuple[float, Method]:
    rank = _find_rank(len(falling), rate, confidence)
    if rank is not None:
        return float(falling[rank]), "order"
    base = float(falling[min(len(falling) - 1, max(MIN_TAIL, int(_TAIL_SHARE * len(falling))))])
    excess = falling[falling > base] - base
    share = len(excess) / len(falling)
    if len(excess) < MIN_TAIL or share <= rate:
        return MARGIN * max(0.0, float(falling[0])), "margin"
    return base + _extrapolate(excess, math.log(share / rate), confidence), "tail"


def _find_rank(trials: int, rate: float, confidence: float) -> int | None:
    """The largest j with P(Binomial <= j) <= 1 - confidence; None if there is none."""
    rank = None
    total = 0.0
    for hits in range(trials):
        total += math.exp(_log_binomial(hits, trials, rate))
        if total > 1 - confidence:
            break
        rank = hits
    return rank


def _extrapolate(excess: np.ndarray, log_ratio: float, confidence: float) -> float:
    """Quantile that is exp(log_ratio) times rarer than exceeding 0, from the excesses in falling order.

    The shape of the generalised Pareto tail is that of the probability-weighted moments (Hosking and Wallis 1987).
    """
    num = len(excess)
    ranks = (np.arange(num) + 0.65) / num  # share of larger ones
    first, second = float(excess.mean()), float((ranks * excess).mean())
    spread = first - 2 * second
    shape = min(max(0.0, 2 - first / spread), _MAX_SHAPE) if spread > 0 else 0.0
    scale = first * (1 + NormalDist().inv_cdf(confidence) / math.sqrt(num)) * (1 - shape)
    return scale * (math.expm1(shape * log_ratio) / shape if shape > 0 else log_ratio)


def _binomial_cdf(hits: int, trials: int, rate: float) -> float:
    return math.fsum(math.exp(_log_binomial(k, trials, rate)) for k in range(hits + 1))


def _log_binomial(hits: int, trials: int, rate: float) -> float:
    choose = math.lgamma(trials + 1) - math.lgamma(hits + 1) - math.lgamma(trials - hits + 1)
    return choose + hits * math.log(rate) + (trials - hits) * math.log1p(-rate)
