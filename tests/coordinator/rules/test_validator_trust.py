"""The bet against a validator's honesty: what it costs an honest one, and how soon it finds a liar."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.rules.validator_trust import (
    BANNED_AT,
    LIMITED_AT,
    RIGHT,
    WRONG,
    is_plain,
    next_score,
    undo_score,
)

ODDS = 4 / 3
"""x of the module's proof"""
HONEST = 1 / 250


def reach_ban(chance, graded):
    """The exact probability that a validator with this error rate is banned within so many graded verdicts."""
    states = {0: 1.0}
    for _ in range(graded):
        after = dict.fromkeys(range(BANNED_AT + 1), 0.0)
        for score, weight in states.items():
            if score == BANNED_AT:
                after[score] += weight
                continue
            for right, part in ((True, 1 - chance), (False, chance)):
                after[min(BANNED_AT, next_score(score, right=right))] += weight * part
        states = {score: weight for score, weight in after.items() if weight}
    return states.get(BANNED_AT, 0.0)


def test_the_bet_against_an_honest_validator_is_not_favourable():
    assert HONEST * ODDS**WRONG + (1 - HONEST) * ODDS**RIGHT <= 1


@pytest.mark.parametrize("graded", [100, 1000, 4000])
def test_an_honest_validator_is_banned_less_often_than_is_proven(graded):
    assert 0 < reach_ban(HONEST, graded) <= graded / ODDS**BANNED_AT


@pytest.mark.parametrize(("chance", "most"), [(1e-3, 7e-6), (1e-4, 7e-9)])
def test_at_the_calibrated_rate_hardly_any_honest_validator_is_ever_banned(chance, most):
    """For a thousand graded verdicts; the docs quote these."""
    assert reach_ban(chance, 1000) <= most


def test_a_validator_that_is_always_wrong_is_limited_by_the_second_verdict_and_banned_by_the_third():
    scores = list(itertools.accumulate([False] * 3, lambda score, right: next_score(score, right=right), initial=0))
    assert scores[1] < LIMITED_AT <= scores[2] < BANNED_AT <= scores[3]


@given(st.lists(st.booleans(), max_size=60))
def test_a_score_is_never_negative_and_one_mistake_never_limits(history):
    score = 0
    for right in history:
        score = next_score(score, right=right)
        assert score >= 0
    assert history.count(False) > 1 or score < LIMITED_AT


@given(st.integers(0, 100), st.booleans())
def test_a_grade_that_was_mistaken_can_be_taken_back(score, right):
    assert undo_score(next_score(score, right=right), right=right) >= score


@pytest.mark.parametrize(
    ("statistic", "threshold", "passed", "plain"),
    [
        (0.0, 0.25, True, True),
        (0.125, 0.25, True, True),
        (0.126, 0.25, True, False),
        (0.25, 0.25, True, False),
        (0.3, 0.25, False, False),
        (0.5, 0.25, False, True),
        (float("inf"), 0.25, False, True),
        (1.0, 0.0, False, True),
        (0.0, 0.0, True, True),
        (-3.0, 11.0, True, True),
    ],
)
def test_only_numbers_far_from_their_threshold_are_plain(statistic, threshold, passed, plain):
    assert is_plain(statistic, threshold, passed=passed) is plain
