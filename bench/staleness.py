"""Staleness 0, 1, 2 and 4, simulated by delayed weights. Old log-probs are recomputed, with and without importance
correction, or taken from the rollouts.

    python bench/staleness.py [--quick] [--json] [--levels 0 1 2 4] [--kinds token none behaviour]

Claim of the paper (its figure 7): up to four steps of staleness barely change the reward curve.
"""

from common import SEEDS, Lines, build_parser, finish, last_value, mean, open_plots, run_arms, save_picture
from shoal.train.report import pick_series

LEVELS = (0, 1, 2, 4)
METRIC = "eval/pass_at_1"
ARMS = {
    "token": ["learner.loss.correction=token"],
    "none": ["learner.loss.correction=none"],
    "behaviour": ["learner.old_logprobs=behaviour"],
}
TITLES = {
    "token": "recomputed, corrected",
    "none": "recomputed, not corrected",
    "behaviour": "taken from the rollouts",
}


def main() -> None:
    parser = build_parser(__doc__.splitlines()[0])
    parser.add_argument("--levels", type=int, nargs="+", default=LEVELS, help="async levels (all)")
    parser.add_argument("--kinds", nargs="+", default=tuple(ARMS), choices=ARMS, help="old log-probs (all)")
    flags = parser.parse_args()
    steps, seeds = (12, SEEDS[:1]) if flags.quick else (40, SEEDS)
    arms: dict[str, list[str]] = {}
    for level in flags.levels:
        common = [f"async_level={level}", f"steps={steps}", "eval.every=4"]
        arms |= {f"k{level}-{kind}": [*common, *settings] for kind, settings in ARMS.items() if kind in flags.kinds}
    runs = run_arms(arms, config="examples/sort.toml", seeds=seeds, tag=f"staleness{steps}")
    if not flags.quick and len(runs) == len(LEVELS) * len(ARMS):
        draw(runs)
    finish(flags, format_table(runs), collect_figures(runs))


def collect_figures(runs: dict[str, list[Lines]]) -> dict[str, float]:
    figures = {}
    for arm, seeds in runs.items():
        figures[f"{arm.replace('-', '_')}_pass"] = mean([last_value(lines, METRIC) for lines in seeds])
        figures[f"{arm.replace('-', '_')}_area"] = mean([mean(pick_series(lines, METRIC)[1]) for lines in seeds])
    return figures


def format_table(runs: dict[str, list[Lines]]) -> str:
    rows = [
        "| arm | final pass@1, each seed | mean | area under the curve | mismatch KL | ESS |",
        "|---|---|---|---|---|---|",
    ]
    for arm, seeds in runs.items():
        finals = [last_value(lines, METRIC) for lines in seeds]
        area = mean([mean(pick_series(lines, METRIC)[1]) for lines in seeds])
        kl = mean([mean(pick_series(lines, "off_policy/mismatch_kl")[1]) for lines in seeds])
        ess = mean([mean(pick_series(lines, "off_policy/raw_ess")[1]) for lines in seeds])
        each = " ".join(f"{value:.3f}" for value in finals)
        rows.append(f"| {arm} | {each} | {mean(finals):.3f} | {area:.3f} | {kl:.5f} | {ess:.3f} |")
    return "\n".join(rows)


def draw(runs: dict[str, list[Lines]]) -> None:
    figure, axes = open_plots().subplots(1, 3, figsize=(12.6, 3.6), dpi=120, sharey=True)
    for panel, kind in zip(axes, ARMS, strict=True):
        for colour, level in enumerate(LEVELS):
            for position, lines in enumerate(runs[f"k{level}-{kind}"]):
                steps, values = pick_series(lines, METRIC)
                label = None if position else f"k = {level}"
                panel.plot(steps, values, color=f"C{colour}", alpha=0.7, label=label)
        panel.set(title=TITLES[kind], xlabel="step", ylim=(0, 1))
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    axes[0].set_ylabel("held-out pass@1, sampled")
    save_picture(figure, "staleness.png")


if __name__ == "__main__":
    main()
