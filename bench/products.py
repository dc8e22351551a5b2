"""Speed of one core in a model's matrix products: few rows as in generation, many as in checking.

    python bench/products.py [--json]     # takes seconds

Decoding n rollouts concurrently multiplies n rows at a time, replaying them thousands. The quotient of both speeds is
the minimum cost of a replay as a share of generation if there were only matrix products. Attention over earlier
tokens, which only generation has to read again for every token, lowers it.
"""

import argparse
import time

import torch
import torch.nn.functional as F

from common import finish, parse_flags
from shoal.config.run import PolicyConfig, TinyConfig
from shoal.policy.decoder import Layer, fuse_layers
from shoal.policy.model import load_policy
from shoal.tasks.families.sort import Sort
from shoal.util.process import tune_process

LONG, ROWS = 2048, (1, 8, 64, 256, 2048)
"""rows of a prefill's products, and the row counts to report"""
WIDTHS = (128, 256, 576, 1024)
ENOUGH = 5e8
"""FLOPs of one measurement"""


def count_weights(layer: Layer) -> int:
    """Number of weights in a layer's matrices."""
    return sum(weight.numel() for weight in (layer.qkv, layer.out, layer.gate_up, layer.down))


@torch.inference_mode()
def measure_speed(layer: Layer, rows: int) -> float:
    """FLOP/s of this core in the products of one layer with that many rows; the best of five."""
    wide, inner = torch.randn(rows, layer.out.shape[0]), torch.randn(rows, layer.down.shape[1])
    flops = 2.0 * rows * count_weights(layer)
    repeats, best = max(1, round(ENOUGH / flops)), 0.0
    for _ in range(5):
        begun = time.process_time()
        for _ in range(repeats):
            for weight in (layer.qkv, layer.out, layer.gate_up):
                F.linear(wide, weight)
            F.linear(inner, layer.down)
        best = max(best, repeats * flops / (time.process_time() - begun))
    return best


def print_speeds(flags: argparse.Namespace) -> None:
    """Print this core's speed in products with few rows (generation) and with many (checking)."""
    lines = ["| width | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |", "|---" * (len(ROWS) + 1) + "|"]
    figures = {}
    for width in WIDTHS:
        tiny = TinyConfig(layers=1, width=width, heads=width // 32, kv_heads=width // 64, context=1024)
        layer = fuse_layers(load_policy(PolicyConfig(tiny=tiny), alphabet=Sort().alphabet, seed=5).model)[0]
        speeds = [measure_speed(layer, rows) / 1e9 for rows in ROWS]
        lines.append(f"| {width} | " + " | ".join(f"{speed:.0f}" for speed in speeds) + " |")
        figures |= {f"gflops_{width}_{rows}": speed for rows, speed in zip(ROWS, speeds, strict=True)}
    finish(flags, "\n".join(lines), figures)


def main() -> None:
    """Measure and print."""
    flags = parse_flags(__doc__ or "")
    tune_process(1)
    print_speeds(flags)


if __name__ == "__main__":
    main()
