"""A verdict of the ledger, compared with the result for the same job here."""

import pytest

from shoal.protocol.messages import Finding, SubmissionState, Verdict, VerdictStatement
from shoal.validator.finding import measurement, rejected, violation
from shoal.validator.review import Match, find_outcome, review_verdict


def state(verdict: Verdict, *findings: Finding, tokens: int = 0) -> VerdictStatement:
    return VerdictStatement(submission="s1", round=1, verdict=verdict, findings=findings, tokens=tokens)


def measure(statistic: float, check: str = "sampling", where: str = "g0.1, token 3") -> Finding:
    return measurement(check, statistic, 0.5, where)


def test_the_accused_finds_the_numbers_of_its_verdict(hand_in) -> None:
    case = hand_in()
    said = case.opinion().state(case.job)
    review = review_verdict(said, case.opinion().state(case.job))
    assert review.match is Match.EQUAL and len(review.lines) == len(said.findings) > 5
    assert find_outcome([review], SubmissionState.ACCEPTED) is Match.EQUAL


def test_a_verdict_that_was_made_up_differs(hand_in) -> None:
    case = hand_in()
    lie = rejected(Verdict.HARD, [measurement("sampling", 0.9, 1e-5, "g0.1, token 3")]).state(case.job)
    review = review_verdict(lie, case.opinion().state(case.job))
    assert review.match is Match.DIFFERS
    assert find_outcome([review], SubmissionState.HARD) is Match.DIFFERS
    line = next(line for line in review.lines if line.check == "sampling")
    assert line.match is Match.DIFFERS and line.gap > 1000


@pytest.mark.parametrize(
    ("there", "here", "match", "gap"),
    [
        (0.1, 0.1, Match.EQUAL, 0.0),
        (0.1, 0.2, Match.CLOSE, 0.2),
        (0.4, 0.6, Match.DIFFERS, 0.4),
        (0.9, 0.8, Match.CLOSE, 0.2),
    ],
)
def test_numbers_on_one_side_of_a_threshold_are_close(there: float, here: float, match: Match, gap: float) -> None:
    (line,) = review_verdict(state(Verdict.SOFT, measure(there)), state(Verdict.SOFT, measure(here))).lines
    assert line.match is match and line.gap == pytest.approx(gap)


def test_findings_of_one_place_belong_together_and_what_one_alone_found_differs() -> None:
    said = state(Verdict.HARD, measure(0.9, where="a"), measure(0.8, where="b"), measure(0.7, "logprob"))
    found = state(Verdict.HARD, measure(0.8, where="b"), measure(0.9, where="a"))
    review = review_verdict(said, found)
    assert [line.match for line in review.lines] == [Match.EQUAL, Match.EQUAL, Match.DIFFERS]
    assert review.lines[2].found is None and review.match is Match.DIFFERS


def test_other_tokens_differ_whatever_the_findings_say() -> None:
    said, found = (state(Verdict.ACCEPTED, measure(0.1), tokens=tokens) for tokens in (9, 8))
    assert review_verdict(said, found).match is Match.DIFFERS


def test_a_validator_that_could_not_look_says_nothing_to_compare() -> None:
    trouble = state(Verdict.INCONCLUSIVE, violation("weights", "v0 is gone"))
    found = state(Verdict.SOFT, violation("reward", "g0.1: 1.0 claimed, 0.0 found"))
    blind, sees = review_verdict(trouble, found), review_verdict(found, found)
    assert blind.is_trouble and not sees.is_trouble
    assert find_outcome([blind], SubmissionState.INCONCLUSIVE) is None
    assert find_outcome([blind, sees], SubmissionState.SOFT) is Match.EQUAL
