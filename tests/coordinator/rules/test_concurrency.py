"""Concurrent leases: the limit rises slowly and falls fast."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.rules.leases import (
    FREE_FAILURES,
    LeaseLimit,
    charge_time,
    halve_limit,
    raise_limit,
    rest_time,
    space_trials,
)
from shoal.coordinator.rules.standing import STRIKE
from shoal.protocol.params import RunParams

PARAMS = RunParams()
WIDTHS = st.builds(LeaseLimit, st.integers(1, 100), st.integers(0, 50))


def test_five_accepted_submissions_make_one_more():
    width = LeaseLimit()
    seen = []
    for _ in range(11):
        width = raise_limit(width, 5, 16)
        seen.append(width.width)
    assert seen == [1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3]


def test_a_failure_halves():
    assert [halve_limit(LeaseLimit(width, 3)) for width in (1, 2, 5, 16)] == [
        LeaseLimit(1),
        LeaseLimit(1),
        LeaseLimit(2),
        LeaseLimit(8),
    ]


@given(WIDTHS, st.integers(1, 10), st.integers(1, 20))
def test_width_is_at_least_one_and_grows_no_further_than_the_most(width, after, most):
    higher = raise_limit(width, after, most)
    assert width.width <= higher.width <= max(width.width, most)
    assert 1 <= halve_limit(width).width <= width.width
    assert halve_limit(width).progress == 0


def test_rest_begins_after_some_failures_and_doubles_once():
    assert [rest_time(PARAMS, failures, 0) // 1000 for failures in range(9)] == [0, 0, 0, 40, 80, 80, 80, 80, 80]


def test_rest_after_rejections_doubles_up_to_an_hour_whatever_was_accepted_in_between():
    found = [rest_time(PARAMS, 0, STRIKE * rejections) // 1000 for rejections in range(12)]
    assert found == [0, 0, 0, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600]


def test_of_validators_cores_each_owner_without_accepted_work_gets_a_four_hundredth():
    assert charge_time(20, 0) == 8000 and charge_time(10**9, 0) == 3_600_000
    assert charge_time(20, 8000) == 16_000, "what is rejected together adds up"


def test_trials_become_rarer_with_each_that_fails_and_more_frequent_with_each_that_is_accepted():
    spacing_ms, seen = 0, []
    for _ in range(9):
        spacing_ms = space_trials(PARAMS, spacing_ms, 1000, failed=True)
        seen.append(spacing_ms // 1000)
    assert seen == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    for _ in range(8):
        spacing_ms = space_trials(PARAMS, spacing_ms, 1000, failed=False)
    assert spacing_ms == 0
    assert space_trials(PARAMS, 64_000, 100_000, failed=True) == 128_000, "long leases make room for themselves"


def test_without_trials_rejections_cost_no_pause_and_failures_still_do():
    params = RunParams(trial_max_s=0)
    assert space_trials(params, 0, 1000, failed=True) == 0
    assert rest_time(params, 0, 10 * STRIKE, 10**6) == 0 and rest_time(params, 3, 0) == 40_000


@given(st.integers(FREE_FAILURES, 10**6), st.integers(0, 10**6))
def test_the_pause_is_longer_than_work_is_reserved_for_a_failed_owner(failures, reserve_s):
    assert rest_time(RunParams(reserve_s=reserve_s), failures, 0) > 1000 * reserve_s
