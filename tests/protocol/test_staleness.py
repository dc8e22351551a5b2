"""Steps, versions and the bound between them."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.params import is_allowed, oldest_version, open_steps

SMALL = st.integers(0, 12)


def test_the_worked_example():
    assert list(open_steps(0, 2, 10)) == [1, 2, 3]
    assert list(open_steps(9, 2, 10)) == [10]
    assert list(open_steps(10, 2, 10)) == []
    assert [oldest_version(step, 2) for step in (1, 2, 3, 4, 5)] == [0, 0, 0, 1, 2]


def test_synchronous_runs_take_the_version_before_alone():
    assert [version for version in range(9) if is_allowed(5, version, 0)] == [4]


@given(SMALL, SMALL, st.integers(1, 12))
def test_the_newest_version_may_be_used_for_every_open_step(trained, level, steps):
    assert all(is_allowed(step, trained, level) for step in open_steps(trained, level, steps))


@given(SMALL, SMALL, st.integers(1, 12))
def test_a_step_never_trains_on_what_is_older_than_the_bound_or_not_made_yet(version, level, step):
    assert is_allowed(step, version, level) == (0 <= (step - 1) - version <= level)


@given(st.integers(0, 6), st.integers(1, 12))
def test_each_step_opens_once_in_order(level, steps):
    opened = set()
    for trained in range(steps + 1):
        fresh = [step for step in open_steps(trained, level, steps) if step not in opened]
        assert fresh == sorted(fresh) and all(step > trained for step in fresh)
        opened |= set(fresh)
    assert opened == set(range(1, steps + 1))
