"""AdamW with moments in the type that the settings name.

Moments in bfloat16 or int8 are torchao's, with a scale per block of 256 values for int8. They are for memory: 8 bytes
per parameter become 4 or 2. They are not bit-equal to float32 moments, and the update itself is computed in float32.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shoal.config.run import LearnerConfig
from shoal.errors import ConfigError


def build_optimizer(parameters: Iterable[nn.Parameter], config: LearnerConfig) -> torch.optim.Optimizer:
    """The optimizer of a learner."""
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "weight_decay": config.weight_decay,
    }
    if config.optimizer_state == "float32":
        return torch.optim.AdamW(parameters, **options)
    try:
        from torchao.optim import AdamW8bit, _AdamW
    except ImportError:
        text = f'{config.optimizer_state!r} needs torchao: pip install "shoal[lowbit]"'
        raise ConfigError(f"learner.optimizer_state: {text}") from None
    if config.optimizer_state == "int8":
        return AdamW8bit(parameters, **options)  # type: ignore[no-any-return]
    return _AdamW(parameters, **options, bf16_stochastic_round=False)  # type: ignore[no-any-return]
