"""What was evaluated of a swarm's run: <run>/eval.jsonl, written by the evaluator alone, and what is still to be.

One line per version, as in metrics.jsonl: {"step": version, "time": unix seconds, name: value, ...}. It is a file of
its own because the trainer cuts its metrics back when it resumes, and an evaluation is not made twice for that.
"""

from pathlib import Path
from typing import Any

from shoal.config import RunConfig
from shoal.report import read_metrics
from shoal.trainer.versions import list_due, list_versions

NAME = "eval.jsonl"


def read_evals(run: Path) -> list[dict[str, Any]]:
    """The evaluations so far."""
    path = run / NAME
    return read_metrics(path) if path.exists() else []


def list_awaited(config: RunConfig, run: Path) -> list[int]:
    """Versions that are to be evaluated and were not, whether they are there yet or not."""
    done = {int(line["step"]) for line in read_evals(run)}
    return [version for version in list_due(config) if version not in done]


def find_next(config: RunConfig, run: Path) -> int | None:
    """The lowest version that is there and awaited."""
    there = set(list_versions(run / "versions"))
    return next((version for version in list_awaited(config, run) if version in there), None)


def read_curve(run: Path) -> list[dict[str, Any]]:
    """Metrics of training and evaluation together, by step."""
    return sorted([*read_metrics(run / "metrics.jsonl"), *read_evals(run)], key=lambda line: int(line["step"]))
