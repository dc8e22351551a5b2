"""Shared by the benchmarks: flags, results, and sets of training runs.

Every benchmark takes `--quick` (a smaller size that still shows the effect) and `--json` (print only one line, a JSON
object of named figures). Pictures go to docs/img unless `--quick`.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shoal.cli import SPIN_COUNT
from shoal.train.report import pick_series, read_metrics

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "bench" / "out"
PICTURES = ROOT / "docs" / "img"
SEEDS = (0, 1, 2)
_DONE = "bench.done"
NO_PEER = 77
"""exit code of a benchmark whose peer is not installed"""
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

Lines = list[dict[str, Any]]


def build_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark, for benchmarks with additional ones."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a smaller size that still shows the effect")
    parser.add_argument("--json", action="store_true", help="print only one line: a JSON object of named figures")
    return parser


def parse_flags(description: str) -> argparse.Namespace:
    """The flags of every benchmark."""
    return build_parser(description).parse_args()


def finish(flags: argparse.Namespace, table: str, figures: Mapping[str, float]) -> None:
    """Print the result: the table unless `--json`, then the figures as the last line."""
    if not flags.json:
        print(table)
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


def run_arms(
    arms: Mapping[str, Sequence[str]], *, config: str, seeds: Sequence[int], tag: str
) -> dict[str, list[Lines]]:
    """Train every arm (a name and its overrides) with every seed, two single-threaded processes at a time."""
    jobs = [(arm, seed) for seed in seeds for arm in arms]
    with ThreadPoolExecutor(max_workers=max(1, min(2, os.cpu_count() or 1))) as pool:
        done = list(pool.map(lambda job: train_arm(config, tag, job[0], arms[job[0]], job[1]), jobs))
    found: dict[str, list[Lines]] = {arm: [] for arm in arms}
    for (arm, _), lines in zip(jobs, done, strict=True):
        found[arm].append(lines)
    return found


def open_plots() -> Any:
    """matplotlib's pyplot, drawing to files only."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_picture(figure: Any, name: str, top: float = 1.0) -> None:
    """Write a finished figure to the docs; its panels reach up to `top`, above which there is a legend."""
    figure.tight_layout(rect=(0.0, 0.0, 1.0, top))
    figure.savefig(picture_path(name))


def picture_path(name: str) -> Path:
    PICTURES.mkdir(parents=True, exist_ok=True)
    return PICTURES / name


def last_value(lines: Lines, name: str) -> float:
    """The last value of a metric."""
    return pick_series(lines, name)[1][-1]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def train_arm(config: str, tag: str, arm: str, overrides: Sequence[str], seed: int) -> Lines:
    """Metrics of one run; a complete run with these settings and this code is not repeated."""
    folder = find_run(config, tag, arm, overrides, seed)
    done = folder / _DONE
    if not done.exists():
        place = [f"name={folder.name.removesuffix(f'-seed{seed}')}", f"seed={seed}", f"out={OUT}"]
        call_shoal(["train", str(ROOT / config), *place, "threads=1", "rollouts=false", *overrides])
        done.touch()
    return read_metrics(folder / "metrics.jsonl")


def find_policy(config: str, tag: str, overrides: Sequence[str], seed: int) -> Path:
    """The model that the settings start from, fine-tuned if they say so, for arms that share it."""
    train_arm(config, tag, "start", overrides, seed)
    return find_run(config, tag, "start", overrides, seed) / "checkpoints" / "step-000000" / "policy"


def find_run(config: str, tag: str, arm: str, overrides: Sequence[str], seed: int) -> Path:
    """The folder of a run."""
    return OUT / f"{tag}-{arm}-{_hash_inputs(config, overrides)}-seed{seed}"


def call_shoal(arguments: Sequence[str]) -> None:
    """Run a shoal command in one thread; if it fails, end the benchmark with its output."""
    command = [sys.executable, "-m", "shoal", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _hash_inputs(config: str, overrides: Sequence[str]) -> str:
    """Hash of everything that determines a run: its settings and the training code."""
    source = ROOT / "src" / "shoal"
    files = [path for part in (".", "policy", "engine", "learner", "tasks") for path in (source / part).glob("*.py")]
    digest = hashlib.sha256(json.dumps([config, *overrides]).encode())
    for path in (ROOT / config, *sorted(files)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
