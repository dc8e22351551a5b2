"""Losses: one module each, chosen by name.

A loss module has `token_loss` (the formula) and `sample_weights` (the normalisation). A new loss is a new module, a
line in `LOSSES` and its name in `config.LossName`.
"""

from shoal.config.run import LossName
from shoal.learner.losses import cispo, dapo, dr_grpo, grpo, gspo, intellect2
from shoal.learner.losses.base import Loss

LOSSES: dict[LossName, Loss] = {
    "intellect2": intellect2,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
}
