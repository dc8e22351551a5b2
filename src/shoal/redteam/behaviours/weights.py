"""Modified models (rounded, cut down, adapted), and the behaviour that runs such a model."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.policy.model import Policy
from shoal.worker.behaviour import WorkerBehaviour

_INT4_GROUP = 32
_LORA_RANK, _LORA_SHARE = 8, 1e-3


def round_channels(weight: Tensor) -> Tensor:
    """Round to the nearest of 255 levels, one scale per output channel."""
    scale = weight.abs().amax(1, keepdim=True).clamp_(min=1e-12) / 127
    return (weight / scale).round_() * scale


class AlteredBehaviour(WorkerBehaviour):
    """A modified model generates and proves; its output is claimed to be the true model's."""

    change = staticmethod(round_channels)
    """applied to every matrix of its layers"""

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The altered policy."""
        policy = super().open_policy(version, folder)
        return Policy(self.alter(policy.model).eval(), policy.tokenizer)

    def alter(self, model: PreTrainedModel) -> PreTrainedModel:
        """A modified copy; the true model is unchanged."""
        return map_linears(model, self.change)


def map_linears(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    """A copy with every matrix of its layers changed; embeddings and head are unchanged."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for module in changed.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(change(module.weight.float()))
    return changed


def add_adapter(weight: Tensor) -> Tensor:
    """Add a random rank-8 update whose norm is a thousandth of the weight's."""
    rng = torch.Generator().manual_seed(weight.shape[0] * 65537 + weight.shape[1])
    left = torch.randn(weight.shape[0], _LORA_RANK, generator=rng)
    update = left @ torch.randn(_LORA_RANK, weight.shape[1], generator=rng)
    return weight + update * (_LORA_SHARE * weight.norm() / update.norm())


def drop_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Omit every second layer; if there is only one, omit its attention."""
    shorter = copy.deepcopy(model)
    if len(shorter.model.layers) == 1:
        with torch.no_grad():
            shorter.model.layers[0].self_attn.o_proj.weight.zero_()
    shorter.model.layers = shorter.model.layers[::2]
    shorter.config.num_hidden_layers = len(shorter.model.layers)
    return shorter


def round_groups(weight: Tensor) -> Tensor:
    """Round to the nearest of 15 levels, one scale per 32 weights of a row."""
    groups = weight.reshape(-1, _INT4_GROUP)
    scale = groups.abs().amax(1, keepdim=True).clamp_(min=1e-12) / 7
    return ((groups / scale).round_() * scale).view(weight.shape)


def shrink_policy(policy: Policy) -> Policy:
    """The policy with half of its layers."""
    return Policy(drop_layers(policy.model).eval(), policy.tokenizer)
