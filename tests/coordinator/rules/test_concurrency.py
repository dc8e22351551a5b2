"""Concurrent leases: the limit rises slowly and falls fast."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.rules.leases import FREE_FAILURES, LeaseLimit, halve_limit, raise_limit, rest_time

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
    assert [rest_time(failures, 30) // 1000 for failures in range(9)] == [0, 0, 0, 40, 80, 80, 80, 80, 80]


@given(st.integers(FREE_FAILURES, 10**6), st.integers(0, 10**6))
def test_the_pause_is_longer_than_work_is_reserved_for_a_failed_owner(failures, reserve_s):
    assert rest_time(failures, reserve_s) > 1000 * reserve_s
