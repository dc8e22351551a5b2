"""TARGET-SHORT and TARGET-LONG: does a model learn the length requested in its prompt, and what makes it learn?

    python bench/length.py [--quick] [--json] [--arms ARM ...] [--seeds N ...] [--only ARM:SEED]
    python bench/length.py --model DIR [--quick] [--json] [--seeds N ...]       SmolLM2-135M-Instruct, real words

INTELLECT-2's two sets of targets, divided by 333. The model is fine-tuned on demonstrations of which three in ten match
the target in their prompt; the others have any length. All are correct answers. Each run is single-threaded and is not
repeated once it exists; `--only long:0` does one run and exits.

    short, long   alpha 0.02 per token, at most 0.5
    control       long, length not rewarded
    weak          long, alpha = 0.0003, INTELLECT-2's value
    deaf          long, from a start whose demonstrations were unrelated to the targets in their prompts
    filtered      long, with the online filter: groups whose answers are all right or all wrong are replaced
    centred       long, advantages not divided by the group's standard deviation

With `--model` (see examples/smollm.toml) a pretrained model writes sentences under those rules of `rules:COUNT` that
limit neither words nor letters. Its two sets of targets are INTELLECT-2's, divided by 167. The prompt counts words,
which it knows from its pretraining; the reward counts tokens.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from common import (
    OUT,
    SEEDS,
    Lines,
    build_parser,
    find_policy,
    finish,
    mean,
    open_plots,
    run_arms,
    save_picture,
    train_arm,
)
from shoal.tasks.sets.record import dump_record
from shoal.tasks.sets.rules import make_rules
from shoal.train.report import pick_series

CONFIG = "examples/length.toml"


def name_targets(targets: list[int]) -> str:
    """The setting for these targets."""
    return f"length.targets={json.dumps(targets)}"


SHORT, LONG = [3, 6, 9, 12], [6, 12, 18, 24, 30]
TARGETS = {"short": SHORT, "long": LONG, "control": LONG, "weak": LONG, "deaf": LONG, "filtered": LONG, "centred": LONG}
OVERRIDES = {
    "short": [],
    "long": [],
    "control": ["length.alpha=1e-9"],
    "weak": ["length.alpha=0.0003"],
    "deaf": ["tasks.options.heed=0"],
    "filtered": ["batch.filter=true"],
    "centred": ["learner.advantage=centred"],
}
START = ["steps=0", "eval.tasks=8", name_targets(sorted({*SHORT, *LONG}))]
MODEL_CONFIG, NUM_TASKS = "examples/smollm.toml", 2300
MODEL_TARGETS = {"smollm-short": [6, 12, 18, 24], "smollm-long": [12, 24, 36, 48, 60]}
MODEL_SETTINGS = [
    "engine.max_tokens=72",
    "batch.groups=4",
    "checkpoint.every=1000",
    "batch.filter=false",
    "learner.advantage=zscore",
    "length.mode=exact",
    "length.alpha=0.02",
    'length.template="{prompt} Use exactly {target} words."',
]
FREE_RULES = ("english_lowercase", "existence", "no_comma")
"""rules that any length can satisfy"""
TARGETS |= MODEL_TARGETS
PASSES = {"sampled": "eval/pass_at_1", "greedy": "eval/greedy"}


def main() -> None:
    parser = build_parser(__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="ARM:SEED", help="do this run and exit")
    parser.add_argument("--arms", nargs="+", choices=list(OVERRIDES), help="compare these (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="with these seeds (default: 0 1 2)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="measure this SmolLM2 instead of the tiny model")
    flags = parser.parse_args()
    if flags.model is not None:
        measure_model(flags)
        return
    steps, seeds, names = (16, SEEDS[:1], ["long", "control"]) if flags.quick else (60, SEEDS, list(OVERRIDES))
    names, seeds = flags.arms or names, flags.seeds or seeds
    if flags.only:
        arm, _, seed = flags.only.partition(":")
        run_arm(arm, int(seed), steps)
        return
    runs = {arm: [run_arm(arm, seed, steps) for seed in seeds] for arm in names}
    if not flags.quick:
        draw(runs)
    show(flags, runs)


def measure_model(flags: argparse.Namespace) -> None:
    """The pretrained model with both sets of targets."""
    steps, seeds = (4, SEEDS[:1]) if flags.quick else (40, SEEDS)
    OUT.mkdir(parents=True, exist_ok=True)
    tasks = OUT / "free-rules.jsonl"
    records = (record for record in make_rules(NUM_TASKS) if record.id.split("-")[1] in FREE_RULES)
    tasks.write_bytes(b"".join(dump_record(record) + b"\n" for record in records))
    place = [f"policy.path={flags.model.resolve()}", f"tasks.set={tasks}", f"steps={steps}", *MODEL_SETTINGS]
    arms = {arm: [*place, name_targets(targets)] for arm, targets in MODEL_TARGETS.items()}
    runs = run_arms(arms, config=MODEL_CONFIG, seeds=flags.seeds or seeds, tag="length")
    if not flags.quick:
        draw_model(runs)
    show(flags, runs)


def run_arm(arm: str, seed: int, steps: int) -> Lines:
    """One run. The arms of a seed, except the deaf one, start from the same model, which has seen all targets."""
    start = find_policy(CONFIG, "length", [*START, *(OVERRIDES[arm] if arm == "deaf" else [])], seed)
    place = [f"policy.path={start}", "sft.steps=0", f"steps={steps}"]
    return train_arm(CONFIG, "length", arm, [*place, name_targets(TARGETS[arm]), *OVERRIDES[arm]], seed)


def show(flags: argparse.Namespace, runs: dict[str, list[Lines]]) -> None:
    finish(flags, "\n\n".join([format_arms(runs), format_targets(runs)]), collect_figures(runs))


def best_constant(targets: list[int]) -> float:
    """Mean |l - target| of the best length that does not depend on the target, for equally likely targets."""
    return min(float(np.mean([abs(length - target) for target in targets])) for length in range(max(targets) + 1))


def error_curve(lines: Lines, targets: list[int]) -> tuple[list[int], list[float]]:
    """Steps, and mean |l - target| over held-out tasks, with equal weight per target."""
    curves = [pick_series(lines, f"eval/error_{target}") for target in targets]
    return curves[0][0], [mean(values) for values in zip(*(curve for _, curve in curves), strict=True)]


def show_change(curves: list[list[float]], digits: int) -> str:
    """First -> last of each seed."""
    return " / ".join(f"{curve[0]:.{digits}f} -> {curve[-1]:.{digits}f}" for curve in curves)


def format_arms(runs: dict[str, list[Lines]]) -> str:
    head = "budget error, tokens, each seed | best constant | pass@1 sampled | greedy"
    rows = [f"| arm | {head} |", "|---|---|---|---|---|"]
    for arm, seeds in runs.items():
        errors = show_change([error_curve(lines, TARGETS[arm])[1] for lines in seeds], 1)
        passes = [show_change([pick_series(lines, name)[1] for lines in seeds], 2) for name in PASSES.values()]
        rows.append(f"| {arm} | {errors} | {best_constant(TARGETS[arm]):.1f} | {' | '.join(passes)} |")
    return "\n".join(rows)


def format_targets(runs: dict[str, list[Lines]]) -> str:
    """Mean over seeds, at the last step."""
    columns = sorted({target for arm in runs for target in TARGETS[arm]})
    rows = [f"| budget error by target | {' | '.join(map(str, columns))} |", "|---" * (len(columns) + 1) + "|"]
    for arm, seeds in runs.items():
        for name, place in (("before", 0), ("after", -1)):
            cells = [
                f"{mean([pick_series(lines, f'eval/error_{target}')[1][place] for lines in seeds]):.1f}"
                if target in TARGETS[arm]
                else ""
                for target in columns
            ]
            rows.append(f"| {arm}, {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def collect_figures(runs: dict[str, list[Lines]]) -> dict[str, float]:
    figures = {}
    for arm, seeds in runs.items():
        errors = [error_curve(lines, TARGETS[arm])[1] for lines in seeds]
        figures[f"{arm}_error_before"] = mean([curve[0] for curve in errors])
        figures[f"{arm}_error_after"] = mean([curve[-1] for curve in errors])
        figures[f"{arm}_error_after_max"] = max(curve[-1] for curve in errors)
        figures[f"{arm}_best_constant"] = best_constant(TARGETS[arm])
        for name, metric in PASSES.items():
            curves = [pick_series(lines, metric)[1] for lines in seeds]
            figures[f"{arm}_{name}_before"] = mean([curve[0] for curve in curves])
            figures[f"{arm}_{name}_after"] = mean([curve[-1] for curve in curves])
    return figures


def draw_model(runs: Mapping[str, Sequence[Lines]]) -> None:
    figure, (errors, passes) = open_plots().subplots(1, 2, figsize=(9.5, 3.6), dpi=120)
    for place, (arm, seeds) in enumerate(runs.items()):
        errors.axhline(best_constant(TARGETS[arm]), color=f"C{place}", linestyle=":", linewidth=1)
        for seed, lines in enumerate(seeds):
            label = "" if seed else arm
            errors.plot(*error_curve(lines, TARGETS[arm]), color=f"C{place}", alpha=0.7, label=label)
            for style, metric in zip(("-", "--"), PASSES.values(), strict=True):
                passes.plot(*pick_series(lines, metric), style, color=f"C{place}", alpha=0.7)
    errors.set(xlabel="step", ylabel="budget error, held-out (tokens)", ylim=(0, None))
    passes.set(xlabel="step", ylabel="held-out pass rate, sampled (-) and greedy (--)", ylim=(0, 1))
    errors.legend(frameon=False, fontsize=8)
    for panel in (errors, passes):
        panel.grid(alpha=0.3)
    save_picture(figure, "length_smollm.png")


def draw(runs: dict[str, list[Lines]]) -> None:
    figure, axes = open_plots().subplots(2, 2, figsize=(9.5, 6.6), dpi=120)
    colours = {arm: f"C{place}" for place, arm in enumerate(runs)}
    panels = {"task reward": "reward/mean", "length penalty": "length/penalty"}
    for (title, metric), panel in zip(panels.items(), axes[0], strict=True):
        for arm, seeds in runs.items():
            if metric == "length/penalty" and arm in ("control", "weak"):
                continue  # it is next to nothing there by definition
            panel.plot(*average_series(seeds, metric), color=colours[arm], alpha=0.8, linewidth=1)
        panel.set(xlabel="step", ylabel=f"{title}, training rollouts")
    for arm, lines in ((arm, lines) for arm, seeds in runs.items() for lines in seeds):
        axes[1][0].plot(*error_curve(lines, TARGETS[arm]), color=colours[arm], alpha=0.7)
    for name in runs.keys() & {"short", "long"}:
        axes[1][0].axhline(best_constant(TARGETS[name]), color=colours[name], linestyle=":", linewidth=1)
    axes[1][0].set(xlabel="step", ylabel="budget error, held-out (tokens)", ylim=(0, None))
    draw_targets(axes[1][1], runs, colours)
    names = axes[1][1].get_legend_handles_labels()
    figure.legend(*names, frameon=False, fontsize=8, ncols=len(runs), loc="upper center")
    for panel in axes.flat:
        panel.grid(alpha=0.3)
    save_picture(figure, "length.png", top=0.95)


def average_series(seeds: list[Lines], metric: str) -> tuple[list[int], list[float]]:
    """Steps, and a metric's mean over the seeds and five steps."""
    series = [pick_series(lines, metric) for lines in seeds]
    means = np.mean([values for _, values in series], axis=0)
    smooth = [float(means[max(0, place - 2) : place + 3].mean()) for place in range(len(means))]
    return series[0][0], smooth


def draw_targets(panel, runs: dict[str, list[Lines]], colours: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    """Budget error by target at the last step, mean of the seeds."""
    for arm, seeds in runs.items():
        errors = [
            mean([pick_series(lines, f"eval/error_{target}")[1][-1] for lines in seeds]) for target in TARGETS[arm]
        ]
        panel.plot(TARGETS[arm], errors, "o-", color=colours[arm], alpha=0.8, label=arm)
    panel.set(xlabel="target (tokens)", ylabel="budget error, last step (tokens)", ylim=(0, None))


if __name__ == "__main__":
    main()
