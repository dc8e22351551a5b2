"""What `learner.compile` gains: CPU seconds of a training pass with compiled layers and without, and of compiling.

    python bench/compiling.py [--quick] [--json]      # three minutes; --quick: the small model only

Forward and backward pass of one micro-batch of 4,096 tokens in 32 samples, float32, one thread. Passes alternate
between the two copies of a model. Gradients must agree, otherwise the figures are meaningless.

    small_ratio, large_ratio   time without compilation over that with it: width 128 (3 layers), width 512 (4 layers)
    compile_s                  seconds of the first compiled pass, most of which is compiling
"""

import copy
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common import finish, parse_flags
from shoal.learner.logprobs import score_tokens
from shoal.policy.decoder import LayerOptions, set_layer_options
from shoal.policy.packing import Pack, Sample, build_packs
from shoal.rollout import Finish, Rollout, VersionRange

SHAPES = {"small": (128, 3), "large": (512, 4)}
VOCABULARY, SAMPLES, LENGTH, PASSES = 100, 32, 128, 5
MOST_DIFFERENCE = 1e-4


@dataclass(frozen=True, slots=True)
class Measured:
    """One model."""

    name: str
    plain_s: float
    compiled_s: float
    compile_s: float
    difference: float
    """largest relative difference of a gradient"""


def build_model(width: int, layers: int) -> Any:
    """A random Llama with heads of 32."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def draw_pack() -> Pack:
    """Samples that share nothing."""
    rng = np.random.default_rng(0)
    rollouts = [
        Rollout(
            id=str(index),
            prompt_ids=rng.integers(0, VOCABULARY, 8, dtype=np.int32),
            token_ids=rng.integers(0, VOCABULARY, LENGTH - 7, dtype=np.int32),
            logprobs=np.zeros(LENGTH - 7, dtype=np.float32),
            finish=Finish.LENGTH,
            versions=(VersionRange(0, 0, LENGTH - 7),),
            temperature=1.0,
            seed=index,
        )
        for index in range(SAMPLES)
    ]
    samples = [Sample(index, rollout, 1.0) for index, rollout in enumerate(rollouts)]
    (pack,) = build_packs(samples, (LENGTH + 1) * SAMPLES)
    return pack


def run_pass(model: Any, pack: Pack) -> float:
    """CPU seconds of a forward and backward pass."""
    model.zero_grad(set_to_none=True)
    begun = time.process_time()
    score_tokens(model, pack).logprobs.mean().backward()
    return time.process_time() - begun


def measure(name: str, width: int, layers: int) -> Measured:
    """Alternate passes of both copies; the fastest of each counts."""
    pack, plain = draw_pack(), build_model(width, layers)
    compiled = copy.deepcopy(plain)
    set_layer_options(compiled, LayerOptions(compile=True))
    begun = time.perf_counter()
    run_pass(compiled, pack)
    compile_s = time.perf_counter() - begun
    run_pass(plain, pack)
    pairs = [(run_pass(plain, pack), run_pass(compiled, pack)) for _ in range(PASSES)]
    differences = [
        float((one.grad - other.grad).norm() / one.grad.norm())
        for one, other in zip(plain.parameters(), compiled.parameters(), strict=True)
    ]
    return Measured(name, min(pair[0] for pair in pairs), min(pair[1] for pair in pairs), compile_s, max(differences))


def main() -> None:
    """Measure and print."""
    flags = parse_flags(__doc__ or "")
    torch.set_num_threads(1)
    found = [measure(name, *shape) for name, shape in SHAPES.items() if not (flags.quick and name == "large")]
    if any(measured.difference > MOST_DIFFERENCE for measured in found):
        raise SystemExit(f"compiled gradients differ: {found}")
    lines = ["| model | plain s | compiled s | ratio | compiling s | difference |", "|---" * 6 + "|"]
    for m in found:
        cells = f"{m.plain_s:.3f} | {m.compiled_s:.3f} | {m.plain_s / m.compiled_s:.2f}x | {m.compile_s:.0f}"
        lines.append(f"| {m.name} | {cells} | {m.difference:.1e} |")
    figures = {f"{m.name}_ratio": m.plain_s / m.compiled_s for m in found} | {"compile_s": found[0].compile_s}
    finish(flags, "\n".join(lines), figures)


if __name__ == "__main__":
    main()
