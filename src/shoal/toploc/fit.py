"""From honest chunks to thresholds and bets.

Chunks are grouped by variant and by number of tokens. The samples are a mixture of the groups, a node may be in one
of them for ever, so thresholds are picked for a rate that is smaller by the part of the smallest group: if the
mixture exceeds a threshold with probability p, a group that makes up a part s of it does so with probability p / s at
most. A bet's chance is that of the group with the largest.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from shoal.engine.base import CHUNK
from shoal.toploc.calibration import LIMITED, SHARES, Kind, Limit
from shoal.toploc.chunks import ChunkStats, stack_stats
from shoal.toploc.finding import Check
from shoal.toploc.sequence import CALIBRATED, Bet, Level, Stream, read_stream
from shoal.toploc.tail import bound_rate, pick_threshold

FLOORS = {
    Check.EXPONENT: 2.0,
    Check.MANTISSA: 4 / 128,
    Check.MEDIAN: 0.5,
    Check.SIGN: 1.0,
    Check.SAMPLING: 1e-5,
    Check.LOGPROB: 1e-4,
}
"""Least thresholds, an allowance for machines other than the calibrating one: a few roundings to bfloat16 that fall the
other way, and three times the largest difference of float32 log-probs seen here."""
UNITS = {Check.EXPONENT: 1.0, Check.MANTISSA: 1 / 128, Check.SIGN: 1.0}
"""What one value that rounds the other way adds to a statistic."""
LEVEL_FLOORS = {
    Stream.EXPONENT: 1.0,
    Stream.MANTISSA: 2 / 128,
    Stream.DISTANCE: 1e-6,
    Stream.LOGPROB: 1e-5,
    Stream.ABOVE: 5e-6,
    Stream.BELOW: 5e-6,
}
"""Least values that are bet on, for the same reason: two roundings the other way, ten times the noise."""
LEVELS = (0.5, 0.9, 0.99, 0.999)
"""Shares of honest chunks below the values that are bet on."""
SLACK = 1.2
"""Chances are stated this much too high: chunks of one rollout resemble each other, samples are taken as apart."""
SIZES = (1, 2, 4, 8, 16, CHUNK)
"""Short chunks are grouped by size at these edges."""
_QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
Samples = Mapping[str, Sequence[Sequence[ChunkStats]]]
"""Honest chunks by variant and rollout."""


def fit_kinds(samples: Samples, *, rate: float, confidence: float, max_tokens: int) -> tuple[Kind, Kind]:
    """Limits and bets of full and of short chunks, for a rate per rollout of at most `max_tokens`."""
    half = rate / SHARES / 2
    kinds = []
    for full, share in ((True, half / math.ceil(max_tokens / CHUNK)), (False, half)):
        variants = [[c for chunks in rollouts for c in chunks if c.is_full == full] for rollouts in samples.values()]
        kinds.append(_fit_kind(variants, rate=share, confidence=confidence))
    return kinds[0], kinds[1]


def _fit_kind(variants: Sequence[Sequence[ChunkStats]], *, rate: float, confidence: float) -> Kind:
    groups = [chunks for chunks in (*variants, *_group_sizes(variants)) if chunks]
    if not groups:
        raise ValueError("there are no samples of full, or none of short chunks")
    pooled = stack_stats([chunk for chunks in variants for chunk in chunks])
    num = len(pooled["exponent"])
    sure = 1 - (1 - confidence) / 2 / (len(LIMITED) + len(CALIBRATED) * len(LEVELS) * len(groups))
    aimed = rate * min(len(group) for group in groups) / num
    limits = {check: _fit_limit(check, pooled[name], rate, aimed, sure) for check, name in LIMITED.items()}
    stacked = [stack_stats(group) for group in groups]
    return Kind(limits=limits, bets={stream: _fit_bet(stream, pooled, stacked, sure) for stream in CALIBRATED})


def _group_sizes(variants: Sequence[Sequence[ChunkStats]]) -> list[list[ChunkStats]]:
    pooled = [chunk for chunks in variants for chunk in chunks]
    edges = np.searchsorted(SIZES, [chunk.tokens for chunk in pooled], side="right")
    return [[chunk for chunk, edge in zip(pooled, edges, strict=True) if edge == own] for own in range(len(SIZES) + 1)]


def _fit_limit(check: Check, values: np.ndarray, rate: float, aimed: float, confidence: float) -> Limit:
    threshold = pick_threshold(values, aimed, confidence, floor=FLOORS[check], unit=UNITS.get(check, 0.0))
    quantiles = {f"{q:g}": float(np.quantile(values, q, method="higher")) for q in _QUANTILES}
    return Limit(
        threshold=threshold.value,
        method=threshold.method,
        rate=rate,
        proven=threshold.proven,
        num_samples=len(values),
        quantiles=quantiles,
    )


def _fit_bet(
    stream: Stream, pooled: Mapping[str, np.ndarray], groups: Sequence[Mapping[str, np.ndarray]], confidence: float
) -> Bet:
    columns = [read_stream(stats, stream) for stats in groups]
    quantiles = np.quantile(read_stream(pooled, stream), LEVELS, method="higher")
    values = np.maximum(quantiles, LEVEL_FLOORS[stream]).tolist()
    return Bet(levels=tuple(Level(value=value, chance=_bound_chance(columns, value, confidence)) for value in values))


def _bound_chance(columns: Sequence[np.ndarray], value: float, confidence: float) -> float:
    rates = (bound_rate(int((column > value).sum()), len(column), confidence) for column in columns)
    return min(SLACK * max(rates), 1.0)
