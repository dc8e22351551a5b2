"""The report of a run, from its metrics.jsonl alone: report.md, and curve.png if matplotlib is installed."""

import importlib.util
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.util.files import write_atomic

_CURVES = {"eval/pass_at_1": "held-out, sampled", "eval/greedy": "held-out, greedy", "reward/mean": "training reward"}


def write_report(run_dir: Path) -> Path:
    """Write the report of a run directory, and return its path."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    text = _summarise_run(run_dir.name, lines)
    if importlib.util.find_spec("matplotlib") is not None:
        draw_curves(run_dir / "curve.png", [(run_dir.name, lines)])
        text += "\n![curve](curve.png)\n"
    path = run_dir / "report.md"
    write_atomic(path, text.encode())
    return path


def describe_gain(run_dir: Path) -> str:
    """The change in held-out results over a run, in one line."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    parts = []
    for label, metric in (("sampled", "eval/pass_at_1"), ("greedy", "eval/greedy")):
        if values := pick_series(lines, metric)[1]:
            parts.append(f"{label} {values[0]:.3f} -> {values[-1]:.3f}")
    return f"held-out tasks that pass: {', '.join(parts)}"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; an incomplete last line is ignored."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def pick_series(lines: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, without the steps at which it is missing."""
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def draw_curves(path: Path, runs: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> None:
    """A plot of reward and held-out pass rates over steps; several runs are drawn on the same axes."""
    with draw_png(figsize=(7, 4), dpi=120) as (axes, picture):
        for position, (_, lines) in enumerate(runs):
            for (metric, label), colour in zip(_CURVES.items(), ("C0", "C1", "0.7"), strict=True):
                steps, values = pick_series(lines, metric)
                marker = "." if len(steps) == 1 else None  # a line through one point is invisible
                name = None if position else label
                axes.plot(steps, values, color=colour, marker=marker, linewidth=1.5, alpha=0.85, label=name)
        axes.set(xlabel="step", ylabel="share of completions that pass", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.set_title(runs[0][0] if len(runs) == 1 else f"{len(runs)} seeds")
    write_atomic(path, picture.getvalue())


@contextmanager
def draw_png(*shape: int, **options: Any) -> Iterator[tuple[Any, io.BytesIO]]:
    """Axes as made by `subplots`, and the PNG file that holds them afterwards; requires matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(*shape, **options)
    picture = io.BytesIO()
    yield axes, picture
    figure.tight_layout()
    figure.savefig(picture, format="png")
    plt.close(figure)


def _summarise_run(name: str, lines: Sequence[dict[str, Any]]) -> str:
    steps = max((line["step"] for line in lines), default=0)
    tokens, sample_s, train_s = (
        sum(pick_series(lines, metric)[1]) for metric in ("train/generated_tokens", "perf/sample_s", "perf/train_s")
    )
    times = f"{sample_s:.0f} s of sampling and {train_s:.0f} s of training"
    head = f"{steps} steps, {tokens:,.0f} generated tokens; {times}, without SFT and evaluation."
    return "\n".join([f"# {name}", "", head, "", *_list_rows(lines)]) + "\n"


def _list_rows(lines: Sequence[dict[str, Any]]) -> list[str]:
    """First and last value of every evaluation metric."""
    rows = ["| | before | after |", "|---|---|---|"]
    for metric in sorted({key for line in lines for key in line if key.startswith("eval/")}):
        _, values = pick_series(lines, metric)
        if values:
            rows.append(f"| {metric} | {values[0]:.3f} | {values[-1]:.3f} |")
    return rows
