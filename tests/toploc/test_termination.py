"""Where rollouts may end, and what an end is evidence of."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.calibrate.calibrate import RATE
from shoal.rollout import Finish, Rollout, VersionRange
from shoal.toploc.calibration import SHARES
from shoal.toploc.finding import Check
from shoal.toploc.shape_test import check_odds
from shoal.toploc.token_checks import RHOS, check_ending, check_probability, trace_hazard

EOS = 1


def make_rollout(tokens: list[int], finish: Finish) -> Rollout:
    return Rollout(
        id="r",
        prompt_ids=np.array([5], dtype=np.int32),
        token_ids=np.array(tokens, dtype=np.int32),
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        finish=finish,
        versions=(VersionRange(0, 0, len(tokens)),),
        temperature=1.0,
        seed=0,
    )


@pytest.mark.parametrize(
    ("tokens", "finish"),
    [([7, 7, EOS], Finish.STOP), ([EOS], Finish.STOP), ([7, 7, 7, 7], Finish.LENGTH), ([7, 7, 7, EOS], Finish.STOP)],
)
def test_the_end_token_or_the_limit_ends_a_rollout(tokens: list[int], finish: Finish) -> None:
    assert not check_ending(make_rollout(tokens, finish), eos_id=EOS, max_tokens=4).failed


@pytest.mark.parametrize(
    ("tokens", "finish", "where"),
    [
        ([7, 7, 7], Finish.LENGTH, "token 2, neither"),
        ([7, EOS, 7, 7], Finish.LENGTH, "token 1, an end token before"),
        ([EOS, 7, EOS], Finish.STOP, "token 0, an end token before"),
        ([7, EOS, EOS], Finish.STOP, "token 1, an end token before"),
        ([7, 7, EOS], Finish.LENGTH, "finish"),
        ([7, 7, 7, 7], Finish.STOP, "finish"),
    ],
)
def test_every_other_end_is_a_breach(tokens: list[int], finish: Finish, where: str) -> None:
    finding = check_ending(make_rollout(tokens, finish), eos_id=EOS, max_tokens=4)
    assert finding.failed and finding.check is Check.ENDING and finding.where.startswith(where)


@pytest.mark.parametrize(("probability", "failed"), [(2e-7, False), (0.5, False), (0.9e-7, True), (0.0, True)])
def test_an_end_must_have_been_possible(probability: float, failed: bool) -> None:
    probs = np.array([0.3, probability])
    assert check_probability(probs, stopped=True, rate=1e-5, max_tokens=100).failed is failed
    assert not check_probability(probs, stopped=False, rate=1e-5, max_tokens=100).failed


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_the_hazard_is_a_fair_bet_for_every_rho(hazards: list[float]) -> None:
    """The expectation over all ways to end, within as many tokens as there are hazards, is 1."""
    probs = np.array(hazards)
    expected = np.zeros(len(RHOS))
    alive = 1.0
    for t, hazard in enumerate(hazards):
        ended = trace_hazard(probs[: t + 1], stopped=True)[-1]
        expected += alive * hazard * np.exp(ended)
        alive *= 1 - hazard
    if alive > 0:
        expected += alive * np.exp(trace_hazard(probs, stopped=False)[-1])
    np.testing.assert_allclose(expected, 1.0, rtol=1e-9)


def test_an_end_where_none_was_likely_is_evidence() -> None:
    rare = np.full(50, 1e-9)
    assert check_odds(Check.HAZARD, trace_hazard(rare, stopped=True), 1e-5).failed
    assert not check_odds(Check.HAZARD, trace_hazard(rare, stopped=False), 1e-5).failed


def test_at_the_rate_of_a_run_a_rare_end_is_chance_and_an_impossible_one_is_not() -> None:
    share = RATE / SHARES
    for probability, failed in ((1e-4, False), (1e-7, False), (1e-14, True)):
        odds = check_odds(Check.HAZARD, trace_hazard(np.full(20, probability), stopped=True), share)
        assert odds.failed is failed


def test_going_on_where_an_end_was_due_is_evidence() -> None:
    due = np.full(50, 0.5)
    assert check_odds(Check.HAZARD, trace_hazard(due, stopped=False), 1e-5).failed
    assert not check_odds(Check.HAZARD, trace_hazard(due[:2], stopped=True), 1e-5).failed


def test_honest_ends_rarely_look_forced() -> None:
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(4000):
        probs = 10.0 ** rng.uniform(-6, -0.5, 60)
        ends = np.flatnonzero(rng.random(60) < probs)
        length = int(ends[0]) + 1 if len(ends) else 60
        alarms += check_odds(Check.HAZARD, trace_hazard(probs[:length], stopped=len(ends) > 0), 0.01).failed
    assert alarms <= 4000 * 0.01


def test_evidence_of_many_mild_truncations_adds_up() -> None:
    path = trace_hazard(np.full(30, 1e-5), stopped=True)
    assert not check_odds(Check.HAZARD, path, 1e-6).failed
    assert max(16 * path[-1]) > math.log(1e6)
