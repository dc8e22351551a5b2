"""GRPO: PPO's clipped objective with group-relative advantages (arXiv 2402.03300).

    l_t = -min( r_t A,  clip(r_t, 1 - eps_low, 1 + eps_high) A )
    r_t = pi_theta(o_t) / pi_old(o_t)

Compared with the others: the original. Each sample counts the same, so a token of a long sample counts less than one of
a short sample. The paper has one eps for both sides: set eps_low = eps_high. Its KL term is `LossConfig.kl`.

Normalisation: 1/S sum_s 1/|o_s| sum_t.
"""

from torch import Tensor

from shoal.config.run import LossConfig
from shoal.learner.losses.base import LossInputs, LossOutput, clip_ratio, weigh_sequences


def token_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """l_t = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)."""
    return clip_ratio(inputs.logprobs - inputs.old_logprobs, inputs.advantages, config)


def sample_weights(lengths: Tensor, max_tokens: int) -> Tensor:
    """w_s = 1 / (S |o_s|)."""
    return weigh_sequences(lengths)
