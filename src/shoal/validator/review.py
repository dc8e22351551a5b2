"""Compare a recorded verdict with the findings of the same check on this machine, number by number.

    equal    the same number, to the six digits that a verdict has
    close    a different number on the same side of its threshold
    DIFFERS  on the other side of the threshold, or found by only one of the two

Checks without weights (form, consistency) give equal results on every machine. The numbers of the proof are sums of
floats: they are equal on machines of one kind with the same build of torch, the same number of threads and the same
rollouts replayed together. Elsewhere they differ in the last digits, which the thresholds are calibrated for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal.protocol.messages import Finding, SubmissionState, Verdict, VerdictStatement
from shoal.protocol.outcome import agrees

TROUBLES = frozenset({"weights", "file", "reader", "limit"})
"""checks that state that the validator could not judge: they concern its machine, not the file"""


class Match(StrEnum):
    """How two findings of one check compare."""

    EQUAL = "equal"
    CLOSE = "close"
    DIFFERS = "DIFFERS"


@dataclass(frozen=True, slots=True)
class CheckComparison:
    """One check as recorded in the ledger and as found here; None if it was not made or not recorded."""

    said: Finding | None
    found: Finding | None

    @property
    def check(self) -> str:
        """Its name."""
        own = self.said or self.found
        assert own is not None, "a comparison has at least one finding"
        return own.check

    @property
    def match(self) -> Match:
        if self.said is None or self.found is None or self.said.passed != self.found.passed:
            return Match.DIFFERS
        numbers = (self.said.statistic, self.said.threshold), (self.found.statistic, self.found.threshold)
        return Match.EQUAL if numbers[0] == numbers[1] else Match.CLOSE

    @property
    def gap(self) -> float:
        """Distance between the numbers, in thresholds; 0 if it is not defined."""
        if self.said is None or self.found is None or float(self.said.threshold) == 0.0:
            return 0.0
        if self.said.statistic == self.found.statistic:
            return 0.0
        return abs(float(self.found.statistic) - float(self.said.statistic)) / abs(float(self.said.threshold))


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """One recorded verdict, and what was found here for the same job."""

    said: VerdictStatement
    found: VerdictStatement
    lines: tuple[CheckComparison, ...]

    @property
    def is_trouble(self) -> bool:
        """Whether the verdict only states that its validator could not judge."""
        checks = {finding.check for finding in self.said.findings}
        return self.said.verdict is Verdict.INCONCLUSIVE and bool(checks) and checks <= TROUBLES

    @property
    def match(self) -> Match:
        """The worst of its comparisons; different verdicts, tokens or groups with a signal count as DIFFERS."""
        if _describe_work(self.said) != _describe_work(self.found):
            return Match.DIFFERS
        matches = {line.match for line in self.lines}
        return next((match for match in (Match.DIFFERS, Match.CLOSE) if match in matches), Match.EQUAL)


def review_verdict(said: VerdictStatement, found: VerdictStatement) -> Review:
    """Compare a verdict of the ledger with the verdict found here."""
    return Review(said=said, found=found, lines=tuple(_pair_findings(said.findings, found.findings)))


def find_outcome(reviews: Sequence[Review], state: SubmissionState) -> Match | None:
    """How the verdicts that decided the outcome compare; None if none of them judged the file."""
    looked = [review for review in reviews if not review.is_trouble]
    made = [review for review in looked if agrees(review.said.verdict, state)] or looked
    matches = {review.match for review in made}
    return next((match for match in (Match.DIFFERS, Match.CLOSE, Match.EQUAL) if match in matches), None)


def _describe_work(verdict: VerdictStatement) -> tuple[Verdict, int, list[bool]]:
    return verdict.verdict, verdict.tokens, [group.signal for group in verdict.groups]


def _pair_findings(said: Sequence[Finding], found: Sequence[Finding]) -> list[CheckComparison]:
    """Pair findings of one check at one place; then those of one check, in order; the rest stay unpaired."""
    rest = list(found)
    pairs: list[tuple[Finding, Finding | None]] = [(own, _take(rest, own.check, own.where)) for own in said]
    pairs = [(own, other or _take(rest, own.check, None)) for own, other in pairs]
    return [CheckComparison(own, other) for own, other in pairs] + [CheckComparison(None, other) for other in rest]


def _take(rest: list[Finding], check: str, where: str | None) -> Finding | None:
    """Remove and return the first finding of a check, at a place if one is given."""
    for finding in rest:
        if finding.check == check and where in (None, finding.where):
            rest.remove(finding)
            return finding
    return None
