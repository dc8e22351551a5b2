"""Asynchrony in a real swarm: the cost of a broadcast that takes as long as a training step, for k = 0, 1, 2 and 4.

    python bench/overlap.py [--quick] [--json] [--fresh] [--out DIR] [--seeds 0 1 2] [--levels 0 1 2 4]

All processes of `shoal run` on this machine. The origin's link is limited so that a broadcast takes about as long as a
training step (two short runs find the rate). Busy shares come from the spans that the roles write. Pass rates are
held-out ones of the versions, evaluated after the run, over steps and over seconds since v0 was published.

Runs are interleaved over seeds. Results of finished runs are kept in DIR: the same command resumes where it stopped.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from common import OUT, build_parser, finish, mean
from overlap_chart import draw_curves, draw_overlap
from shoal.util.files import write_atomic
from swarms import Summary, find_summary, load_swarm

LEVELS, SEEDS = (0, 1, 2, 4), (0, 1, 2)
SHARES = (0.5, 0.7, 0.9)
SHARE = 0.7
"""share of the gain of k = 0 in the run of the same seed, because seeds begin at different pass rates; for `speedup`"""
STEPS = 20
QUICK_STEPS = 12
"""past an anchor, v8"""
SETTINGS = (
    # Large enough that computation dominates communication; KL and recomputed log-probs are INTELLECT-2's.
    "policy.tiny.width=192",
    "policy.tiny.layers=4",
    "sft.steps=200",
    "sft.lr=1.5e-3",
    "sft.options={min_length=3, max_length=7}",
    "learner.loss.kl=0.001",
    # Small changes from version to version, as in long runs: the target is reached after a dozen steps, not after two.
    "learner.lr=6e-6",
    # Large groups that are not sampled too sharply mostly have a signal: two cores can supply the trainer.
    "tasks.options={min_length=8, max_length=9}",
    "engine.temperature=1.3",
    "batch.groups=12",
    "batch.group_size=64",
    "swarm.groups_per_lease=3",
    "swarm.slots=512",
    "swarm.cheats=[]",
    "checkpoint.every=8",
    # Answers this short repeat themselves, unlike those of real tasks: prefix sharing is off.
    "learner.share=false",
)
EVAL = ("eval.tasks=512", "eval.samples=4", "eval.k=1", "eval.every=4")
NO_EVAL = ("eval.tasks=1", "eval.samples=1", "eval.k=1", "eval.every=0")

Runs = dict[int, list[Summary]]
"""by async level, in order of seeds"""


def main() -> None:
    flags = parse_flags()
    rate = find_rate(flags)
    steps = QUICK_STEPS if flags.quick else STEPS
    runs: Runs = {level: [] for level in flags.levels}
    for number, seed in enumerate(flags.seeds):
        turn = number % len(flags.levels)
        for level in [*flags.levels[turn:], *flags.levels[:turn]]:
            runs[level].append(run_level(flags, level, seed, steps, rate))
    if not flags.quick:
        draw_overlap(runs, "overlap.png")
        draw_curves(runs, "asynchrony.png")
    finish(flags, format_tables(runs), collect_figures(runs))


def run_level(flags: argparse.Namespace, level: int, seed: int, steps: int, rate: str) -> Summary:
    """One run."""
    settings = [*SETTINGS, *EVAL, f"async_level={level}", f"steps={steps}", f"swarm.rate={rate}"]
    config = load_swarm(f"k{level}", seed, flags.out, settings)
    return find_summary(config, flags.out, fresh=flags.fresh)


def find_rate(flags: argparse.Namespace) -> str:
    """The rate at which a broadcast takes as long as a step; measured once, then kept."""
    path = flags.out / "rate.json"
    if path.exists() and not flags.fresh:
        return str(json.loads(path.read_bytes())["rate"])
    free = run_pilot(flags, "")
    train_s, least_s = median(free.train_s), median(free.broadcasts)
    first = free.version_bytes / train_s
    limited = run_pilot(flags, _spell_rate(first))
    # A broadcast takes its time without a limit, plus the time of its bytes on the link.
    wire_bytes = first * (median(limited.broadcasts) - least_s)
    rate = _spell_rate(wire_bytes / (train_s - least_s))
    found = {"rate": rate, "train_s": train_s, "least_s": least_s, "wire_bytes": wire_bytes}
    write_atomic(path, json.dumps(found | {"version_bytes": free.version_bytes}).encode())
    return rate


def run_pilot(flags: argparse.Namespace, rate: str) -> Summary:
    settings = [*SETTINGS, *NO_EVAL, "async_level=2", "steps=6", f"swarm.rate={rate}"]
    return find_summary(load_swarm("pilot", flags.seeds[0], flags.out, settings), flags.out, fresh=flags.fresh)


def _spell_rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s:.0f}B"


def find_crossing(run: Summary, target: float) -> float | None:
    """Seconds until the held-out pass rate reaches a target, interpolated linearly between evaluations."""
    times = [0.0, *run.written]
    points = [(times[version], rate) for version, rate, _ in run.evals]
    if points[0][1] >= target:
        return 0.0
    for (before_s, low), (after_s, high) in pairwise(points):
        if high >= target:
            return before_s + (after_s - before_s) * (target - low) / (high - low)
    return None


def collect_figures(runs: Runs) -> dict[str, float]:
    figures: dict[str, float] = {}
    for level, seeds in runs.items():
        figures[f"trainer_idle_k{level}"] = mean([1 - run.share_of("trainer") for run in seeds])
        figures[f"worker_busy_k{level}"] = mean([share_workers(run) for run in seeds])
        figures[f"step_s_k{level}"] = mean([measure_step(run) for run in seeds])
        figures[f"pass_k{level}"] = mean([run.evals[-1][1] for run in seeds])
        figures[f"greedy_k{level}"] = mean([run.evals[-1][2] for run in seeds])
        figures[f"age_k{level}"] = mean([mean(run.ages) for run in seeds])
        figures[f"broadcast_over_train_k{level}"] = mean([compare_broadcast(run) for run in seeds])
        if level and 0 in runs:
            figures |= {f"{name}_k{level}": value for name, value in compare_speed(runs[0], seeds).items()}
    return figures


def compare_speed(slow: Sequence[Summary], fast: Sequence[Summary]) -> dict[str, float]:
    """Speed-up of the second runs over the first: per step, and to each target that all of them reach."""
    found = {"step_speedup": mean([measure_step(run) for run in slow]) / mean([measure_step(run) for run in fast])}
    before = [mean([run.window[0] for run in seeds]) for seeds in (slow, fast)]
    for share in SHARES:
        targets = [find_target(run, share) for run in slow]
        times = [[find_crossing(*pair) for pair in zip(seeds, targets, strict=True)] for seeds in (slow, fast)]
        reached = [[value for value in seeds if value] for seeds in times]
        if all(len(seeds) == len(slow) for seeds in reached):
            name = "speedup" if share == SHARE else f"speedup_to_{share}"
            found[name] = mean(reached[0]) / mean(reached[1])
            found[f"{name}_from_first_step"] = (mean(reached[0]) - before[0]) / (mean(reached[1]) - before[1])
    return found


def find_target(run: Summary, share: float) -> float:
    """The pass rate at which a run has made that share of its gain."""
    first, last = run.evals[0][1], run.evals[-1][1]
    return first + share * (last - first)


def measure_step(run: Summary) -> float:
    """Seconds from one version to the next."""
    begin, end = run.window
    return (end - begin) / len(run.written)


def share_workers(run: Summary) -> float:
    """Mean busy share of the workers."""
    return mean([run.share_of(name) for name in run.busy if name.startswith("worker-")])


def compare_broadcast(run: Summary) -> float:
    """Median time of a broadcast relative to a training step."""
    return median(run.broadcasts) / median(run.train_s)


def format_tables(runs: Runs) -> str:
    return "\n".join([*_list_overlap(runs), "", *_list_curves(runs), "", *_list_targets(runs), "", *_list_cpu(runs)])


def _list_overlap(runs: Runs) -> list[str]:
    rows = [
        "| k | s per step | training s | broadcast s | trainer idle | workers busy | validators busy |",
        "|---|---|---|---|---|---|---|",
    ]
    for level, seeds in runs.items():
        judges = mean([run.share_of(name) for run in seeds for name in run.busy if name.startswith("validator-")])
        cells = [
            f"{mean([measure_step(run) for run in seeds]):.2f}",
            f"{mean([median(run.train_s) for run in seeds]):.2f}",
            f"{mean([median(run.broadcasts) for run in seeds]):.2f}",
            f"{mean([1 - run.share_of('trainer') for run in seeds]):.1%}",
            f"{mean([share_workers(run) for run in seeds]):.1%}",
            f"{judges:.1%}",
        ]
        rows.append(f"| {level} | {' | '.join(cells)} |")
    return rows


def _list_curves(runs: Runs) -> list[str]:
    rows = ["| k | sampled, each seed | mean | greedy, mean | mean age | oldest |", "|---|---|---|---|---|---|"]
    for level, seeds in runs.items():
        each = " ".join(f"{run.evals[-1][1]:.3f}" for run in seeds)
        cells = [
            f"{mean([run.evals[-1][1] for run in seeds]):.3f}",
            f"{mean([run.evals[-1][2] for run in seeds]):.3f}",
            f"{mean([mean(run.ages) for run in seeds]):.2f}",
            f"{max(run.age_max for run in seeds):.0f}",
        ]
        rows.append(f"| {level} | {each} | {' | '.join(cells)} |")
    return rows


def _list_targets(runs: Runs) -> list[str]:
    if 0 not in runs:
        return []
    titles = [f"s to {share:.0%} of the gain of k = 0, each seed" for share in SHARES]
    rows = [f"| k | {' | '.join(titles)} | first step begins, s |", "|---" * (len(SHARES) + 2) + "|"]
    for level, seeds in runs.items():
        cells = []
        for share in SHARES:
            times = [find_crossing(run, find_target(base, share)) for run, base in zip(seeds, runs[0], strict=True)]
            cells.append(" ".join("-" if value is None else f"{value:.0f}" for value in times))
        rows.append(f"| {level} | {' | '.join(cells)} | {mean([run.window[0] for run in seeds]):.1f} |")
    return rows


def _list_cpu(runs: Runs) -> list[str]:
    """CPU seconds per step of each kind of part, from start to end."""
    kinds = ("trainer", "worker", "validator", "coordinator", "origin", "relay")
    rows = [f"| k | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for level, seeds in runs.items():
        cells = []
        for kind in kinds:
            spent = [sum(value for name, value in run.cpu_s.items() if name.startswith(kind)) for run in seeds]
            cells.append(f"{mean(spent) / len(seeds[0].written):.2f}")
        rows.append(f"| {level} | {' | '.join(cells)} |")
    return rows


def parse_flags() -> argparse.Namespace:
    parser = build_parser(__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="ignore kept results and run again")
    parser.add_argument("--out", type=Path, default=OUT / "overlap", help="folder for results (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds (0 1 2; --quick: 0)")
    parser.add_argument("--levels", type=int, nargs="+", help="async levels (0 1 2 4; --quick: 0 2)")
    flags = parser.parse_args()
    flags.out = flags.out.resolve()
    flags.seeds = flags.seeds or (SEEDS[:1] if flags.quick else SEEDS)
    flags.levels = flags.levels or ((0, 2) if flags.quick else LEVELS)
    return flags


if __name__ == "__main__":
    main()
