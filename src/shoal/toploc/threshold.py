"""A threshold that honest samples exceed at no more than a stated rate, with a stated confidence.

Three methods; the result states which one it came from:

- `order`: the (j+1)-th largest of n samples, with the largest j for which P(Binomial(n, rate) <= j) <= 1 -
  confidence. It assumes only that samples are independent and identically distributed. The smallest n it works for is
  ln(1 - confidence) / ln(1 - rate), about 3 / rate at 95 %.
- `tail`: below that n, a ray in log scale. Let S(x) be the share of samples beyond x, and b the value that
  a tenth exceed. If the tail beyond b is nowhere heavier on average than an exponential one, ln(S(b) / S(x)) / (x - b)
  does not decrease with x, so any x whose S(x) is bounded bounds everything further out:

      threshold <= b + (x - b) ln(S(b) / rate) / ln(S(b) / S(x)),        S(x) < S(b)

  Each of the largest samples gives such a bound (Clopper-Pearson for its S, at a shared confidence), and the least is
  taken: four to five times the largest excess for 10,000 samples at 3e-13, more for fewer. This is an extrapolation.
  The tests simulate its error: none for tails up to exponential; for log-normal and Pareto tails the rate may be
  exceeded a hundredfold.
- `margin`: if too few samples stand out for that, twice the largest; for a statistic that counts rare events in units
  (a value whose sign flips) at least what a Poisson count exceeds at the rate, its mean at the upper confidence limit.
  For other statistics no rate is claimed.

A `floor` is what rounding on another machine may add to a statistic that is zero or nearly zero here; it applies where
it is larger. `proven` is what the samples show without extrapolation: the upper confidence limit of the rate at which
the chosen threshold is exceeded (Clopper-Pearson).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

Method = Literal["order", "tail", "margin", "floor"]
MARGIN = 2.0
_TAIL_SHARE = 0.1
_MOST_EVENTS = 128
"""No proof commits to more values."""
_RANKS = (0, 1, 3, 7, 15, 31, 63, 127)
"""Ranks among the largest samples that are tried."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A limit, how it was found, and the rate of false alarms that the samples alone prove for it."""

    value: float
    method: Method
    proven: float


def pick_threshold(
    samples: Sequence[float] | np.ndarray,
    rate: float,
    confidence: float,
    *,
    floor: float = 0.0,
    unit: float = 0.0,
) -> Threshold:
    """The threshold that honest samples exceed at `rate` or less; `unit` is what one event adds to a count."""
    falling = np.sort(np.asarray(samples, dtype=np.float64))[::-1]
    if not len(falling) or not np.isfinite(falling).all() or not (0 < rate < 1 and 0 < confidence < 1):
        raise ValueError("a threshold needs finite samples, and a rate and a confidence between 0 and 1")
    value, method = _pick_value(falling, rate, confidence, unit)
    if floor > value:
        value, method = floor, "floor"
    return Threshold(value, method, bound_rate(int((falling > value).sum()), len(falling), confidence))


@lru_cache(maxsize=4096)
def bound_rate(hits: int, trials: int, confidence: float) -> float:
    """Upper confidence limit of a rate after `hits` in `trials` (Clopper-Pearson, one-sided)."""
    if hits >= trials:
        return 1.0
    counts = np.arange(hits + 1)
    chooses = _log_factorials(trials)[-1] - _log_factorials(trials)[counts] - _log_factorials(trials)[trials - counts]
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        likely = chooses + counts * math.log(middle) + (trials - counts) * math.log1p(-middle)
        refuted = np.exp(likely).sum() <= 1 - confidence
        low, high = (low, middle) if refuted else (middle, high)
    return high


@lru_cache(maxsize=256)
def bound_hits(trials: int, chance: float, rate: float) -> int:
    """The largest number of hits in `trials`, each with `chance`, that is exceeded with probability `rate` or less."""
    left = 1.0
    for hits in range(trials):
        left -= math.exp(_log_binomial(hits, trials, chance))
        if left <= rate:
            return hits
    return trials


def bound_count(often: float, rate: float) -> int:
    """The count that a Poisson variable exceeds at `rate` or less, if it is above 0 with frequency `often`."""
    if often >= 1:
        return _MOST_EVENTS
    mean = -math.log1p(-often)
    term = left = math.exp(-mean)
    count = 0
    while 1 - left > rate and count < _MOST_EVENTS:
        count += 1
        term *= mean / count
        left += term
    return count


def _pick_value(falling: np.ndarray, rate: float, confidence: float, unit: float) -> tuple[float, Method]:
    rank = _find_rank(len(falling), rate, confidence)
    if rank is not None:
        return float(falling[rank]), "order"
    rays = _draw_rays(falling, rate, confidence)
    if not rays:
        often = bound_rate(int((falling > 0).sum()), len(falling), confidence)
        return max(MARGIN * float(falling[0]), unit * bound_count(often, rate), 0.0), "margin"
    return max(min(rays), float(falling[0])), "tail"


def _find_rank(trials: int, rate: float, confidence: float) -> int | None:
    """The largest j with P(Binomial <= j) <= 1 - confidence; None if no j has this property."""
    rank, total = None, 0.0
    for hits in range(trials):
        total += math.exp(_log_binomial(hits, trials, rate))
        if total > 1 - confidence:
            break
        rank = hits
    return rank


def _draw_rays(falling: np.ndarray, rate: float, confidence: float) -> list[float]:
    """Bounds of the quantile from each of the largest samples that stands out from the base."""
    num = len(falling)
    base = float(falling[min(num - 1, int(_TAIL_SHARE * num))])
    sure = 1 - (1 - confidence) / (len(_RANKS) + 1)
    share = 1 - bound_rate(num - int((falling > base).sum()), num, sure)  # a lower bound, which is conservative
    rays = []
    for value in falling[[rank for rank in _RANKS if rank < num]].tolist():
        beyond = bound_rate(int((falling > value).sum()), num, sure)
        if value > base and rate < beyond < share / 2:
            rays.append(base + (value - base) * math.log(share / rate) / math.log(share / beyond))
    return rays


@lru_cache(maxsize=8)
def _log_factorials(largest: int) -> np.ndarray:
    """ln 0!, ln 1!, ..."""
    return np.concatenate([[0.0], np.log(np.arange(1, largest + 1)).cumsum()])


def _log_binomial(hits: int, trials: int, rate: float) -> float:
    choose = math.lgamma(trials + 1) - math.lgamma(hits + 1) - math.lgamma(trials - hits + 1)
    return choose + hits * math.log(rate) + (trials - hits) * math.log1p(-rate)
