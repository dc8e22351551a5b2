"""The picture of a field: which check found which attack, and how many submissions it took."""

import io
from typing import Any

from shoal.redteam.matrix import MOST_PIECES, Matrix, Row
from shoal.redteam.registry import Fate

_CAUGHT = (Fate.HARD, Fate.SOFT, Fate.FORM)
_MET, _MISSED = "C0", "C3"


def draw_matrix(matrix: Matrix) -> bytes:
    """A PNG file; matplotlib is needed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    height = 1.6 + 0.2 * len(matrix.rows)
    widths = (max(3, len(matrix.columns)), 4)
    figure, axes = plt.subplots(1, 2, figsize=(10, height), dpi=110, width_ratios=widths, sharey=True)
    _draw_heat(figure, axes[0], matrix)
    _draw_bars(axes[1], matrix)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    return buffer.getvalue()


def _draw_heat(figure: Any, axes: Any, matrix: Matrix) -> None:
    """Attacks by checks: the share of judged submissions in which the check failed."""
    columns = matrix.columns or ["none"]
    shares = [[row.columns[name] / max(1, row.sum("judged")) for name in columns] for row in matrix.rows]
    axes.imshow(shares, aspect="auto", cmap="Blues", vmin=0.0, vmax=1.0)
    for line, row in enumerate(shares):
        for column, share in enumerate(row):
            if share:
                colour = "white" if share > 0.6 else "black"
                axes.text(column, line, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right", fontsize=8)
    names = [f"{row.name} ({row.fate.value if row.fate else 'sleeper'})" for row in matrix.rows]
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_title("judged submissions in which a check failed, %", fontsize=9)


def _draw_bars(axes: Any, matrix: Matrix) -> None:
    """The most submissions that it took; in words where that is not what must become of it."""
    counts = [row.until or 0 if row.fate in _CAUGHT else 0 for row in matrix.rows]
    axes.barh(range(len(counts)), counts, color=[_MET if row.met else _MISSED for row in matrix.rows], height=0.7)
    for line, row in enumerate(matrix.rows):
        if not counts[line]:
            axes.text(0.08, line, _describe_row(row), va="center", fontsize=7, color="black" if row.met else _MISSED)
    axes.axvline(MOST_PIECES + 0.5, color="0.6", linewidth=0.8, linestyle=":")
    axes.set_title("bad submissions until caught", fontsize=9)
    axes.set_xlabel("dotted: the most there may be; red: not as it must be", fontsize=7)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(0, max(MOST_PIECES + 1, *counts))
    axes.grid(axis="x", alpha=0.3)


def _describe_row(row: Row) -> str:
    if row.fate is None:
        return f"banned at submission {row.until}" if row.until else "not caught"
    if row.fate is Fate.REFUSED:
        return "refused" if row.met else "not refused"
    if row.fate in _CAUGHT:
        return "not caught"
    earned, deserved = row.sum("left"), row.sum("deserved")
    return f"earned {earned / deserved:.0%} of honest pay" if deserved else "earned nothing"
