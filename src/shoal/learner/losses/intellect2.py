"""INTELLECT-2: GRPO with a two-sided clip (arXiv 2505.07291).

    l_t = -min( min(r_t, delta) A,  clip(r_t, 1 - eps_low, 1 + eps_high) A )
    r_t = pi_theta(o_t) / pi_old(o_t),  delta > 1 + eps_high;  paper: eps = 0.2, delta = 4

What differs from GRPO: for A < 0 PPO's clip leaves r unbounded above, and one token with r = 100 makes a gradient
spike; delta bounds it. The bound is a clamp: a token with A < 0 and r > delta has the constant loss -delta A and
gradient zero, so it no longer pushes its probability down. Up to delta the gradient is that of r A.

Normalisation: mean over all tokens of the optimizer step (the paper prints a per-sequence mean but describes a
token-level loss, and its code divides by the batch's token count).
"""

import torch
from torch import Tensor

from shoal.config.run import LossConfig
from shoal.learner.losses.base import LossInputs, LossOutput, bound_ratio, weigh_tokens


def token_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """l_t = -min(min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A)."""
    ratio, bounded = bound_ratio(inputs.logprobs - inputs.old_logprobs)
    capped = ratio.clamp(max=config.delta) * inputs.advantages
    clip = ratio.clamp(1 - config.eps_low, 1 + config.eps_high) * inputs.advantages
    beyond = (ratio > config.delta) & (inputs.advantages < 0)
    clipped = (clip < capped) | beyond | bounded
    return LossOutput(token_loss=-torch.minimum(capped, clip), clipped=clipped, ratio=ratio.detach())


def sample_weights(lengths: Tensor, max_tokens: int) -> Tensor:
    """w_s = 1 / sum_s |o_s|."""
    return weigh_tokens(lengths)
