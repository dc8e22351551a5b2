"""Offline and online filter on tasks of mixed difficulty: pass rate over generated tokens, including the filter's own.

    python bench/offline.py [--quick] [--json] [--arms ARM ...] [--seeds N ...] [--only ARM:SEED]

A third of the tasks is too easy for the model, a third is suitable, a third is too hard. `shoal filter` measures them
with the model that training starts from. The pass rates are a column of the task set, and the arms use them
differently:

    none       every task is drawn, every group is trained on
    online     every task is drawn, groups without signal are replaced by further ones
    offline    tasks with a pass rate from 1/8 to 3/4 are drawn, every group is trained on
    both

Evaluation is on held-out tasks of all three kinds, the same for all arms. Arms stop at about the same number of tokens.
"""

import json
import random
from pathlib import Path

from common import (
    OUT,
    SEEDS,
    Lines,
    build_parser,
    call_shoal,
    find_policy,
    find_run,
    finish,
    mean,
    open_plots,
    save_picture,
    train_arm,
)
from filter import METRIC, pass_at_budget, token_curve
from shoal.tasks.registry import load_family
from shoal.tasks.sets.record import TaskRecord
from shoal.tasks.sets.taskset import TaskSet
from shoal.train.report import pick_series

CONFIG = "examples/sort.toml"
KINDS = {"easy": (3, 4), "right": (8, 10), "hopeless": (22, 24)}
PER_KIND = 320
EVAL_TASKS = 96
MAX_TOKENS = 26
RATES = (0.125, 0.75)
START = ["steps=0", "eval.tasks=8"]
STEPS = {"none": 40, "online": 14, "offline": 48, "both": 36}
OVERRIDES = {
    "none": ["batch.filter=false"],
    "online": ["batch.filter=true"],
    "offline": ["batch.filter=false", f"tasks.schedule.1={json.dumps(RATES)}"],
    "both": ["batch.filter=true", f"tasks.schedule.1={json.dumps(RATES)}"],
}
"""a schedule of one stage, without a narrower filter: evaluation keeps all tasks"""


