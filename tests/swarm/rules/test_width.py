"""Leases at once: up slowly, down fast."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.rules.width import Width, halve_width, raise_width

WIDTHS = st.builds(Width, st.integers(1, 100), st.integers(0, 50))


def test_five_accepted_submissions_make_one_more():
    width = Width()
    seen = []
    for _ in range(11):
        width = raise_width(width, 5, 16)
        seen.append(width.width)
    assert seen == [1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3]


def test_a_failure_halves():
    assert [halve_width(Width(width, 3)) for width in (1, 2, 5, 16)] == [Width(1), Width(1), Width(2), Width(8)]


@given(WIDTHS, st.integers(1, 10), st.integers(1, 20))
def test_width_is_at_least_one_and_grows_no_further_than_the_most(width, after, most):
    higher = raise_width(width, after, most)
    assert width.width <= higher.width <= max(width.width, most)
    assert 1 <= halve_width(width).width <= width.width
    assert halve_width(width).progress == 0
