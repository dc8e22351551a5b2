"""Findings: when they fail, their texts, their order."""

import math

import pytest

from shoal.toploc.finding import Check, CheckResult, rank_finding


@pytest.mark.parametrize(
    ("statistic", "threshold", "failed"),
    [
        (1.0, 2.0, False),
        (2.0, 2.0, False),
        (2.1, 2.0, True),
        (0.0, 0.0, False),
        (math.nan, 2.0, True),
        (math.inf, 9, True),
    ],
)
def test_a_finding_fails_above_its_threshold(statistic: float, threshold: float, failed: bool) -> None:
    assert CheckResult(Check.SAMPLING, statistic, threshold, "token 3").failed is failed


@pytest.mark.parametrize("check", list(Check))
def test_every_check_has_a_reason(check: Check) -> None:
    assert "more than the allowed 0.25" in CheckResult(check, 0.5, 0.25, "chunk 1").reason
    assert f"{check} at chunk 1" in CheckResult(check, 0.1, 0.25, "chunk 1").reason


def test_the_text_of_a_reason() -> None:
    reason = CheckResult(Check.SAMPLING, 0.31254, 1e-5, "token 57").reason
    assert reason == (
        "sampling at token 57: probability between the seed's draw and the token 0.3125, more than the allowed 1e-05"
    )


def test_findings_are_ranked_by_how_far_they_are_beyond_their_threshold() -> None:
    rising = [
        CheckResult(Check.MEDIAN, 0.0, 0.0, ""),
        CheckResult(Check.MANTISSA, 0.1, 1.0, ""),
        CheckResult(Check.EXPONENT, 9.0, 10.0, ""),
        CheckResult(Check.SAMPLING, 0.2, 0.1, ""),
        CheckResult(Check.LOGPROB, 3.0, 0.1, ""),
        CheckResult(Check.PROOF, 1.0, 0.0, ""),
    ]
    assert sorted([*rising[3:], *rising[:3]], key=rank_finding) == rising
    assert rank_finding(CheckResult(Check.LOGPROB, math.nan, 1.0, "")) == (True, math.inf)
