"""Losses: one page each, chosen by name.

A page is a module with `token_loss` (the formula) and `sample_weights` (the normalisation). A new loss is a new page, a
line in `LOSSES` and its name in `config.LossName`.
"""

from shoal.config import LossName
from shoal.learner.losses import cispo, dapo, dr_grpo, grpo, gspo, intellect2
from shoal.learner.losses.base import Loss, LossInputs, LossOutput, sum_tokens

__all__ = ["LOSSES", "Loss", "LossInputs", "LossOutput", "load_loss", "sum_tokens"]

LOSSES: dict[LossName, Loss] = {
    "intellect2": intellect2,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
}


def load_loss(name: LossName) -> Loss:
    """The page of a name that the config has already checked."""
    return LOSSES[name]
