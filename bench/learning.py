"""Learning by RL: the demo's run with three seeds, and the same compute spent on more demonstrations instead.

    python bench/learning.py [--quick] [--json]

Held-out pass rates, sampled and greedy, before and after. The control is fine-tuned three times as long, which costs
about as much as RL, without RL. Runs are single-threaded, two at a time; `make demo` gives all cores to one run.
"""

from common import SEEDS, Lines, finish, parse_flags, picture_path, run_arms
from shoal.train.report import draw_curves, pick_series

METRICS = {"sampled": "eval/pass_at_1", "greedy": "eval/greedy"}


def main() -> None:
    flags = parse_flags(__doc__.splitlines()[0])
    seeds, steps = (SEEDS[:1], 20) if flags.quick else (SEEDS, 60)
    arms = {"rl": [f"steps={steps}"], "control": ["steps=0", "sft.steps=750"]}
    runs = run_arms(arms, config="examples/sort.toml", seeds=seeds, tag=f"learning{steps}")
    if not flags.quick:
        draw_curves(picture_path("learning.png"), [(f"seed {seed}", runs["rl"][seed]) for seed in seeds])
    finish(flags, format_table(runs), collect_figures(runs))


def collect_figures(runs: dict[str, list[Lines]]) -> dict[str, float]:
    figures = {}
    for name, metric in METRICS.items():
        curves = [pick_series(lines, metric)[1] for lines in runs["rl"]]
        figures[f"{name}_gain_min"] = min(curve[-1] - curve[0] for curve in curves)
        figures[f"{name}_after_min"] = min(curve[-1] for curve in curves)
        figures[f"{name}_control_max"] = max(pick_series(lines, metric)[1][-1] for lines in runs["control"])
    figures["run_s_max"] = max(lines[-1]["time"] - lines[0]["time"] for lines in runs["rl"])
    return figures


def format_table(runs: dict[str, list[Lines]]) -> str:
    rows = ["| seed | sampled | greedy | control: sampled / greedy |", "|---|---|---|---|"]
    for seed, (lines, control) in enumerate(zip(runs["rl"], runs["control"], strict=True)):
        cells = []
        for metric in METRICS.values():
            values = pick_series(lines, metric)[1]
            cells.append(f"{values[0]:.3f} -> {values[-1]:.3f}")
        other = " / ".join(f"{pick_series(control, metric)[1][-1]:.3f}" for metric in METRICS.values())
        rows.append(f"| {seed} | {cells[0]} | {cells[1]} | {other} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
