"""A real pretrained model in a real swarm: the effect of examples/smollm.toml, before and after, rule by rule.

    shoal run examples/smollm.toml
    python bench/smollm.py [--run runs/smollm-seed0] [--quick] [--json]

Both ends of a finished run are evaluated on the same held-out tasks with the same seeds, sampled and greedy, and a few
of their answers are printed next to each other. Nothing is trained here.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import build_parser, finish, picture_path
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
    parser.add_argument("--run", type=Path, default=Path("runs/smollm-seed0"), metavar="DIR", help="%(default)s")
    flags = parser.parse_args()
    config = load_config(flags.run / "launch" / "run.toml")
    tasks, samples = QUICK if flags.quick else FULL
    evals = EvalConfig(tasks=tasks, samples=samples, k=samples)
    before, after = (measure_end(config, evals, folder) for folder in find_ends(flags.run))
    if not flags.quick:
        draw_curves(picture_path("smollm.png"), [("SmolLM2-135M", list(read_lines(flags.run)))])
    finish(flags, format_tables(config, evals, before, after), collect_figures(flags, before, after))


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


def rate_rules(end: End) -> dict[str, tuple[Estimate, Estimate]]:
    """Sampled and greedy pass rates by rule, which a task's id names."""
    by_rule: dict[str, list[Group]] = defaultdict(list)
    for group in end.groups:
        by_rule[group.task_id.split("-")[1]].append(group)
    rates = {}
    for rule, groups in sorted(by_rule.items()):
        right = [[score.value >= 1.0 for score in group.scores] for group in groups]
        sampled = estimate_rate([sum(row[:-1]) / (len(row) - 1) for row in right])
        rates[rule] = sampled, estimate_share(sum(row[-1] for row in right), len(right))
    return rates


def format_tables(config: RunConfig, evals: EvalConfig, before: End, after: End) -> str:
    head = "| held-out tasks | tasks | sampled, before | after | greedy, before | after |"
    rows = [head, "|---" * 6 + "|"]
    ends = [end.result for end in (before, after)]
    cells = [ends[0].pass_1, ends[1].pass_1, ends[0].greedy, ends[1].greedy]
    rows.append(f"| all | {len(before.groups)} | " + " | ".join(map(str, cells)) + " |")
    ruled = rate_rules(before), rate_rules(after)
    for rule in ruled[0]:
        count = sum(group.task_id.split("-")[1] == rule for group in before.groups)
        cells = [ruled[0][rule][0], ruled[1][rule][0], ruled[0][rule][1], ruled[1][rule][1]]
        rows.append(f"| {rule} | {count} | " + " | ".join(map(str, cells)) + " |")
    lengths = f"tokens per answer, sampled: {ends[0].mean_length} before, {ends[1].mean_length} after"
    return "\n".join([*rows, "", lengths, "", *show_examples(config, evals, before, after)])


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


def collect_figures(flags: argparse.Namespace, before: End, after: End) -> dict[str, float]:
    lines = [line for line in read_lines(flags.run) if "time" in line]
    return {
        "sampled_before": before.result.pass_1.value,
        "sampled_after": after.result.pass_1.value,
        "greedy_before": before.result.greedy.value,
        "greedy_after": after.result.greedy.value,
        "tasks": len(before.groups),
        "run_s": max(line["time"] for line in lines) - min(line["time"] for line in lines),
    }


if __name__ == "__main__":
    main()
