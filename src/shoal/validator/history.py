"""The fourth stage, as far as a validator goes: what accepted work is like, in a few whole numbers for the ledger.

What they mean for an owner is decided by the coordinator, from those of everybody: swarm/rules/history.py.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from shoal.rollout import Group
from shoal.swarm.messages import DriftCount, GroupFinding, GroupNumbers
from shoal.swarm.params import MILLION
from shoal.toploc.calibration import Calibration
from shoal.toploc.check import Report
from shoal.toploc.chunks import ChunkStats
from shoal.toploc.sequence import Level, Stream

_MOST = 10**12


def describe_group(group: Group, *, signal: bool) -> GroupFinding:
    """What is said of an accepted group."""
    stated = np.concatenate([rollout.logprobs for rollout in group.rollouts]).astype(np.float64)
    numbers = GroupNumbers(
        tokens=group.num_tokens,
        reward=_count_millionths(float(np.mean(group.rewards, dtype=np.float64))),
        entropy=_count_millionths(-float(stated.mean())),
    )
    return GroupFinding(index=group.index, signal=signal, numbers=numbers)


def count_drift(reports: Iterable[Report], calibration: Calibration) -> tuple[DriftCount, ...]:
    """How many of the checked chunks have log-probs further from the replayed ones than each calibrated level."""
    chunks = [chunk for report in reports for chunk in report.chunks]
    counts = []
    for is_full, bets in calibration.bets.items():
        own = [chunk for chunk in chunks if chunk.is_full == is_full]
        levels = bets[Stream.LOGPROB].levels if own else ()
        counts += [_count_above(place, level, own) for place, level in enumerate(levels)]
    return tuple(counts)


def _count_above(place: int, level: Level, chunks: Sequence[ChunkStats]) -> DriftCount:
    above = sum(not chunk.logprob_mean <= level.value for chunk in chunks)  # what is not a number counts as the worst
    chance = min(MILLION, int(level.chance * MILLION) + 1)  # rounded up: never less than honest chunks have
    return DriftCount(level=place, chance=chance, chunks=len(chunks), above=above)


def _count_millionths(value: float) -> int:
    return round(min(max(value * MILLION, -_MOST), _MOST))
