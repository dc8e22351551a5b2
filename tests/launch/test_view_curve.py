"""The chart in plain characters."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.view import describe_marks, draw_chart


def test_the_first_and_the_last_point_are_in_the_corners() -> None:
    lines = [{"step": 0, "eval/pass_at_1": 0.0}, {"step": 10, "eval/pass_at_1": 1.0}]
    chart = draw_chart(lines, last_step=10, width=25, height=7)
    assert chart == [
        " 1.0|                   o",
        "    |",
        " 0.5|",
        "    |",
        " 0.0|o",
        "    +--------------------",
        "     step 0       step 10",
    ]


def test_held_out_tasks_are_drawn_over_rewards() -> None:
    lines = [{"step": 1, "reward/mean": 0.5}, {"step": 1, "eval/pass_at_1": 0.5}]
    chart = "\n".join(draw_chart(lines, last_step=2, width=30, height=9)[:-2])
    assert "o" in chart and " . " not in chart
    assert all(mark in describe_marks() for mark in ("o", "+", "."))


@given(
    st.lists(st.tuples(st.integers(0, 2000), st.floats(-5, 5)), max_size=30),
    st.integers(0, 2000),
    st.integers(1, 120),
    st.integers(1, 40),
)
def test_whatever_the_values_it_keeps_its_size(
    points: list[tuple[int, float]], last_step: int, width: int, height: int
) -> None:
    lines = [{"step": step, "reward/mean": value} for step, value in points]
    chart = draw_chart(lines, last_step=last_step, width=width, height=height)
    assert len(chart) == max(3, height - 2) + 2
    assert all(len(line) <= max(width, 24) for line in chart)
