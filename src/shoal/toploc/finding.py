"""The result of a check: a number, its threshold, and where.

- Every statistic is oriented so that larger is worse, and a finding fails when it exceeds its threshold. NaN fails: a
  value that cannot be compared was not shown to be honest.
- A finding is evidence for both sides. It states by how much, so a verdict can be explained to the accused.

Also the odds of several rollouts against a rival (toploc/rivals.py), for assumed shares of cheated ones. Without torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Check(StrEnum):
    """What was compared. First checks with a calibrated threshold, then with one from probability, then rules."""

    phrase: str
    """description of the statistic"""

    def __new__(cls, value: str, phrase: str) -> "Check":
        member = str.__new__(cls, value)
        member._value_, member.phrase = value, phrase
        return member

    EXPONENT = "toploc_exponent", "values whose exponent differs from the proof's"
    MANTISSA = "toploc_mantissa", "mean difference of mantissas from the proof's"
    MEDIAN = "toploc_median", "median difference of mantissas from the proof's"
    SIGN = "toploc_sign", "values whose sign differs from the proof's"
    SAMPLING = "sampling", "probability between the seed's draw and the token"
    LOGPROB = "logprob", "difference of the log-prob from the recomputed one"
    SEQUENCE = "sequence", "log evidence of all chunks together"
    RIVAL = "rival", "log odds that it was made with other weights"
    OUTSIDE = "toploc_outside", "other places where the proof shows a top value"
    EOS = "eos_probability", "-log10 of the end token's probability"
    HAZARD = "hazard", "log evidence that the end came too early or too late"
    SHAPE = "shape", "log evidence that tokens were chosen in another way"
    TAIL = "tail", "log evidence that tokens come from too far out"
    PROOF = "toploc_fault", "proofs that are missing, surplus or malformed"
    ENDING = "termination", "breaches of the stop rule"
    FORM = "form", "fields that differ from the request or are out of range"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One statistic and its threshold; `where` names the chunk, token or field."""

    check: Check
    statistic: float
    threshold: float
    where: str

    @property
    def failed(self) -> bool:
        return not self.statistic <= self.threshold

    @property
    def reason(self) -> str:
        verdict = "more than the allowed" if self.failed else "within the allowed"
        numbers = f"{self.statistic:.4g}, {verdict} {self.threshold:.4g}"
        return f"{self.check} at {self.where}: {self.check.phrase} {numbers}"


def rank_finding(finding: CheckResult) -> tuple[bool, float]:
    """Sort key: failed findings last, then by statistic / threshold."""
    if math.isnan(finding.statistic):
        return True, math.inf
    if finding.threshold > 0:
        return finding.failed, finding.statistic / finding.threshold
    return finding.failed, math.inf if finding.failed else 0.0


SHARES = (0.1, 0.3, 1.0)
"""Shares of cheated rollouts for which odds are stated. Changing breaks: the odds of every verdict."""
MAX_ODDS = 10**15
"""largest odds that are stated, in millionths; a conviction needs fewer"""
_MILLION = 1_000_000
_MOST_NATS = 50.0


def mix_odds(log_odds: float, share: float) -> float:
    """The logarithm of 1 - x + x E: the odds of a rollout of an owner that cheats in a share x of them."""
    if share >= 1.0:
        return log_odds
    high = max(0.0, log_odds)
    return high + math.log((1.0 - share) * math.exp(-high) + share * math.exp(log_odds - high))


def sum_odds(rollouts: Sequence[float], share: float) -> float:
    """The logarithm of the odds of several rollouts, of which a share is cheated, from theirs."""
    return math.fsum(mix_odds(log_odds, share) for log_odds in rollouts)


def spell_odds(log_odds: float) -> int:
    """Odds in millionths, rounded down."""
    return min(MAX_ODDS, math.floor(_MILLION * math.exp(min(log_odds, _MOST_NATS))))
