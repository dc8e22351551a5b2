"""Memory of one training step on one sample of 1,024 to 32,768 tokens, with and without recomputed layers and chunks.

    python bench/context.py [--quick] [--json]      # half an hour; --quick up to 4,096 tokens, two minutes

A Llama of 4 layers and width 64 with a vocabulary of 4,096 words, in float32, in one process with one thread. The
sample's prompt is an eighth of it. Each figure is a process of its own: the growth of its peak resident memory during
the forward and backward pass of one micro-batch, compared with the formula of docs/memory.md. Up to 8,192 tokens all
logits fit into one chunk.

    long_mb           measured at the longest context, with recomputed layers and chunks
    long_plain_mb     the same without either
    recompute_ratio   memory without recomputed layers over that with them, both with chunks, at the longest context
    recompute_time    CPU time with recomputed layers over that without, there
    error             largest difference between formula and measurement from 4,096 tokens, as a share of the latter
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common import finish, parse_flags
from shoal.learner import logprobs
from shoal.policy.decoder import LayerOptions, set_layer_options
from shoal.policy.packing import Sample, build_packs
from shoal.rollout import Finish, Rollout, VersionRange

LENGTHS, QUICK_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768), (1024, 4096)
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 4096,
}
JUDGED = 4096
"""tokens from which the formula is compared: below, the memory that torch itself takes is a large part"""
MB = 2**20


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run the step."""

    length: int
    recompute: bool
    chunks: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """What a process of one arm reports."""

    arm: Arm
    peak_bytes: int
    cpu_s: float


def predict_bytes(arm: Arm) -> float:
    """Growth of memory by docs/memory.md, in float32."""
    width, forward, layers = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_hidden_layers"]
    heads, kv_heads, words = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["vocab_size"]
    dim = width // heads
    tokens, scored = arm.length, arm.length - arm.length // 8
    kept = 4 * width + 3 * forward + (4 * heads + 3 * kv_heads) * dim + 2
    fused = width * ((heads + 2 * kv_heads) * dim + 2 * forward)
    matrices = fused + width * (heads * dim + forward)
    if arm.recompute:
        states, layer = layers * tokens * width, tokens * kept + fused
    else:
        states, layer = layers * (tokens * kept + fused), 0
    # Backward of one layer: gradients of the feed-forward part, or of a strip's scores.
    working = max(tokens * (5 * forward + 3 * width), 3 * 64 * heads * tokens)
    logits = scored * words
    if arm.chunks and 4 * logits > logprobs.CHUNK_BYTES:
        head = 3 * logprobs.CHUNK_BYTES // 4
    else:
        head = 5 * logits
    head += 2 * scored * width + words * width
    gradients = layers * matrices + 2 * words * width
    return 4 * (states + max(head, layer + working) + gradients)


def list_arms(length: int) -> list[Arm]:
    """The ways that differ at this length."""
    chunked = 4 * (length - length // 8) * SHAPE["vocab_size"] > logprobs.CHUNK_BYTES
    return [
        Arm(length, recompute, chunks)
        for chunks in ((True, False) if chunked else (True,))
        for recompute in (False, True)
    ]


def run_arm(arm: Arm) -> Measured:
    """Run one arm in a process of its own."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    text = json.dumps([arm.length, arm.recompute, arm.chunks])
    done = subprocess.run(
        [sys.executable, __file__, "--arm", text], env=environment, capture_output=True, text=True, check=True
    )
    measured = Measured(arm, *json.loads(done.stdout.splitlines()[-1]))
    print(measured, file=sys.stderr, flush=True)
    return measured


def train_once(arm: Arm) -> tuple[int, float]:
    """Growth of peak memory and CPU seconds of one forward and backward pass; in the process of the arm."""
    torch.set_num_threads(1)
    config = AutoConfig.for_model("llama", max_position_embeddings=max(LENGTHS), tie_word_embeddings=False, **SHAPE)
    model = AutoModelForCausalLM.from_config(config)
    set_layer_options(model, LayerOptions(recompute=arm.recompute))
    if not arm.chunks:
        logprobs.CHUNK_BYTES = 2**62
    _step(model, 256)  # what torch allocates once
    model.zero_grad(set_to_none=True)
    before, begun = _resident_bytes(), time.process_time()
    _reset_peak()
    _step(model, arm.length)
    return _peak_bytes() - before, time.process_time() - begun


def _step(model: Any, length: int) -> None:
    rng = np.random.default_rng(0)
    prompt, tokens = np.split(rng.integers(0, SHAPE["vocab_size"], length + 1, dtype=np.int32), [length // 8])
    rollout = Rollout(
        id="long",
        prompt_ids=prompt,
        token_ids=tokens,
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        finish=Finish.LENGTH,
        versions=(VersionRange(0, 0, len(tokens)),),
        temperature=1.0,
        seed=0,
    )
    (pack,) = build_packs([Sample(0, rollout, 1.0)], length)
    logprobs.score_tokens(model, pack).logprobs.mean().backward()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _reset_peak() -> None:
    """Let the kernel count the peak from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def list_figures(found: Sequence[Measured]) -> dict[str, float]:
    """Named figures."""
    longest = max(measured.arm.length for measured in found)
    by_arm = {measured.arm: measured for measured in found}
    lean, plain = by_arm[Arm(longest, True, True)], by_arm[next(arm for arm in reversed(by_arm) if not arm.recompute)]
    kept = by_arm[Arm(longest, False, True)]
    judged = [measured for measured in found if measured.arm.length >= JUDGED]
    return {
        "long_mb": lean.peak_bytes / MB,
        "long_plain_mb": plain.peak_bytes / MB,
        "recompute_ratio": kept.peak_bytes / lean.peak_bytes,
        "recompute_time": lean.cpu_s / kept.cpu_s,
        "error": max(abs(predict_bytes(m.arm) / m.peak_bytes - 1) for m in judged),
    }


def format_table(found: Sequence[Measured]) -> str:
    """One line per length and way."""
    lines = ["| tokens | layers recomputed | chunks | measured MB | formula MB | CPU s |", "|---" * 6 + "|"]
    for measured in found:
        arm = measured.arm
        ways = " | ".join("yes" if way else "no" for way in (arm.recompute, arm.chunks))
        sizes = f"{measured.peak_bytes / MB:,.0f} | {predict_bytes(arm) / MB:,.0f} | {measured.cpu_s:.1f}"
        lines.append(f"| {arm.length:,} | {ways} | {sizes} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print; with `--arm` as the process of one arm."""
    if sys.argv[1:2] == ["--arm"]:
        print(json.dumps(train_once(Arm(*json.loads(sys.argv[2])))))
        return
    flags = parse_flags(__doc__ or "")
    found = [run_arm(arm) for length in (QUICK_LENGTHS if flags.quick else LENGTHS) for arm in list_arms(length)]
    finish(flags, format_table(found), list_figures(found))


if __name__ == "__main__":
    main()
