"""A learner in one process, the reference, and in several ranks: run by test_parallel.py.

parallel_program.py PLAN.json SIZE...     the plan has the cases by number of ranks; rank 0 writes results next to it
"""

import json
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shoal.config.run import LearnerConfig, LoraConfig, LossConfig
from shoal.launch.ranks import run_ranks
from shoal.learner import logprobs, parallel
from shoal.learner.learner import Learner
from shoal.learner.parallel import Ranks, join_ranks, leave_ranks, shard_model, whole_tensor
from shoal.policy.lora import attach_adapters, find_adapted
from shoal.rollout import Finish, Group, Rollout, Score, VersionRange

VOCABULARY = 64
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"arch": "llama", "num_key_value_heads": 4},
    "tied": {"arch": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "gqa": {"arch": "llama", "num_key_value_heads": 2},
    "qwen3": {"arch": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "hub": {"arch": "gpt_neox", "rotary_pct": 0.25},
}


def build_model(name: str) -> PreTrainedModel:
    """A random model far enough from uniform that gradients of every tensor are distinct."""
    shape = dict(SHAPES[name])
    config = AutoConfig.for_model(
        shape.pop("arch"),
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=None,
        **{"tie_word_embeddings": False} | shape,
    )
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model


def add_adapters(model: PreTrainedModel, rank: int) -> None:
    """Adapters whose B is not zero, so that A has a gradient too."""
    attach_adapters(model, LoraConfig(rank=rank), seed=0)
    rng = torch.Generator().manual_seed(6)
    for module in find_adapted(model).values():
        module.lora_B.data.copy_(0.05 * torch.randn(module.lora_B.shape, generator=rng))


def make_groups(count: int, vocabulary: int = VOCABULARY) -> list[Group]:
    """Groups of four rollouts of many lengths, with rewards that differ."""
    rng = np.random.default_rng(3)
    groups = []
    for index in range(count):
        prompt = rng.integers(4, vocabulary, int(rng.integers(3, 9)), dtype=np.int32)
        rollouts = tuple(
            Rollout(
                id=f"{index}.{sample}",
                prompt_ids=prompt,
                token_ids=rng.integers(4, vocabulary, length, dtype=np.int32),
                logprobs=rng.normal(-3, 0.5, length).clip(max=-0.1).astype(np.float32),
                finish=Finish.LENGTH,
                versions=(VersionRange(0, 0, length),),
                temperature=1.0,
                seed=sample,
            )
            for sample, length in enumerate(int(n) for n in rng.integers(2, 24, 4))
        )
        scores = tuple(Score(float(value), "") for value in rng.permutation([1.0, 0.5, 0.0, 0.0]))
        groups.append(Group(index=index, task_id=str(index), rollouts=rollouts, scores=scores))
    return groups


def run_case(case: dict[str, Any], ranks: Ranks) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights, the gradients of the last update, and metrics after one training step."""
    kl = float(case.get("kl", 0.0))
    logprobs.CHUNK_BYTES = case.get("chunk", 2**27)
    config = LearnerConfig(
        updates=case.get("updates", 1),
        warmup_steps=0,
        lr=1e-3,
        micro_tokens=case.get("micro", 60),
        max_grad_norm=case.get("clip", 1e9),
        precision=case.get("precision", "float32"),
        offload=case.get("offload", False) and ranks.mesh is not None,
        gradient_checkpointing=case.get("recompute", False),
        loss=LossConfig(kl=kl, entropy=0.001),
    )
    model, reference = build_model(case["model"]), build_model(case["model"]) if kl and "rank" not in case else None
    if "rank" in case:
        add_adapters(model, case["rank"])
    for own in filter(None, (model, reference)):
        shard_model(own, ranks, config)
    if case.get("averaged"):
        for module in model.modules():
            if isinstance(module, parallel.FSDPModule):
                module.set_gradient_divide_factor(float(ranks.size))
    learner = Learner(model, config, max_tokens=24, reference=reference, ranks=ranks)
    if case.get("poison"):
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1e36)
    metrics = learner.train_step(make_groups(case.get("groups", 5)))
    tensors = {f"weight.{name}": whole_tensor(p.detach()).clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[f"grad.{name}"] = whole_tensor(parameter.grad).clone()
    return tensors, metrics


def run_plan(arguments: Sequence[str]) -> int:
    """In one process of its own, or in every rank: run all cases."""
    plan = Path(arguments[0])
    torch.set_num_threads(1)
    ranks = join_ranks("cpu")
    for name, case in json.loads(plan.read_text())[str(ranks.size)].items():
        tensors, metrics = run_case(case, ranks)
        everyone = ranks.gather(json.dumps(metrics).encode())
        if ranks.is_first:
            save_file(tensors, plan.parent / f"{name}-{ranks.size}.safetensors")
            (plan.parent / f"{name}-{ranks.size}.json").write_text(json.dumps([json.loads(part) for part in everyone]))
    leave_ranks(ranks)
    return 0


def main(plan: str, sizes: Sequence[str]) -> int:
    """Run the plan in each of these numbers of ranks, all forks of this process, which computes nothing."""
    alone = multiprocessing.get_context("fork").Process(target=run_plan, args=([plan],))
    alone.start()
    alone.join()
    return alone.exitcode or max(run_ranks(run_plan, [plan], int(size)) for size in sizes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
