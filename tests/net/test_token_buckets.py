"""Token buckets: what they allow, and that their table stays small."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.net.limits import Buckets


def count_passed(buckets: Buckets, times: list[float], name: str = "a") -> int:
    passed = 0
    for now_s in times:
        if buckets.find_wait(name, now_s) == 0.0:
            buckets.take_tokens(name, now_s)
            passed += 1
    return passed


def test_a_burst_passes_and_then_the_rate() -> None:
    buckets = Buckets(rate=4.0, burst=8.0, capacity=10)
    assert count_passed(buckets, [100.0] * 20) == 8
    assert buckets.find_wait("a", 100.0) == pytest.approx(0.25)
    assert count_passed(buckets, [100.0 + i / 64 for i in range(1, 64 * 5 + 1)]) == 20


@given(st.lists(st.floats(0, 20), max_size=200))
def test_no_more_than_burst_and_rate_pass(times: list[float]) -> None:
    buckets = Buckets(rate=2.0, burst=4.0, capacity=10)
    assert count_passed(buckets, sorted(times)) <= 4 + 2 * 20


def test_asking_changes_nothing() -> None:
    buckets = Buckets(rate=1.0, burst=1.0, capacity=10)
    for name in range(1000):
        assert buckets.find_wait(str(name), 0.0) == 0.0
    assert len(buckets) == 0


def test_names_do_not_share() -> None:
    buckets = Buckets(rate=1.0, burst=1.0, capacity=10)
    buckets.take_tokens("a", 0.0)
    assert buckets.find_wait("a", 0.0) > 0.0
    assert buckets.find_wait("b", 0.0) == 0.0


def test_the_least_recently_used_name_is_evicted() -> None:
    buckets = Buckets(rate=0.01, burst=1.0, capacity=3)
    for name in "abcad":
        buckets.take_tokens(name, 0.0)
    assert len(buckets) == 3
    assert [name for name in "abcd" if buckets.find_wait(name, 0.0) > 0.0] == ["a", "c", "d"]


def test_more_can_be_taken_than_there_is_but_not_without_end() -> None:
    buckets = Buckets(rate=1.0, burst=5.0, capacity=3)
    buckets.take_tokens("a", 0.0, 7.0)
    assert buckets.find_wait("a", 0.0) == pytest.approx(3.0)
    buckets.take_tokens("a", 0.0, 1000.0)
    assert buckets.find_wait("a", 0.0) == pytest.approx(6.0)


@pytest.mark.parametrize("back_s", [1.0, 9.0, 11.0, 20.0, 1e9])
def test_a_clock_set_back_locks_nobody_out_for_long(back_s: float) -> None:
    buckets = Buckets(rate=1.0, burst=5.0, capacity=3)
    buckets.take_tokens("a", 1e9)
    times = [1e9 - back_s + later_s for later_s in range(16)]
    assert count_passed(buckets, times) >= 5


@given(now_s=st.floats(1.6e9, 2e9))
def test_a_debt_is_not_forgiven_by_rounding(now_s: float) -> None:
    buckets = Buckets(rate=1000.0, burst=1.0, capacity=3)
    for _ in range(100):
        buckets.take_tokens("a", now_s, 8.0)
    assert buckets.find_wait("a", now_s) > 0.0
