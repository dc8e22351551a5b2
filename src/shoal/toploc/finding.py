"""What a check found: a number, the number allowed, and where.

- Every statistic is oriented so that larger is worse, and a finding fails when it exceeds its threshold. NaN fails: what
  cannot be compared was not shown to be honest.
- A finding is evidence for both sides. It says by how much, so a verdict can be explained to the accused.
"""

import math
from dataclasses import dataclass
from enum import StrEnum


class Check(StrEnum):
    """What was compared. The first eight have a threshold from calibration or chance, the rest from a rule."""

    EXPONENT = "toploc_exponent"
    MANTISSA = "toploc_mantissa"
    MEDIAN = "toploc_median"
    SIGN = "toploc_sign"
    OUTSIDE = "toploc_outside"
    SAMPLING = "sampling"
    LOGPROB = "logprob"
    SEQUENCE = "sequence"
    SHAPE = "shape"
    EOS = "eos_probability"
    HAZARD = "hazard"
    DEGREE = "toploc_degree"
    PROOF = "toploc_fault"
    ENDING = "termination"
    FORM = "form"


_PHRASES = {
    Check.EXPONENT: "values whose exponent differs from the proof's",
    Check.MANTISSA: "mean difference of mantissas from the proof's",
    Check.MEDIAN: "median difference of mantissas from the proof's",
    Check.SIGN: "values whose sign differs from the proof's",
    Check.OUTSIDE: "share of other places where the proof looks like a top value",
    Check.SAMPLING: "probability between the seed's draw and the token",
    Check.LOGPROB: "difference of the log-prob from the recomputed one",
    Check.SEQUENCE: "log evidence of all chunks together",
    Check.SHAPE: "log evidence that tokens were chosen in another way",
    Check.EOS: "-log10 of the end token's probability",
    Check.HAZARD: "log evidence that the end came too early or too late",
    Check.DEGREE: "degrees that the proof's polynomial lacks",
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
    def excess(self) -> float:
        """How many thresholds the statistic amounts to; where none is allowed any is infinitely many."""
        if not self.failed:
            return self.statistic / self.threshold if self.threshold > 0 else 0.0
        return self.statistic / self.threshold if self.threshold > 0 and not math.isnan(self.statistic) else math.inf

    @property
    def reason(self) -> str:
        verdict = "more than the allowed" if self.failed else "within the allowed"
        return f"{self.check} at {self.where}: {_PHRASES[self.check]} {_show(self.statistic)}, {verdict} {_show(self.threshold)}"


def _show(value: float) -> str:
    return f"{value:.4g}"
