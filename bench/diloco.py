"""DiLoCo compared with data parallelism, one worker, and variants of itself: loss and bytes, from one warm start, on
several seeds.

    python bench/diloco.py                  the main table, 3 seeds
    python bench/diloco.py --ablations      and the single-seed variations
    python bench/diloco.py --large          four arms at 1.27M parameters, the common rate, one seed, 500 + 1,500 steps
    python bench/diloco.py --quick --json   a third of the steps, one seed

A Llama-like model of 0.11M parameters reads characters of Python's standard library. 600 steps of ordinary training by
one worker, then 1,400 steps of each arm with 4 workers of 8 x 64 characters. The learning rates of the tuned arms and
the tuned outer rule were chosen on seed 11, which is not evaluated (`bench/diloco_sweep.py`). Results are kept in
bench/out/diloco, so an interrupted benchmark resumes. Utilisation is measured by `bench/diloco_net.py`.
"""

import argparse
import math
import os
from collections.abc import Collection
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from common import OUT, build_parser, finish
from diloco_arms import Arm, Size, train_arm
from diloco_model import Shape
from diloco_net import measure_utilisation
from diloco_processes import make_context

DDP_LR = 1e-2
TUNED = {"lr": 6e-3, "eta": 1.0, "mu": 0.8, "fade": 8}
MAIN = [
    Arm("one worker", "single"),
    Arm("data parallel", "ddp"),
    Arm("data parallel tuned", "ddp", lr=DDP_LR),
    Arm("diloco fp32", "diloco"),
    Arm("diloco fp16", "diloco", codec="fp16"),
    Arm("diloco int4", "diloco", codec="int4"),
    Arm("diloco tuned fp32", "diloco", **TUNED),
    Arm("diloco tuned int4", "diloco", codec="int4", **TUNED),
]
ABLATIONS = [
    Arm("diloco int4 tuned outer", "diloco", codec="int4", **{**TUNED, "lr": Arm("", "").lr}),
    Arm("diloco int8", "diloco", codec="int8"),
    Arm("diloco topk", "diloco", codec="topk"),
    Arm("diloco H=25", "diloco", interval=25),
    Arm("diloco H=100", "diloco", interval=100),
    Arm("diloco tuned H=25", "diloco", interval=25, **TUNED),
    Arm("diloco tuned H=100", "diloco", interval=100, **TUNED),
    Arm("diloco 1 worker", "diloco", workers=1),
    Arm("diloco 2 workers", "diloco", workers=2),
    Arm("diloco 8 workers", "diloco", workers=8),
    Arm("diloco average", "diloco", rule="average"),
    Arm("diloco momentum 0", "diloco", mu=0.0),
    Arm("diloco momentum 0.6", "diloco", mu=0.6),
    Arm("diloco momentum 0.8", "diloco", mu=0.8),
    Arm("diloco eta 0.5", "diloco", eta=0.5),
    Arm("diloco eta 1", "diloco", eta=1.0),
    Arm("diloco 2 fragments", "diloco", fragments=2),
    Arm("diloco delay 10", "diloco", delay=10),
    Arm("diloco delay 10 alpha 0.5", "diloco", delay=10, alpha=0.5),
    Arm("diloco 2 fragments delay 10", "diloco", fragments=2, delay=10),
    Arm("diloco shards apart", "diloco", shards="apart"),
    Arm("diloco trimmed", "diloco", guard="trimmed"),
    Arm("diloco sign flipped, mean", "diloco", evil=-1.0),
    Arm("diloco sign flipped, trimmed", "diloco", evil=-1.0, guard="trimmed"),
    Arm("diloco x -5, trimmed", "diloco", evil=-5.0, guard="trimmed"),
    Arm("cold data parallel", "ddp", cold=True),
    Arm("cold diloco", "diloco", cold=True),
    Arm("cold diloco ramp", "diloco", cold=True, ramp=10),
    Arm("cold diloco average", "diloco", cold=True, rule="average"),
]
QUICK = Size(warm=300, steps=400, held_out=512)
LARGE = Size(warm=500, steps=1500, shape=Shape(width=160, layers=4, heads=4, hidden=432))
LARGE_ARMS = ("one worker", "data parallel", "diloco int4", "diloco int4 tuned outer")

Found = dict[str, list[dict[str, Any]]]


