"""Architectures that run through transformers' own forward: a training step with the gradients of their own loss."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.config.run import LearnerConfig
from shoal.errors import ConfigError
from shoal.learner.advantage import build_samples
from shoal.learner.learner import Learner
from shoal.learner.logprobs import score_tokens
from shoal.policy.compatibility import check_model
from shoal.policy.decoder import is_lean
from shoal.policy.packing import build_packs
from shoal.rollout import Group

MakeModel = Callable[..., PreTrainedModel]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gemma": {"num_key_value_heads": 1, "head_dim": 8},
    "phi": {"num_key_value_heads": 2},  # a head with a bias
    "olmo2": {"num_key_value_heads": 2},
    "gpt_neox": {},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, make_model: MakeModel) -> PreTrainedModel:
    model = make_model(request.param, **ARCHITECTURES[request.param])
    check_model(model)
    assert not is_lean(model)
    return model


def differentiate_alone(model: PreTrainedModel, groups: list[Group]) -> dict[str, Tensor]:
    """Gradients of the mean negative log-prob, each sample by itself through transformers."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    total = sum(rollout.num_tokens for rollout in rollouts)
    model.zero_grad()
    for rollout in rollouts:
        prompt, tokens = (torch.from_numpy(ids).long() for ids in (rollout.prompt_ids, rollout.token_ids))
        labels = torch.cat((torch.full_like(prompt, -100), tokens))
        output = model(input_ids=torch.cat((prompt, tokens))[None], labels=labels[None])
        (output.loss * len(tokens) / total).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("micro_tokens", [30, 10_000])
def test_gradients_are_those_of_transformers_own_loss(
    model: PreTrainedModel, groups: list[Group], micro_tokens: int
) -> None:
    expected = differentiate_alone(model, groups)
    packs = build_packs(build_samples(groups, "zscore"), micro_tokens)
    total = sum(len(pack.targets) for pack in packs)
    model.zero_grad()
    for pack in packs:
        (-score_tokens(model, pack).logprobs.sum() / total).backward()
    for name, parameter in model.named_parameters():
        difference = (parameter.grad - expected[name]).norm() / expected[name].norm()
        assert difference < 1e-5, (name, difference)


def test_a_training_step_with_recomputed_layers_gives_the_same_weights(
    model: PreTrainedModel, groups: list[Group]
) -> None:
    learners = [
        Learner(copy.deepcopy(model), LearnerConfig(gradient_checkpointing=recompute, micro_tokens=40), max_tokens=12)
        for recompute in (False, True)
    ]
    first, second = (learner.train_step(groups) for learner in learners)
    assert first == second and first["optim/skipped"] == 0 and first["optim/grad_norm"] > 0
    for before, ours, theirs in zip(model.parameters(), *(x.model.parameters() for x in learners), strict=True):
        assert torch.equal(ours, theirs) and not torch.equal(ours, before)


def test_flex_attention_on_the_cpu_is_refused(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match="no backward pass on the CPU"):
        Learner(make_model("llama"), LearnerConfig(attention="flex"), max_tokens=8)


def test_offload_in_a_plain_process_is_refused_rather_than_ignored(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"learner.offload: .*add --nproc 1"):
        Learner(make_model("llama"), LearnerConfig(offload=True), max_tokens=8)
