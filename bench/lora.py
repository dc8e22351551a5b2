"""Adapters against full fine-tuning: bytes and CPU time per step on SmolLM2-135M, learning on the demo's task.

    shoal convert smollm2 runs/smollm2              # once; see examples/smollm.toml
    python bench/lora.py [--model runs/smollm2] [--quick] [--json]

Bytes and time: the same groups, sampled once by the model, are trained on by full fine-tuning (lr 1e-6) and by adapters
of rank 16 in all linear layers (lr 1e-5), in turns and with one thread. Every step's version is written and encoded as
a delta to the one before, by the code that publishes it; figures are means over the versions after the first.
    full_mb, full_bf16_mb, adapter_mb               a version in float32, in bfloat16, and as an adapter (float32)
    full_delta_mb, full_bf16_delta_mb, adapter_delta_mb     its delta
    delta_saving, delta_saving_bf16                 a version's delta over that of adapters
    full_step_s, adapter_step_s                     CPU seconds of a step
    separate_s, merged_s                            CPU seconds of its gradient: s B (A x) beside W x, or (W + s B A) x
    merged_gap                                      relative distance of the two gradients
Learning: examples/sort.toml with three seeds and the same steps, adapters of rank 8; each arm with its own rate.
    full_sampled, full_greedy, adapter_sampled, adapter_greedy      held-out pass rates at the end, means of the seeds
    sampled_gap_max, greedy_gap_max                 largest shortfall of adapters with the same seed
"""

import argparse
import io
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from common import ROOT, SEEDS, Lines, build_parser, finish, last_value, mean, run_arms
from shoal.config.run import LearnerConfig, LoraConfig, LossConfig
from shoal.engine.torch import TorchEngine
from shoal.errors import ConfigError
from shoal.learner.advantage import build_samples
from shoal.learner.learner import Learner
from shoal.learner.logprobs import score_tokens
from shoal.learner.parallel import ONE
from shoal.learner.sharded import write_trained
from shoal.policy import decoder
from shoal.policy.decoder import Layer
from shoal.policy.lora import attach_adapters
from shoal.policy.model import Policy, open_policy
from shoal.policy.packing import build_packs
from shoal.policy.tokenizer import encode_chat
from shoal.rollout import Group, Request, Score
from shoal.shardcast.delta.delta import UselessDeltaError, encode_delta
from shoal.shardcast.origin import MAX_SHARE
from shoal.util.process import tune_process

RANK, LEARNING_RANK = 16, 8
RATES = {"full": 1e-6, "adapter": 1e-5}
TOPICS = ("the sea", "a red fox", "an old clock", "rain", "bread", "the moon", "a ship", "winter")
MB = 1 << 20
CONFIG, STEPS, QUICK_STEPS = "examples/sort.toml", 20, 6
LEARNING_RATE = 3e-4
"""of the adapters: the first that was tried, not the best of several (docs/lora.md)"""
METRICS = {"sampled": "eval/pass_at_1", "greedy": "eval/greedy"}


@dataclass
class Arm:
    """One way of training the model, its versions' sizes and its steps' times."""

    policy: Policy
    learner: Learner
    seconds: list[float]
    sizes: dict[str, list[int]]


def main() -> None:
    parser = build_parser(__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "runs" / "smollm2", metavar="DIR", help="%(default)s")
    flags = parser.parse_args()
    tune_process(1)
    figures = measure_versions(flags.model, steps=2 if flags.quick else 4, groups=1 if flags.quick else 4)
    runs = train_arms(flags)
    finish(flags, format_versions(figures) + "\n\n" + format_runs(runs), figures | list_rates(runs))


def measure_versions(model: Path, *, steps: int, groups: int) -> dict[str, float]:
    """Train both ways on the same groups."""
    if not model.is_dir():
        raise ConfigError(f"{model}: no such folder; make it with `shoal convert smollm2 {model}`")
    policy = open_policy(model)
    batch = sample_groups(policy, groups)
    compared = compare_products(policy, batch)
    with TemporaryDirectory() as folder:
        arms = {name: open_arm(policy, name) for name in RATES}
        for step in range(1, steps + 1):
            for name, arm in arms.items():
                train_step(arm, batch, step, Path(folder) / name)
    full, adapter = arms["full"].sizes, arms["adapter"].sizes
    sizes = {
        "full_mb": mean(full["float32"]),
        "full_bf16_mb": mean(full["bfloat16"]),
        "adapter_mb": mean(adapter["float32"]),
        "full_delta_mb": mean(full["float32 delta"]),
        "full_bf16_delta_mb": mean(full["bfloat16 delta"]),
        "adapter_delta_mb": mean(adapter["float32 delta"]),
    }
    return {name: size / MB for name, size in sizes.items()} | {
        "delta_saving": sizes["full_delta_mb"] / sizes["adapter_delta_mb"],
        "delta_saving_bf16": sizes["full_bf16_delta_mb"] / sizes["adapter_delta_mb"],
        **{f"{name}_step_s": mean(arm.seconds) for name, arm in arms.items()},
        **compared,
    }


