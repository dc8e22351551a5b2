"""Online filter on and off: held-out pass rate over generated tokens.

    python bench/filter.py [--quick] [--json]

The filter samples more per step and trains only on groups with a signal, so the fair axis is tokens generated, not
steps.
"""

from itertools import accumulate

from common import SEEDS, Lines, finish, mean, open_plots, parse_flags, run_arms, save_picture
from shoal.train.report import pick_series

ARMS = {"filter": ["batch.filter=true"], "no-filter": ["batch.filter=false"]}
METRIC = "eval/pass_at_1"


def main() -> None:
    flags = parse_flags(__doc__.splitlines()[0])
    steps, seeds = (12, SEEDS[:1]) if flags.quick else (60, SEEDS)
    arms = {name: [*overrides, f"steps={steps}", "eval.every=4"] for name, overrides in ARMS.items()}
    runs = run_arms(arms, config="examples/sort.toml", seeds=seeds, tag=f"filter{steps}")
    if not flags.quick:
        draw(runs)
    finish(flags, format_table(runs), collect_figures(runs))


def token_curve(lines: Lines) -> tuple[list[float], list[float]]:
    """Generated tokens (in thousands) and pass rate at every evaluation."""
    train_steps, tokens = pick_series(lines, "train/generated_tokens")
    total = dict(zip([0, *train_steps], [0.0, *accumulate(tokens)], strict=True))
    steps, values = pick_series(lines, METRIC)
    return [total[step] / 1000 for step in steps], values


def pass_at_budget(lines: Lines, thousand_tokens: float) -> float:
    """Pass rate at a token budget, interpolated linearly between evaluations."""
    xs, ys = token_curve(lines)
    for x0, x1, y0, y1 in zip(xs, xs[1:], ys, ys[1:], strict=False):
        if x0 <= thousand_tokens <= x1:
            return y0 + (y1 - y0) * (thousand_tokens - x0) / (x1 - x0)
    return ys[-1]


def common_budget(runs: dict[str, list[Lines]]) -> float:
    """The largest number of tokens that every run reached."""
    return min(token_curve(lines)[0][-1] for seeds in runs.values() for lines in seeds)


def collect_figures(runs: dict[str, list[Lines]]) -> dict[str, float]:
    budget = common_budget(runs)
    figures = {"budget_thousand_tokens": budget}
    for arm, seeds in runs.items():
        key = arm.replace("-", "_")
        figures[f"{key}_pass_at_budget"] = mean([pass_at_budget(lines, budget) for lines in seeds])
        figures[f"{key}_pass_at_half_budget"] = mean([pass_at_budget(lines, budget / 2) for lines in seeds])
        figures[f"{key}_pass_at_last_step"] = mean([pick_series(lines, METRIC)[1][-1] for lines in seeds])
        figures[f"{key}_thousand_tokens"] = mean([token_curve(lines)[0][-1] for lines in seeds])
    return figures


def format_table(runs: dict[str, list[Lines]]) -> str:
    budget = common_budget(runs)
    rows = [f"| arm | pass@1 at {budget:.0f}k tokens, each seed | at the last step | tokens (k) |", "|---|---|---|---|"]
    for arm, seeds in runs.items():
        equal = " / ".join(f"{pass_at_budget(lines, budget):.3f}" for lines in seeds)
        final = " / ".join(f"{pick_series(lines, METRIC)[1][-1]:.3f}" for lines in seeds)
        tokens = " / ".join(f"{token_curve(lines)[0][-1]:.0f}" for lines in seeds)
        rows.append(f"| {arm} | {equal} | {final} | {tokens} |")
    return "\n".join(rows)


def draw(runs: dict[str, list[Lines]]) -> None:
    figure, axes = open_plots().subplots(1, 2, figsize=(9, 3.6), dpi=120, sharey=True)
    for colour, (arm, seeds) in enumerate(runs.items()):
        for position, lines in enumerate(seeds):
            label = None if position else arm
            axes[0].plot(*token_curve(lines), color=f"C{colour}", alpha=0.7, label=label)
            axes[1].plot(*pick_series(lines, METRIC), color=f"C{colour}", alpha=0.7)
    axes[0].set(xlabel="generated tokens (thousands)", ylabel="held-out pass@1, sampled", ylim=(0, 1))
    axes[1].set(xlabel="step")
    axes[0].legend(frameon=False)
    for panel in axes:
        panel.grid(alpha=0.3)
    save_picture(figure, "filter.png")


if __name__ == "__main__":
    main()
