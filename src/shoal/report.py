"""What a run did, from its metrics.jsonl alone: report.md, and curve.png where matplotlib is installed."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.files import write_atomic

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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def pick_series(lines: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric."""
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def draw_curves(path: Path, runs: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> None:
    """One picture of reward and held-out pass rates over steps; several runs are drawn over each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    for position, (_, lines) in enumerate(runs):
        for (metric, label), colour in zip(_CURVES.items(), ("C0", "C1", "0.7"), strict=True):
            steps, values = pick_series(lines, metric)
            axes.plot(steps, values, color=colour, linewidth=1.5, alpha=0.85, label=None if position else label)
    axes.set(xlabel="step", ylabel="share of completions that pass", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title(runs[0][0] if len(runs) == 1 else f"{len(runs)} seeds")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _summarise_run(name: str, lines: Sequence[dict[str, Any]]) -> str:
    rows = ["| | before | after |", "|---|---|---|"]
    metrics = sorted({key for line in lines for key in line if key.startswith("eval/")})
    for metric in metrics:
        _, values = pick_series(lines, metric)
        rows.append(f"| {metric} | {values[0]:.3f} | {values[-1]:.3f} |")
    steps = max((line["step"] for line in lines), default=0)
    seconds = lines[-1]["time"] - lines[0]["time"] if lines else 0.0
    tokens = sum(pick_series(lines, "train/generated_tokens")[1])
    return f"# {name}\n\n{steps} steps, {tokens:,.0f} generated tokens, {seconds:.0f} s after warm-up.\n\n" + "\n".join(rows) + "\n"
