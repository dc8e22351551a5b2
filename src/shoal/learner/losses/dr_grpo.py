"""Dr. GRPO: GRPO without its two biases (arXiv 2503.20783).

    l_t = -min( r_t A,  clip(r_t, 1 - eps_low, 1 + eps_high) A )
    r_t = pi_theta(o_t) / pi_old(o_t),  A = reward - mean of the group

What differs from GRPO: no division by the sample's own length (which favours long wrong samples) and none by the
group's standard deviation (which favours groups that are nearly all right or all wrong). The second part is in the
advantage: use this loss with `advantage = "centred"`.

Normalisation: 1/(S max_tokens) sum_s sum_t with the constant completion limit max_tokens.
"""

from torch import Tensor

from shoal.config.run import LossConfig
from shoal.learner.losses.base import LossInputs, LossOutput, clip_ratio, weigh_budget


def token_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """l_t = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)."""
    return clip_ratio(inputs.logprobs - inputs.old_logprobs, inputs.advantages, config)


def sample_weights(lengths: Tensor, max_tokens: int) -> Tensor:
    """w_s = 1 / (S max_tokens)."""
    return weigh_budget(lengths, max_tokens)
