"""What a check found: a number, the number allowed, and where.

- Every statistic is oriented so that larger is worse, and a finding fails when it exceeds its threshold. NaN fails:
  what cannot be compared was not shown to be honest.
- A finding is evidence for both sides. It says by how much, so a verdict can be explained to the accused.
"""

import math
from dataclasses import dataclass
from enum import StrEnum


class Check(StrEnum):
    """What was compared. Thresholds come from calibration, then from chance alone, at last from a rule."""

    EXPONENT = "toploc_exponent"
    MANTISSA = "toploc_mantissa"
    MEDIAN = "toploc_median"
    SIGN = "toploc_sign"
    SAMPLING = "sampling"
    LOGPROB = "logprob"
    SEQUENCE = "sequence"
    OUTSIDE = "toploc_outside"
    EOS = "eos_probability"
    HAZARD = "hazard"
    SHAPE = "shape"
    TAIL = "tail"
    PROOF = "toploc_fault"
    ENDING = "termination"
    FORM = "form"


_PHRASES = {
    Check.EXPONENT: "values whose exponent differs from the proof's",
    Check.MANTISSA: "mean difference of mantissas from the proof's",
    Check.MEDIAN: "median difference of mantissas from the proof's",
    Check.SIGN: "values whose sign differs from the proof's",
    Check.OUTSIDE: "other places where the proof shows a top value",
    Check.SAMPLING: "probability between the seed's draw and the token",
    Check.LOGPROB: "difference of the log-prob from the recomputed one",
    Check.SEQUENCE: "log evidence of all chunks together",
    Check.SHAPE: "log evidence that tokens were chosen in another way",
    Check.TAIL: "log evidence that tokens come from too far out",
    Check.EOS: "-log10 of the end token's probability",
    Check.HAZARD: "log evidence that the end came too early or too late",
    Check.PROOF: "proofs that are missing, surplus or malformed",
    Check.ENDING: "breaches of the stop rule",
    Check.FORM: "fields that differ from the request or are out of range",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One statistic against its threshold; `where` names the chunk, token or field."""

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
        return f"{self.check} at {self.where}: {_PHRASES[self.check]} {numbers}"


def rank_finding(finding: Finding) -> tuple[bool, float]:
    """For sorting: failed ones last, then by how many thresholds the statistic amounts to."""
    if math.isnan(finding.statistic):
        return True, math.inf
    if finding.threshold > 0:
        return finding.failed, finding.statistic / finding.threshold
    return finding.failed, math.inf if finding.failed else 0.0
