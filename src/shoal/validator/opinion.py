"""What a validator found, on its way to a verdict: findings in the words of the wire."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.swarm.messages import DriftCount, Finding, GroupFinding, Job, Verdict, VerdictStatement

MAX_FINDINGS = 64
MAX_WHERE = 80
BEYOND = "1e999"
"""how a number that is none, or has no end, is spelled: the ledger holds decimals"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """How much was computed for an opinion."""

    rollouts: int = 0
    tokens: int = 0


NOTHING = Replayed()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """A verdict and why."""

    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    tokens: int = 0
    groups: tuple[GroupFinding, ...] = ()
    drift: tuple[DriftCount, ...] = ()
    replayed: Replayed = NOTHING
    """not said to anybody"""

    def state(self, job: Job) -> VerdictStatement:
        """What is signed and sent."""
        return VerdictStatement(
            submission=job.submission,
            round=job.round,
            verdict=self.verdict,
            findings=self.findings[:MAX_FINDINGS],
            tokens=self.tokens,
            groups=self.groups,
            drift=self.drift,
        )


def note_breach(check: str, where: str) -> Finding:
    """A rule that was broken, which has no measure but that."""
    return Finding(check=check, statistic="1", threshold="0", passed=False, where=clean_where(where))


def note_measure(check: str, statistic: float, threshold: float, where: str) -> Finding:
    """A number against the one allowed; larger is worse, and what is no number fails."""
    passed = statistic <= threshold
    return Finding(
        check=check,
        statistic=spell_number(statistic),
        threshold=spell_number(threshold),
        passed=passed,
        where=clean_where(where),
    )


def reject(verdict: Verdict, findings: Iterable[Finding], replayed: Replayed = NOTHING) -> Opinion:
    """A verdict that pays nothing."""
    return Opinion(verdict=verdict, findings=tuple(findings), replayed=replayed)


def spell_number(value: float) -> str:
    """A measured number as the ledger spells it, to six digits."""
    if not math.isfinite(value):
        return BEYOND
    return f"{value:.6g}".replace("e+", "e")


def clean_where(text: str) -> str:
    """A place in printable ASCII, short enough for a message."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)[:MAX_WHERE]
