"""From honest chunks to thresholds and bets.

Chunks are grouped by variant and by number of tokens. The samples are a mixture of the groups, a node may be in one
of them for ever, so thresholds are picked for a rate that is smaller by the part of the smallest group: if the
mixture exceeds a threshold with probability p, a group that makes up a part s of it does so with probability p / s at
most. A bet's mean is that of the group with the largest.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from shoal.engine.base import CHUNK
from shoal.toploc.calibration import LIMITED, SHARES, Kind, Limit
from shoal.toploc.chunks import ChunkStats, stack_stats
from shoal.toploc.finding import Check
from shoal.toploc.sequence import CALIBRATED, Bet, Stream, bound_mean, read_stream
from shoal.toploc.tail import pick_threshold

FLOORS = {
    Check.EXPONENT: 2.0,
    Check.MANTISSA: 4 / 128,
    Check.MEDIAN: 0.0,
    Check.SIGN: 0.0,
    Check.SAMPLING: 1e-5,
    Check.LOGPROB: 1e-4,
}
"""Least thresholds, an allowance for machines other than the calibrating one: a few roundings to bfloat16 that fall the
other way, and thirty times the noise of float32 log-probs seen here."""
MEAN_FLOORS = {
    Stream.EXPONENT: 0.05,
    Stream.MANTISSA: 0.25 / 128,
    Stream.DISTANCE: 1e-6,
    Stream.LOGPROB: 1e-5,
    Stream.ABOVE: 5e-6,
    Stream.BELOW: 5e-6,
}
"""Least honest means, for the same reason: a rounding the other way in every fourth chunk, ten times the noise."""
SIZES = (1, 2, 4, 8, 16, CHUNK)
"""Short chunks are grouped by size at these edges."""
_QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
_CLIPS = {
    Stream.EXPONENT: Check.EXPONENT,
    Stream.MANTISSA: Check.MANTISSA,
    Stream.DISTANCE: Check.SAMPLING,
    Stream.LOGPROB: Check.LOGPROB,
    Stream.ABOVE: Check.LOGPROB,
    Stream.BELOW: Check.LOGPROB,
}
"""The check whose threshold bounds a stream from above: what exceeds it fails at once."""

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
    sure = 1 - (1 - confidence) / 2 / (len(LIMITED) + len(CALIBRATED) * len(groups))
    aimed = rate * min(len(group) for group in groups) / num
    limits = {check: _fit_limit(check, pooled[name], rate, aimed, sure) for check, name in LIMITED.items()}
    stacked = [stack_stats(group) for group in groups]
    return Kind(limits=limits, bets={stream: _fit_bet(stream, stacked, limits, sure) for stream in CALIBRATED})


def _group_sizes(variants: Sequence[Sequence[ChunkStats]]) -> list[list[ChunkStats]]:
    pooled = [chunk for chunks in variants for chunk in chunks]
    edges = np.searchsorted(SIZES, [chunk.tokens for chunk in pooled], side="right")
    return [[chunk for chunk, edge in zip(pooled, edges, strict=True) if edge == own] for own in range(len(SIZES) + 1)]


def _fit_limit(check: Check, values: np.ndarray, rate: float, aimed: float, confidence: float) -> Limit:
    threshold = pick_threshold(values, aimed, confidence, floor=FLOORS[check])
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
    stream: Stream, groups: Sequence[Mapping[str, np.ndarray]], limits: Mapping[Check, Limit], confidence: float
) -> Bet:
    columns = [read_stream(stats, stream) for stats in groups]
    check = _CLIPS[stream]
    # a mean of 32 tokens lies far below the largest of them, so it has a scale of its own
    largest = max(float(np.abs(column).max()) for column in columns)
    high = min(limits[check].threshold, max(2 * largest, FLOORS[check]))
    low = -high if stream in (Stream.ABOVE, Stream.BELOW) else 0.0
    frame = Bet(low=low, high=high, mean=0.5)
    floor = float(frame.scale(np.array([MEAN_FLOORS[stream]]))[0])
    mean = max(floor, *(bound_mean(frame.scale(column), confidence) for column in columns))
    return frame.model_copy(update={"mean": min(mean, 1 - 1e-6)})