def main() -> None:
    """Train what is missing, and print the table."""
    flags = parse_flags()
    torch.set_num_threads(1)
    if flags.large:
        found = train_arms(select_arms([*MAIN, *ABLATIONS], flags.only or LARGE_ARMS), LARGE, flags.seeds or [5])
        finish(flags, format_table(found), {} if flags.only else find_large(found))
        return
    size = QUICK if flags.quick else Size()
    seeds = flags.seeds or ([5] if flags.quick else [5, 6, 7])
    found = train_arms(select_arms(MAIN, flags.only), size, seeds)
    if flags.ablations:
        found |= train_arms(select_arms(ABLATIONS, flags.only), size, seeds[:1])
    if flags.only:
        finish(flags, format_table(found), {})
        return
    if flags.picture:
        from diloco_chart import draw_curves

        draw_curves(found, "diloco.png")
    _, overlapped = measure_utilisation(make_context(), 4)
    finish(flags, format_table(found), find_figures(found) | {"utilisation": overlapped})


def parse_flags() -> argparse.Namespace:
    """The flags of every benchmark, and the selection of arms and seeds."""
    parser = build_parser("DiLoCo and data parallelism: loss and bytes")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="seeds of the workers' data (default: 5 6 7)")
    parser.add_argument("--ablations", action="store_true", help="also the variations, on the first seed")
    parser.add_argument("--large", action="store_true", help="instead, run four arms at 1.27M parameters, on seed 5")
    parser.add_argument("--only", nargs="+", metavar="ARM", help="only these arms, and no figures")
    parser.add_argument("--picture", action="store_true", help="draw docs/img/diloco.png")
    return parser.parse_args()


def train_arms(arms: list[Arm], size: Size, seeds: list[int]) -> Found:
    """Every arm on every seed."""
    found: Found = {}
    for seed in seeds:
        for arm in arms:
            found.setdefault(arm.name, []).append(train_arm(arm, size, seed, OUT / "diloco"))
    return found


def select_arms(arms: list[Arm], only: Collection[str] | None) -> list[Arm]:
    """The arms to train."""
    return [arm for arm in arms if only is None or arm.name in only]


def find_figures(found: Found) -> dict[str, float]:
    """The named figures: gaps are positive where DiLoCo is worse."""
    loss = {name: sum(run["loss"] for run in runs) / len(runs) for name, runs in found.items()}
    sent = {name: runs[0]["bytes"] for name, runs in found.items()}
    return {
        "loss_gap_to_ddp": loss["diloco int4"] - loss["data parallel"],
        "loss_gap_to_ddp_fp32": loss["diloco fp32"] - loss["data parallel"],
        "loss_gap_to_tuned_ddp": loss["diloco tuned int4"] - loss["data parallel tuned"],
        "loss_gap_to_tuned_ddp_fp32": loss["diloco tuned fp32"] - loss["data parallel tuned"],
        "gain_over_single": loss["one worker"] - loss["diloco int4"],
        "bytes_ratio_int4": sent["data parallel"] / sent["diloco int4"],
    }


def find_large(found: Found) -> dict[str, float]:
    """Share of data parallelism's gain over one worker that DiLoCo reaches, by the paper's outer rule and by ours."""
    loss = {name: runs[0]["loss"] for name, runs in found.items()}
    gain = loss["one worker"] - loss["data parallel"]
    return {
        "large_share_of_ddp": (loss["one worker"] - loss["diloco int4"]) / gain,
        "large_share_of_ddp_tuned_outer": (loss["one worker"] - loss["diloco int4 tuned outer"]) / gain,
    }


def format_table(found: Found) -> str:
    """One line per arm, in the columns of OpenDiLoCo's tables; perplexity is per character."""
    heads = ("arm", "syncs", "MB sent", "compute, data", "loss by seed", "mean", "perplexity", "CPU s")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, runs in found.items():
        arm, losses = Arm(**runs[0]["arm"]), [run["loss"] for run in runs]
        mean = sum(losses) / len(losses)
        cells = [
            name,
            str(runs[0]["syncs"]),
            f"{runs[0]['bytes'] / 1e6:.2f}",
            "1x" if arm.kind == "single" else f"{arm.workers}x",
            " ".join(f"{loss:.4f}" for loss in losses),
            f"{mean:.4f}",
            f"{math.exp(mean):.3f}",
            f"{sum(run['cpu_s'] for run in runs) / len(runs):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
