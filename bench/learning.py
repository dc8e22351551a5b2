"""Learning by RL: the demo with three seeds, in float32 and bfloat16, and as much compute spent on demonstrations.

    python bench/learning.py [--quick] [--json]

Held-out pass rates, sampled and greedy, before and after. The control is fine-tuned three times as long, which costs
about as much as RL, without RL. `bfloat16` starts from the same fine-tuned weights and computes RL's forward and
backward passes in bfloat16 (`learner.precision`). Runs are single-threaded, two at a time; `make demo` gives all cores
to one run.
"""

from common import SEEDS, Lines, finish, mean, open_plots, parse_flags, run_arms, save_picture
from shoal.train.report import pick_series

METRICS = {"sampled": "eval/pass_at_1", "greedy": "eval/greedy"}


def main() -> None:
    flags = parse_flags(__doc__.splitlines()[0])
    seeds, steps = (SEEDS[:1], 20) if flags.quick else (SEEDS, 60)
    arms = {
        "rl": [f"steps={steps}"],
        "bfloat16": [f"steps={steps}", "learner.precision=bfloat16"],
        "control": ["steps=0", "sft.steps=750"],
    }
    runs = run_arms(arms, config="examples/sort.toml", seeds=seeds, tag=f"learning{steps}")
    if not flags.quick:
        draw_runs(runs)
    finish(flags, format_table(runs), collect_figures(runs))


def draw_runs(runs: dict[str, list[Lines]]) -> None:
    """Held-out pass rates over the steps of every seed, RL in float32 and in bfloat16."""
    figure, axes = open_plots().subplots(1, 2, figsize=(9.5, 3.6), dpi=120, sharey=True)
    for panel, (name, metric) in zip(axes, METRICS.items(), strict=True):
        for (arm, label), colour in zip({"rl": "float32", "bfloat16": "bfloat16"}.items(), ("C0", "C1"), strict=True):
            for seed, lines in enumerate(runs[arm]):
                text = label if seed == 0 else None
                panel.plot(*pick_series(lines, metric), color=colour, alpha=0.8, linewidth=1.5, label=text)
        panel.set(xlabel="step", title=f"{name}, {len(runs['rl'])} seeds each", ylim=(0, 1))
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("held-out tasks that pass")
    axes[0].legend(frameon=False, title="learner.precision")
    save_picture(figure, "learning.png")


def collect_figures(runs: dict[str, list[Lines]]) -> dict[str, float]:
    figures = {}
    for name, metric in METRICS.items():
        curves = [pick_series(lines, metric)[1] for lines in runs["rl"]]
        figures[f"{name}_gain_min"] = min(curve[-1] - curve[0] for curve in curves)
        figures[f"{name}_after_min"] = min(curve[-1] for curve in curves)
        ends = [pick_series(lines, metric)[1][-1] for lines in runs["bfloat16"]]
        figures[f"{name}_bfloat16_mean"] = mean(ends)
        figures[f"{name}_bfloat16_gap_mean"] = mean([curve[-1] for curve in curves]) - mean(ends)
        figures[f"{name}_control_max"] = max(pick_series(lines, metric)[1][-1] for lines in runs["control"])
    figures["run_s_max"] = max(lines[-1]["time"] - lines[0]["time"] for lines in runs["rl"])
    return figures


def format_table(runs: dict[str, list[Lines]]) -> str:
    rows = [
        "| seed | sampled | greedy | bfloat16: sampled / greedy | control: sampled / greedy |",
        "|---|---|---|---|---|",
    ]
    for seed, lines in enumerate(runs["rl"]):
        cells = []
        for metric in METRICS.values():
            values = pick_series(lines, metric)[1]
            cells.append(f"{values[0]:.3f} -> {values[-1]:.3f}")
        for arm in ("bfloat16", "control"):
            ends = (pick_series(runs[arm][seed], metric)[1][-1] for metric in METRICS.values())
            cells.append(" / ".join(f"{end:.3f}" for end in ends))
        rows.append(f"| {seed} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
