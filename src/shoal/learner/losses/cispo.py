"""CISPO: the weight is clipped, not the update (MiniMax-M1, arXiv 2506.13585).

    l_t = -sg( clip(r_t, 1 - eps_low, 1 + eps_high) ) A log pi_theta(o_t)
    r_t = pi_theta(o_t) / pi_old(o_t),  sg = stop-gradient

What differs from GRPO: every token keeps a gradient, -sg(clip(r)) A, also where PPO would drop it. PPO drops the rare
tokens that start a new line of thought. `clipped` therefore marks where the weight was changed, not where the gradient
is zero. The paper tunes only eps_high and leaves the lower side open: an eps_low close to 1 does that.

Normalisation: mean over all tokens of the optimizer step (the paper prints it for one group).
"""

from torch import Tensor

from shoal.config.run import LossConfig
from shoal.learner.losses.base import LossInputs, LossOutput, bound_ratio, weigh_tokens


def token_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """l_t = -sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi."""
    ratio, _ = bound_ratio((inputs.logprobs - inputs.old_logprobs).detach())
    weight = ratio.clamp(1 - config.eps_low, 1 + config.eps_high)
    loss = -weight * inputs.advantages * inputs.logprobs
    return LossOutput(token_loss=loss, clipped=weight != ratio, ratio=ratio)


def sample_weights(lengths: Tensor, max_tokens: int) -> Tensor:
    """w_s = 1 / sum_s |o_s|."""
    return weigh_tokens(lengths)
