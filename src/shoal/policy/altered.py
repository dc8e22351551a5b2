"""Altered copies of a model: rounded to fewer bits, with an adapter merged in, or one optimizer step away.

They are what a cheat may run in place of the true weights. Calibration measures how well the checks tell them from the
true ones, validators compare work with some of them (toploc/rivals.py), and the red team runs them.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

GROUP = 32
"""weights that share a scale where a row is rounded in groups"""
LORA_RANK, LORA_SHARE = 8, 1e-3


def map_linears(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    """A copy with every matrix of its layers changed; embeddings and head are unchanged."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for module in changed.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(change(module.weight.float()))
    return changed


def round_channels(weight: Tensor) -> Tensor:
    """Round to the nearest of 255 levels, one scale per output channel."""
    return _round_rows(weight, 127)


def round_groups(weight: Tensor, levels: int = 7) -> Tensor:
    """Round to the nearest of 2 `levels` + 1 levels, one scale per 32 weights of a row, or per row if that is odd."""
    if weight.shape[1] % GROUP:
        return _round_rows(weight, levels)
    return _round_rows(weight.reshape(-1, GROUP), levels).view(weight.shape)


def round_bytes(weight: Tensor) -> Tensor:
    """Round to the nearest of 255 levels, one scale per 32 weights of a row."""
    return round_groups(weight, 127)


def add_adapter(weight: Tensor, share: float = LORA_SHARE) -> Tensor:
    """Add a random rank-8 update whose norm is a share of the weight's, by default a thousandth."""
    rng = torch.Generator().manual_seed(weight.shape[0] * 65537 + weight.shape[1])
    left = torch.randn(weight.shape[0], LORA_RANK, generator=rng)
    update = left @ torch.randn(LORA_RANK, weight.shape[1], generator=rng)
    return weight + update * (share * weight.norm() / update.norm())


def shift_weights(model: PreTrainedModel, size: float) -> PreTrainedModel:
    """A copy in which every weight moved by `size` in a random direction: as far as one step of Adam with that rate.

    A real step moves along a gradient and changes the output more, so what is found of this is found of a real one.
    """
    rng = torch.Generator().manual_seed(1)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.copy_(weight.float() + size * torch.randn(weight.shape, generator=rng).sign())
    return moved


def _round_rows(weight: Tensor, levels: int) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True).clamp_(min=1e-12) / levels
    return (weight / scale).round_() * scale
