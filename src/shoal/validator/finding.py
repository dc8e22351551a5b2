"""What a validator found: its assessment of a submission, and the findings and numbers that a verdict states.

Findings are built only here: `measurement` for a number of `toploc`, `violation` for a broken rule. The numbers of
accepted groups and the drift counts are integers for the ledger; the coordinator decides what they mean for an owner,
from the numbers of all validators (coordinator/rules/drift.py).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.protocol.messages import (
    MAX_CPU_MS,
    DriftCount,
    Finding,
    GroupFinding,
    GroupNumbers,
    Job,
    RivalOdds,
    Verdict,
    VerdictStatement,
)
from shoal.protocol.params import MILLION
from shoal.rollout import Group
from shoal.toploc.calibration import Calibration
from shoal.toploc.check import RolloutReport, list_odds
from shoal.toploc.chunks import ChunkStats
from shoal.toploc.finding import SHARES, spell_odds, sum_odds
from shoal.toploc.sequential_test import EvidenceStream, Level

MAX_FINDINGS = 64
MAX_WHERE = 80
BEYOND = "1e999"
"""how NaN and infinity are written: the ledger holds decimals"""
_MAX_MILLIONTHS = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """How much was replayed for an assessment."""

    rollouts: int = 0
    tokens: int = 0


NOTHING = Replayed()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """A verdict and its reasons."""

    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    tokens: int = 0
    groups: tuple[GroupFinding, ...] = ()
    drift: tuple[DriftCount, ...] = ()
    odds: tuple[RivalOdds, ...] = ()
    replayed: Replayed = NOTHING
    """not sent"""
    cpu_s: float = field(default=0.0, compare=False)
    """CPU time that it took"""

    def state(self, job: Job) -> VerdictStatement:
        """The statement that is signed and sent."""
        return VerdictStatement(
            submission=job.submission,
            round=job.round,
            verdict=self.verdict,
            findings=self.findings[:MAX_FINDINGS],
            tokens=self.tokens,
            groups=self.groups,
            drift=self.drift,
            odds=self.odds,
            cpu_ms=min(round(1000 * self.cpu_s), MAX_CPU_MS),
        )


def violation(check: str, where: str) -> Finding:
    """A rule that was broken."""
    return Finding(check=check, statistic="1", threshold="0", passed=False, where=clean_where(where))


def measurement(check: str, statistic: float, threshold: float, where: str) -> Finding:
    """A number and the largest value allowed; NaN fails."""
    passed = statistic <= threshold
    return Finding(
        check=check,
        statistic=spell_number(statistic),
        threshold=spell_number(threshold),
        passed=passed,
        where=clean_where(where),
    )


def rejected(verdict: Verdict, findings: Iterable[Finding], replayed: Replayed = NOTHING) -> Assessment:
    """An assessment that pays nothing."""
    return Assessment(verdict=verdict, findings=tuple(findings), replayed=replayed)


def spell_number(value: float) -> str:
    """A measured number as written in the ledger, to six digits."""
    if not math.isfinite(value):
        return BEYOND
    return f"{value:.6g}".replace("e+", "e")


def clean_where(text: str) -> str:
    """A location in printable ASCII, short enough for a message."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)[:MAX_WHERE]


def describe_group(group: Group, *, signal: bool) -> GroupFinding:
    """What a verdict states about an accepted group."""
    stated = np.concatenate([rollout.logprobs for rollout in group.rollouts]).astype(np.float64)
    numbers = GroupNumbers(
        tokens=group.num_tokens,
        reward=_count_millionths(float(np.mean(group.rewards, dtype=np.float64))),
        entropy=_count_millionths(-float(stated.mean())),
    )
    return GroupFinding(index=group.index, signal=signal, numbers=numbers)


def count_drift(reports: Iterable[RolloutReport], calibration: Calibration) -> tuple[DriftCount, ...]:
    """For each calibrated level, the number of checked chunks whose log-probs deviate by more than the level."""
    chunks = [chunk for report in reports for chunk in report.chunks]
    counts = []
    for is_full, bets in calibration.bets.items():
        own = [chunk for chunk in chunks if chunk.is_full == is_full]
        levels = bets[EvidenceStream.LOGPROB].levels if own else ()
        counts += [_count_above(place, level, own) for place, level in enumerate(levels)]
    return tuple(counts)


def state_odds(reports: Sequence[RolloutReport]) -> tuple[RivalOdds, ...]:
    """The odds that checked rollouts were made with each rival, for each share of cheated ones."""
    return tuple(
        RivalOdds(rival=rival.value, odds=tuple(spell_odds(sum_odds(logs, share)) for share in SHARES))
        for rival, logs in list_odds(reports).items()
    )


def _count_above(place: int, level: Level, chunks: Sequence[ChunkStats]) -> DriftCount:
    above = sum(not chunk.logprob_mean <= level.value for chunk in chunks)  # NaN counts as the worst
    chance = min(MILLION, int(level.chance * MILLION) + 1)  # rounded up: never below the rate of honest chunks
    return DriftCount(level=place, chance=chance, chunks=len(chunks), above=above)


def _count_millionths(value: float) -> int:
    return round(min(max(value * MILLION, -_MAX_MILLIONTHS), _MAX_MILLIONTHS))