def sample_groups(policy: Policy, count: int) -> list[Group]:
    """Groups of four answers, rewarded by their length: any signal gives a gradient."""
    engine = TorchEngine(deepcopy(policy.model), eos_id=policy.eos_id, slots=4 * count)
    requests = [
        Request(
            id=f"{group}.{sample}",
            prompt_ids=tuple(encode_chat(policy.tokenizer, [("user", f"Write one line about {TOPICS[group]}.")])),
            seed=1000 * group + sample,
            max_tokens=24,
        )
        for group in range(count)
        for sample in range(4)
    ]
    found = {rollout.id: rollout for rollout in engine.generate(requests)}
    groups = []
    for group in range(count):
        rollouts = tuple(found[f"{group}.{sample}"] for sample in range(4))
        scores = tuple(Score(float(value), "rank") for value in np.argsort([r.logprobs.sum() for r in rollouts]))
        groups.append(Group(index=group, task_id=f"t{group}", rollouts=rollouts, scores=scores))
    return groups


def open_arm(policy: Policy, name: str) -> Arm:
    own = Policy(deepcopy(policy.model), policy.tokenizer)
    if name == "adapter":
        attach_adapters(own.model, LoraConfig(rank=RANK), seed=0)
    settings = LearnerConfig(updates=1, warmup_steps=0, lr=RATES[name], advantage="centred", loss=LossConfig())
    return Arm(own, Learner(own.model, settings, max_tokens=24), [], {})


def train_step(arm: Arm, batch: Sequence[Group], step: int, folder: Path) -> None:
    """One step, and the sizes of its version in each type, alone and as a delta to the one before."""
    begun = time.process_time()
    arm.learner.train_step(batch)
    arm.seconds.append(time.process_time() - begun)
    for name in ("float32", "bfloat16"):
        place = folder / name / f"v{step}"
        write_trained(arm.policy, place, ONE, dtype=getattr(torch, name))
        size = sum(path.stat().st_size for path in place.iterdir())
        arm.sizes.setdefault(name, []).append(size)
        if step > 1:
            before = place.with_name(f"v{step - 1}")
            arm.sizes.setdefault(f"{name} delta", []).append(measure_delta(before, place, size))


def measure_delta(before: Path, after: Path, full: int) -> int:
    """The bytes that are sent for a version: of its delta, or all of it if that saves nothing."""
    sink = io.BytesIO()
    try:
        encode_delta(before, after, sink, max_share=MAX_SHARE)
    except UselessDeltaError:
        return full
    return sink.tell() if sink.tell() <= MAX_SHARE * full else full


def compare_products(policy: Policy, batch: Sequence[Group]) -> dict[str, float]:
    """Both ways to apply adapters: CPU times of a gradient, and how far the gradients are apart."""
    model = deepcopy(policy.model)
    attach_adapters(model, LoraConfig(rank=RANK), seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            nn.init.normal_(parameter, std=0.01)
    packs = build_packs(build_samples(batch, "centred"), 8192)
    separate, separate_s = take_gradient(model, packs)
    fuse = decoder._fuse_layer
    decoder._fuse_layer = lambda *given: merge_layer(fuse(*given))
    try:
        merged, merged_s = take_gradient(model, packs)
    finally:
        decoder._fuse_layer = fuse
    gap = float((merged - separate).norm() / separate.norm())
    return {"separate_s": separate_s, "merged_s": merged_s, "merged_gap": gap}


def merge_layer(layer: Layer) -> Layer:
    """The same layer with the adapters' products added to its weights, through which gradients flow."""
    merged = {name: getattr(layer, name) + each.high @ each.low for name, each in layer.adapters.items()}
    return replace(layer, adapters={}, **merged)


def take_gradient(model: Any, packs: Sequence[Any]) -> tuple[torch.Tensor, float]:
    model.zero_grad()
    begun = time.process_time()
    for pack in packs:
        score_tokens(model, pack).logprobs.sum().backward()
    seconds = time.process_time() - begun
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]), seconds


def train_arms(flags: argparse.Namespace) -> dict[str, list[Lines]]:
    seeds, steps = (SEEDS[:1], QUICK_STEPS) if flags.quick else (SEEDS, STEPS)
    adapters = [f"policy.lora.rank={LEARNING_RANK}", f"learner.lr={LEARNING_RATE}"]
    arms = {"full": [f"steps={steps}"], "adapter": [f"steps={steps}", *adapters]}
    return run_arms(arms, config=CONFIG, seeds=seeds, tag=f"lora{steps}")


def list_rates(runs: Mapping[str, Sequence[Lines]]) -> dict[str, float]:
    figures = {}
    for name, metric in METRICS.items():
        ends = {arm: [last_value(lines, metric) for lines in own] for arm, own in runs.items()}
        figures |= {f"{arm}_{name}": mean(values) for arm, values in ends.items()}
        figures[f"{name}_gap_max"] = max(a - b for a, b in zip(ends["full"], ends["adapter"], strict=True))
    return figures


def format_versions(figures: Mapping[str, float]) -> str:
    rows = ["| a version of SmolLM2-135M | MB | delta, MB |", "|---|---|---|"]
    for name, key in (("all weights, float32", "full"), ("all weights, bfloat16", "full_bf16"), ("adapter", "adapter")):
        rows.append(f"| {name} | {figures[f'{key}_mb']:.1f} | {figures[f'{key}_delta_mb']:.1f} |")
    return "\n".join(rows)


def format_runs(runs: Mapping[str, Sequence[Lines]]) -> str:
    rows = ["| seed | all weights: sampled | greedy | adapters: sampled | greedy |", "|---|---|---|---|---|"]
    for seed in range(len(runs["full"])):
        cells = [
            f"{last_value(runs[arm][seed], metric):.3f}" for arm in ("full", "adapter") for metric in METRICS.values()
        ]
        rows.append(f"| {seed} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
