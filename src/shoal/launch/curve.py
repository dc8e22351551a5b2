"""A small chart in plain characters: how rewards and pass rates went."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.report import pick_series

MARKS = {"reward/mean": ("reward of what was trained", "."), "eval/greedy": ("held-out, greedy", "+")} | {
    "eval/pass_at_1": ("held-out, sampled", "o")
}
"""metrics that are drawn, each with its name and its mark; later ones over earlier ones"""
_AXIS = 5
"""columns left of the chart"""


class Series(NamedTuple):
    """Points of one mark."""

    mark: str
    steps: Sequence[int]
    values: Sequence[float]


def draw_chart(lines: Sequence[Mapping[str, object]], *, last_step: int, width: int, height: int) -> list[str]:
    """Lines of text, `width` columns wide; values from 0 to 1 over steps from 0 to `last_step`."""
    columns, rows = max(8, width - _AXIS), max(3, height - 2)
    grid = [[" "] * columns for _ in range(rows)]
    for series in _list_series(lines):
        for step, value in zip(series.steps, series.values, strict=True):
            column = round(min(max(step / max(1, last_step), 0.0), 1.0) * (columns - 1))
            row = round(min(max(value, 0.0), 1.0) * (rows - 1))
            grid[rows - 1 - row][column] = series.mark
    labels = {0: " 1.0", rows - 1: " 0.0", (rows - 1) // 2: " 0.5"} if rows % 2 else {0: " 1.0", rows - 1: " 0.0"}
    drawn = [f"{labels.get(number, ''):<{_AXIS - 1}}|{''.join(row)}" for number, row in enumerate(grid)]
    steps = f"step 0{f'step {last_step}':>{columns - 6}}"
    return [*(line.rstrip() for line in drawn), f"{' ' * (_AXIS - 1)}+{'-' * columns}", f"{' ' * _AXIS}{steps}"]


def describe_marks() -> str:
    """What the marks mean."""
    return "   ".join(f"{mark} {name}" for name, mark in MARKS.values())


def _list_series(lines: Sequence[Mapping[str, object]]) -> list[Series]:
    found = {metric: pick_series([dict(line) for line in lines], metric) for metric in MARKS}
    return [Series(MARKS[metric][1], steps, values) for metric, (steps, values) in found.items()]
