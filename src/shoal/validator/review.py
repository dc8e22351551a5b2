"""A verdict held against what the same check finds here: each number beside the other, and whether both agree.

    equal    the same number, to the six digits that a verdict has
    close    another number on the same side of its threshold
    DIFFERS  on the other side of it, or found by one of the two alone

What is compared without weights (form, meaning) is equal on every machine. Numbers of the proof follow from sums of
floats: they are equal on machines of one kind, with the same build of torch, one number of threads and rollouts that
are replayed together; elsewhere they differ in their last digits, which is what the thresholds were calibrated for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal.swarm.messages import Finding, SubmissionState, Verdict, VerdictStatement
from shoal.swarm.rules.outcome import agrees

TROUBLES = frozenset({"weights", "file", "reader", "limit"})
"""checks by which a validator says that it could not look: they are about its machine, and about no file"""


class Match(StrEnum):
    """What two findings of one check have to do with each other."""

    EQUAL = "equal"
    CLOSE = "close"
    DIFFERS = "DIFFERS"


@dataclass(frozen=True, slots=True)
class Line:
    """One check: as the ledger has it, and as it is here; None where it was not made or not told."""

    said: Finding | None
    found: Finding | None

    @property
    def check(self) -> str:
        """Its name."""
        own = self.said or self.found
        assert own is not None, "a line is of one finding at least"
        return own.check

    @property
    def match(self) -> Match:
        if self.said is None or self.found is None or self.said.passed != self.found.passed:
            return Match.DIFFERS
        numbers = (self.said.statistic, self.said.threshold), (self.found.statistic, self.found.threshold)
        return Match.EQUAL if numbers[0] == numbers[1] else Match.CLOSE

    @property
    def gap(self) -> float:
        """How far the numbers are apart, in thresholds; 0 where that has no meaning."""
        if self.said is None or self.found is None or float(self.said.threshold) == 0.0:
            return 0.0
        if self.said.statistic == self.found.statistic:
            return 0.0
        return abs(float(self.found.statistic) - float(self.said.statistic)) / abs(float(self.said.threshold))


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """One verdict, and what was found here of the same job."""

    said: VerdictStatement
    found: VerdictStatement
    lines: tuple[Line, ...]

    @property
    def is_trouble(self) -> bool:
        """Whether the verdict says only that its validator could not look."""
        checks = {finding.check for finding in self.said.findings}
        return self.said.verdict is Verdict.INCONCLUSIVE and bool(checks) and checks <= TROUBLES

    @property
    def match(self) -> Match:
        """The worst of its lines; other verdicts, tokens or groups with a signal differ too."""
        if _describe_work(self.said) != _describe_work(self.found):
            return Match.DIFFERS
        matches = {line.match for line in self.lines}
        return next((match for match in (Match.DIFFERS, Match.CLOSE) if match in matches), Match.EQUAL)


def review_verdict(said: VerdictStatement, found: VerdictStatement) -> Review:
    """Hold a verdict of the ledger against the one that would be given here."""
    return Review(said=said, found=found, lines=tuple(_pair_findings(said.findings, found.findings)))


def find_outcome(reviews: Sequence[Review], state: SubmissionState) -> Match | None:
    """How the verdicts that made the outcome compare; None if none of them looked at the file."""
    looked = [review for review in reviews if not review.is_trouble]
    made = [review for review in looked if agrees(review.said.verdict, state)] or looked
    matches = {review.match for review in made}
    return next((match for match in (Match.DIFFERS, Match.CLOSE, Match.EQUAL) if match in matches), None)


def _describe_work(verdict: VerdictStatement) -> tuple[Verdict, int, list[bool]]:
    return verdict.verdict, verdict.tokens, [group.signal for group in verdict.groups]


def _pair_findings(said: Sequence[Finding], found: Sequence[Finding]) -> list[Line]:
    """Findings of one check at one place belong together; then those of one check, in order; then each alone."""
    rest = list(found)
    pairs: list[tuple[Finding, Finding | None]] = [(own, _take(rest, own.check, own.where)) for own in said]
    pairs = [(own, other or _take(rest, own.check, None)) for own, other in pairs]
    return [Line(own, other) for own, other in pairs] + [Line(None, other) for other in rest]


def _take(rest: list[Finding], check: str, where: str | None) -> Finding | None:
    """The first finding of a check, at a place if one is given, taken out of the rest."""
    for finding in rest:
        if finding.check == check and where in (None, finding.where):
            rest.remove(finding)
            return finding
    return None
