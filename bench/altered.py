"""Models that are not quite the true one: rounded, cut down, adapted, or a step older."""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.config import LearnerConfig
from shoal.learner.learner import Learner
from shoal.rollout import Group, Rollout, Score
from stage import GROUP

_INT4_GROUP = 32
_LORA_RANK, _LORA_SHARE = 8, 1e-3
_WARM_STEPS = 3


def map_linears(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    """A copy with every matrix of its layers changed; embeddings and head stay."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for module in changed.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(change(module.weight.float()))
    return changed


def add_adapter(weight: Tensor) -> Tensor:
    """A random update of rank 8 whose norm is a thousandth of the weight's."""
    rng = torch.Generator().manual_seed(weight.shape[0] * 65537 + weight.shape[1])
    update = torch.randn(weight.shape[0], _LORA_RANK, generator=rng) @ torch.randn(
        _LORA_RANK, weight.shape[1], generator=rng
    )
    return weight + update * (_LORA_SHARE * weight.norm() / update.norm())


def drop_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Every second layer is left out."""
    shorter = copy.deepcopy(model)
    shorter.model.layers = shorter.model.layers[::2]
    shorter.config.num_hidden_layers = len(shorter.model.layers)
    return shorter


def round_channels(weight: Tensor) -> Tensor:
    """Nearest of 255 levels, one scale per output channel."""
    scale = weight.abs().amax(1, keepdim=True).clamp_(min=1e-12) / 127
    return (weight / scale).round_() * scale


def round_groups(weight: Tensor) -> Tensor:
    """Nearest of 15 levels, one scale per 32 weights of a row."""
    groups = weight.reshape(-1, _INT4_GROUP)
    scale = groups.abs().amax(1, keepdim=True).clamp_(min=1e-12) / 7
    return ((groups / scale).round_() * scale).view(weight.shape)


def step_back(model: PreTrainedModel, rollouts: Sequence[Rollout], rate: float) -> PreTrainedModel:
    """The weights before one AdamW step of RL.

    Some steps fill the optimizer's averages, for the very first one of Adam moves every weight by the whole rate; the
    step after them is then taken back from the given weights.
    """
    trained = copy.deepcopy(model).float()
    config = LearnerConfig(lr=rate, ramp=0, updates=1)
    learner = Learner(trained, config, max_tokens=max(rollout.num_tokens for rollout in rollouts))
    groups = [_score_group(index, rollouts[index * GROUP :][:GROUP]) for index in range(min(4, len(rollouts) // GROUP))]
    for turn in range(_WARM_STEPS):
        learner.train_step([groups[turn % len(groups)]])
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    learner.train_step([groups[_WARM_STEPS % len(groups)]])
    older = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in older.state_dict().items():
            tensor.copy_(tensor.float() - (trained.state_dict()[name] - before[name]))
    return older


def _score_group(index: int, rollouts: Sequence[Rollout]) -> Group:
    """A group with a reward that differs among its rollouts: shorter words, as the first tokens' ids have it."""
    order = np.argsort(np.argsort([int(rollout.token_ids[:32].sum()) for rollout in rollouts]))
    scores = tuple(Score(float(rank) / (len(rollouts) - 1), "rank") for rank in order)
    return Group(index=index, task_id=str(index), rollouts=tuple(rollouts), scores=scores)
