"""A real pretrained model in a real swarm: the effect of examples/smollm.toml, before and after, rule by rule.

    for seed in 0 1 2; do shoal run examples/smollm.toml seed=$seed swarm.trainer_ranks=2; done
    python bench/smollm.py [--runs runs/smollm-seed*] [--quick] [--json]

Both ends of each finished run are evaluated on the same held-out tasks with the same seeds, sampled and greedy, and a
few answers of the first run are printed next to each other. Nothing is trained here.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import SEEDS, build_parser, finish, mean, picture_path
from shoal.config.run import EvalConfig, RunConfig, load_config
from shoal.engine import open_engine
from shoal.errors import ConfigError
from shoal.launch.view import read_lines
from shoal.learner.checkpoint import find_newest
from shoal.policy.model import open_policy
from shoal.policy.tokenizer import decode_completion
from shoal.rollout import Group
from shoal.tasks.open import draw_tasks, open_tasks
from shoal.train.eval import (
    Estimate,
    EvalResult,
    answer_tasks,
    estimate_rate,
    estimate_share,
    summarise_groups,
)
from shoal.train.report import draw_curves
from shoal.util.process import tune_process

EXAMPLES = 2
"""tasks of each rule whose answers are printed"""
FULL, QUICK = (160, 2), (24, 2)
"""held-out tasks, and samples of each"""


@dataclass(frozen=True)
class End:
    """One end of a run: its figures, its answers, and the answers as text."""

    result: EvalResult
    groups: Sequence[Group]
    texts: Sequence[Sequence[str]]


def main() -> None:
    parser = build_parser(__doc__.splitlines()[0])
    runs = [Path(f"runs/smollm-seed{seed}") for seed in SEEDS]
    parser.add_argument("--runs", type=Path, nargs="+", default=runs, metavar="DIR", help="runs/smollm-seed0, 1, 2")
    flags = parser.parse_args()
    tasks, samples = QUICK if flags.quick else FULL
    evals = EvalConfig(tasks=tasks, samples=samples, k=samples)
    pairs = [measure_run(run, evals) for run in flags.runs]
    if not flags.quick:
        curves = [(run.name, list(read_lines(run))) for run in flags.runs]
        draw_curves(picture_path("smollm.png"), curves)
    config = load_config(flags.runs[0] / "launch" / "run.toml")
    table = "\n".join([*format_tables(flags.runs, pairs), "", *show_examples(config, evals, *pairs[0])])
    finish(flags, table, collect_figures(flags.runs, pairs))


def measure_run(run: Path, evals: EvalConfig) -> tuple[End, End]:
    """Both ends of a run."""
    config = load_config(run / "launch" / "run.toml")
    before, after = (measure_end(config, evals, folder) for folder in find_ends(run))
    return before, after


def find_ends(run: Path) -> tuple[Path, Path]:
    """The folders of v0 and of the newest checkpoint."""
    newest = find_newest(run / "checkpoints")
    if newest is None:
        raise ConfigError(f"{run}: no checkpoint found; create one with `shoal run examples/smollm.toml`")
    return run / "launch" / "v0", newest / "policy"


def measure_end(config: RunConfig, evals: EvalConfig, folder: Path) -> End:
    tune_process(1)
    policy = open_policy(folder)
    engine = open_engine(config.engine, policy.model, eos_id=policy.eos_id)
    family = open_tasks(config)
    groups = answer_tasks(engine, family, policy, config.model_copy(update={"eval": evals}))
    texts = [[decode_completion(policy.tokenizer, rollout.token_ids) for rollout in g.rollouts] for g in groups]
    return End(summarise_groups(groups, evals), groups, texts)


def rate_rules(groups: Sequence[Group]) -> dict[str, tuple[Estimate, Estimate]]:
    """Sampled and greedy pass rates by rule, which a task's id names."""
    by_rule: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_rule[group.task_id.split("-")[1]].append(group)
    rates = {}
    for rule, own in sorted(by_rule.items()):
        right = [[score.value >= 1.0 for score in group.scores] for group in own]
        sampled = estimate_rate([sum(row[:-1]) / (len(row) - 1) for row in right])
        rates[rule] = sampled, estimate_share(sum(row[-1] for row in right), len(right))
    return rates


def format_tables(runs: Sequence[Path], pairs: Sequence[tuple[End, End]]) -> list[str]:
    """A row for each run, then one for each rule over all runs."""
    rows = ["| held-out tasks | tasks | sampled, before | after | greedy, before | after |", "|---" * 6 + "|"]
    for run, (before, after) in zip(runs, pairs, strict=True):
        ends = before.result, after.result
        cells = [len(before.groups), *(end.pass_1 for end in ends), *(end.greedy for end in ends)]
        rows.append(f"| {run.name} | {' | '.join(map(str, cells))} |")
    groups = [[group for pair in pairs for group in pair[place].groups] for place in (0, 1)]
    ruled = [rate_rules(own) for own in groups]
    for rule in ruled[0]:
        count = sum(group.task_id.split("-")[1] == rule for group in groups[0])
        cells = [count, *(rates[rule][kind] for kind in (0, 1) for rates in ruled)]
        rows.append(f"| {rule}, all runs | {' | '.join(map(str, cells))} |")
    lengths = [", ".join(f"{pair[place].result.mean_length.value:.1f}" for pair in pairs) for place in (0, 1)]
    return [*rows, "", f"tokens per answer, sampled: {lengths[0]} before, {lengths[1]} after"]


def show_examples(config: RunConfig, evals: EvalConfig, before: End, after: End) -> list[str]:
    """The first sample and the greedy answer of a few tasks of each rule, at both ends."""
    tasks = {task.id: task for task in draw_tasks(open_tasks(config), config.model_copy(update={"eval": evals}))}
    shown: dict[str, int] = defaultdict(int)
    lines: list[str] = []
    for index, group in enumerate(before.groups):
        rule = group.task_id.split("-")[1]
        shown[rule] += 1
        if shown[rule] > EXAMPLES:
            continue
        lines.append(tasks[group.task_id].prompt)
        for label, end in (("before", before), ("after", after)):
            for kind, place in (("sampled", 0), ("greedy", -1)):
                mark = "passes" if end.groups[index].scores[place].value >= 1.0 else "fails"
                lines.append(f"    {label}, {kind}, {mark}: {end.texts[index][place]!r}")
    return lines


def collect_figures(runs: Sequence[Path], pairs: Sequence[tuple[End, End]]) -> dict[str, float]:
    """Means over the runs, and the smallest gain of one."""
    times = [[line["time"] for line in read_lines(run) if "time" in line] for run in runs]
    figures = {"runs": len(runs), "tasks": len(pairs[0][0].groups), "run_s": mean([max(t) - min(t) for t in times])}
    for name, kind in (("sampled", "pass_1"), ("greedy", "greedy")):
        before, after = ([getattr(pair[place].result, kind).value for pair in pairs] for place in (0, 1))
        figures |= {f"{name}_before": mean(before), f"{name}_after": mean(after)}
        figures[f"{name}_gain_min"] = min(last - first for first, last in zip(before, after, strict=True))
    return figures


if __name__ == "__main__":
    main()
