"""DAPO: decoupled clip and token-level mean (arXiv 2503.14476).

    l_t = -min( r_t A,  clip(r_t, 1 - eps_low, 1 + eps_high) A )
    r_t = pi_theta(o_t) / pi_old(o_t);  paper: eps_low = 0.2, eps_high = 0.28

What differs from GRPO: more room above 1 than below, so that unlikely tokens can grow, and all tokens count the same.
The values come from the config, so set eps_high = 0.28. The paper's dynamic sampling is `learner/filter.py`; it has no
KL term.

Normalisation: mean over all tokens of the optimizer step (the paper prints it for one group).
"""

from torch import Tensor

from shoal.config.run import LossConfig
from shoal.learner.losses.base import LossInputs, LossOutput, clip_ratio, weigh_tokens


def token_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """l_t = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)."""
    return clip_ratio(inputs.logprobs - inputs.old_logprobs, inputs.advantages, config)


def sample_weights(lengths: Tensor, max_tokens: int) -> Tensor:
    """w_s = 1 / sum_s |o_s|."""
    return weigh_tokens(lengths)