def main() -> None:
    parser = build_parser(__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="ARM:SEED", help="do this run and exit")
    parser.add_argument("--arms", nargs="+", choices=list(STEPS), help="compare these (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="with these seeds (default: 0 1 2)")
    flags = parser.parse_args()
    seeds, share = (SEEDS[:1], 4) if flags.quick else (flags.seeds or SEEDS, 1)
    if flags.only:
        arm, _, seed = flags.only.partition(":")
        run_arm(arm, int(seed), share)
        return
    runs = {arm: [run_arm(arm, seed, share) for seed in seeds] for arm in flags.arms or STEPS}
    costs = [count_filter(seed) for seed in seeds]
    if not flags.quick:
        draw(runs, costs)
    finish(flags, format_table(runs, costs), collect_figures(runs, costs))


def run_arm(arm: str, seed: int, share: int) -> Lines:
    """One run, after the SFT and the filter that it needs."""
    start = find_start(seed)
    tasks = filter_tasks(seed, start)
    settings = [
        f"tasks.set={json.dumps([str(tasks)])}",
        'tasks.filter.model="start"',
        f"policy.path={start}",
        "sft.steps=0",
        "sft.options={}",
        f"engine.max_tokens={MAX_TOKENS}",
        f"eval.tasks={EVAL_TASKS}",
    ]
    steps = STEPS[arm] // share
    settings += [f"steps={steps}", f"eval.every={max(1, steps // 8)}"]
    return train_arm(CONFIG, "offline", arm, [*settings, *OVERRIDES[arm]], seed)


def find_start(seed: int) -> Path:
    """The fine-tuned model of a seed."""
    return find_policy(CONFIG, "offline", START, seed)


def write_tasks(path: Path) -> None:
    """The task set before it is measured."""
    records = {}
    for kind, (low, high) in KINDS.items():
        family = load_family("sort", {"min_length": low, "max_length": high})
        found: dict[str, TaskRecord] = {}
        number = 0
        while len(found) < PER_KIND:
            task = family.make_task(random.Random(number))
            info = {"family": "sort", "info": dict(task.info)}
            metadata = {"kin": task.kin}
            number += 1
            found[task.id] = TaskRecord(
                id=task.id, source=kind, task_type="family", prompt=task.prompt, info=info, metadata=metadata
            )
        records |= found
    TaskSet(records.values()).save(path)


def name_filtered(seed: int) -> Path:
    return OUT / f"{find_run(CONFIG, 'offline', 'start', START, seed).name}-tasks.jsonl"


def filter_tasks(seed: int, start: Path) -> Path:
    """The task set with the pass rates of a seed's start; existing measurements are reused."""
    plain, out = OUT / "offline-tasks.jsonl", name_filtered(seed)
    if not out.exists():
        write_tasks(plain)
        bounds = ["--min", str(RATES[0]), "--max", str(RATES[1]), "--max-tokens", str(MAX_TOKENS)]
        model = ["--model", str(start), "--name", "start", "--threads", "1"]
        call_shoal(["filter", str(plain), *model, *bounds, "--out", str(out)])
    return out


def count_filter(seed: int) -> float:
    """Thousands of tokens generated by the filter."""
    work = name_filtered(seed).with_name(f"{name_filtered(seed).name}.work.jsonl")
    return sum(json.loads(line).get("tokens", 0) for line in work.read_text().splitlines()) / 1000


def find_budget(runs: dict[str, list[Lines]]) -> float:
    """The largest number of tokens, in thousands, that every run reached."""
    return min(token_curve(lines)[0][-1] for seeds in runs.values() for lines in seeds)


def measure_gain(lines: Lines, budget: float, cost: float = 0.0) -> float:
    """Gain in pass rate, in points per 100,000 tokens, of a budget partly spent on a filter."""
    start = pick_series(lines, METRIC)[1][0]
    return 100 * (pass_at_budget(lines, max(budget - cost, 0.0)) - start) / (budget / 100)


def is_offline(arm: str) -> bool:
    return arm in ("offline", "both")


def collect_figures(runs: dict[str, list[Lines]], costs: list[float]) -> dict[str, float]:
    budget = find_budget(runs)
    figures = {"budget_thousand_tokens": budget, "filter_thousand_tokens": mean(costs)}
    for arm, seeds in runs.items():
        figures[f"{arm}_gain_per_100k"] = mean([measure_gain(lines, budget) for lines in seeds])
        figures[f"{arm}_pass_at_budget"] = mean([pass_at_budget(lines, budget) for lines in seeds])
        if is_offline(arm):
            pairs = zip(seeds, costs, strict=True)
            figures[f"{arm}_gain_per_100k_paid"] = mean([measure_gain(lines, budget, cost) for lines, cost in pairs])
    return figures


def format_table(runs: dict[str, list[Lines]], costs: list[float]) -> str:
    budget = find_budget(runs)
    rows = [
        f"| arm | pass@1, start -> {budget:.0f}k tokens, each seed | points per 100k tokens | filter counted | steps |",
        "|---|---|---|---|---|",
    ]
    for arm, seeds in runs.items():
        passes = " / ".join(
            f"{pick_series(lines, METRIC)[1][0]:.3f} -> {pass_at_budget(lines, budget):.3f}" for lines in seeds
        )
        gains = " / ".join(f"{measure_gain(lines, budget):.1f}" for lines in seeds)
        paid = " / ".join(f"{measure_gain(lines, budget, cost):.1f}" for lines, cost in zip(seeds, costs, strict=True))
        rows.append(f"| {arm} | {passes} | {gains} | {paid if is_offline(arm) else ''} | {STEPS[arm]} |")
    rows += ["", f"The filter generated {' / '.join(f'{cost:.0f}k' for cost in costs)} tokens."]
    return "\n".join(rows)


def draw(runs: dict[str, list[Lines]], costs: list[float]) -> None:
    figure, axes = open_plots().subplots(1, 2, figsize=(9, 3.6), dpi=120, sharey=True)
    for colour, (arm, seeds) in enumerate(runs.items()):
        for position, lines in enumerate(seeds):
            tokens, values = token_curve(lines)
            paid = costs[position] if is_offline(arm) else 0.0
            style = {"color": f"C{colour}", "alpha": 0.7}
            axes[0].plot(tokens, values, label=None if position else arm, **style)
            axes[1].plot([paid + token for token in tokens], values, **style)
    axes[0].set(xlabel="tokens generated in training (thousands)", ylabel="held-out pass@1, sampled")
    axes[1].set(xlabel="with the offline filter's own (thousands)")
    axes[0].legend(frameon=False)
    for panel in axes:
        panel.grid(alpha=0.3)
    save_picture(figure, "offline.png")


if __name__ == "__main__":
    main()
