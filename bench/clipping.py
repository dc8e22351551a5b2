"""Two-sided and one-sided clipping: largest gradient norm and number of spikes under stress.

    python bench/clipping.py [--quick] [--json]

Stress as in the published argument: stale data, several updates per step, no gradient-norm clip.
One-sided is the same loss with delta out of reach.
"""

from common import SEEDS, Lines, finish, last_value, mean, open_plots, parse_flags, run_arms, save_picture
from shoal.train.report import pick_series

STRESS = [
    "async_level=4",
    "learner.updates=4",
    "learner.lr=1e-4",
    "learner.max_grad_norm=1e9",
    "learner.old_logprobs=behaviour",
    "eval.every=10",
]
ARMS = {"two-sided": ["learner.loss.delta=4.0"], "one-sided": ["learner.loss.delta=1e9"]}
SPIKE = 10.0
METRIC = "optim/grad_norm_max"


def main() -> None:
    flags = parse_flags(__doc__.splitlines()[0])
    steps, seeds = (15, SEEDS[:1]) if flags.quick else (40, SEEDS)
    arms = {name: [*STRESS, *overrides, f"steps={steps}"] for name, overrides in ARMS.items()}
    runs = run_arms(arms, config="examples/sort.toml", seeds=seeds, tag=f"clipping{steps}")
    if not flags.quick:
        draw(runs)
    finish(flags, format_table(runs), collect_figures(runs))


def count_spikes(lines: Lines) -> int:
    return sum(value > SPIKE for value in pick_series(lines, METRIC)[1])


def collect_figures(runs: dict[str, list[Lines]]) -> dict[str, float]:
    figures = {}
    for arm, seeds in runs.items():
        key = arm.replace("-", "_")
        figures[f"{key}_grad_norm_max"] = max(max(pick_series(lines, METRIC)[1]) for lines in seeds)
        figures[f"{key}_spikes"] = sum(count_spikes(lines) for lines in seeds)
        figures[f"{key}_pass"] = mean([last_value(lines, "eval/pass_at_1") for lines in seeds])
    return figures


def format_table(runs: dict[str, list[Lines]]) -> str:
    rows = [f"| arm | largest gradient norm, each seed | steps above {SPIKE:g} | final pass@1 |", "|---|---|---|---|"]
    for arm, seeds in runs.items():
        largest = " / ".join(f"{max(pick_series(lines, METRIC)[1]):.1f}" for lines in seeds)
        spikes = " / ".join(str(count_spikes(lines)) for lines in seeds)
        finals = " / ".join(f"{last_value(lines, 'eval/pass_at_1'):.3f}" for lines in seeds)
        rows.append(f"| {arm} | {largest} | {spikes} | {finals} |")
    return "\n".join(rows)


def draw(runs: dict[str, list[Lines]]) -> None:
    figure, axes = open_plots().subplots(figsize=(7, 3.6), dpi=120)
    for colour, (arm, seeds) in enumerate(runs.items()):
        for position, lines in enumerate(seeds):
            steps, values = pick_series(lines, METRIC)
            axes.semilogy(steps, values, color=f"C{colour}", alpha=0.7, label=None if position else arm)
    axes.set(xlabel="step", ylabel="largest gradient norm of the step")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_picture(figure, "clipping.png")


if __name__ == "__main__":
    main()
