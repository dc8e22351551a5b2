"""Figures of the sharing benchmark."""

import pytest

from sharing import Turn, format_table, list_figures

TURNS = [Turn(4.0, 1.0, 1000, 200), Turn(2.0, 1.0, 1000, 300)]


def test_figures_are_of_all_steps_together() -> None:
    assert list_figures(TURNS, 1e-5) == pytest.approx({"step_ratio": 3.0, "fed_share": 0.25, "gap_ppm": 10.0})


def test_the_table_shows_both_halves() -> None:
    lines = format_table(TURNS).splitlines()
    assert lines[2:] == [
        "| 1 to 1 | 1,000 | 200 | 4.000 | 1.000 | 4.00x |",
        "| 2 to 2 | 1,000 | 300 | 2.000 | 1.000 | 2.00x |",
    ]
