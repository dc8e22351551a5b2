"""Per-token terms added to the loss: KL to the reference policy, entropy. Both carry gradient.

They share the loss's sample weights: the optimizer step minimises sum_t w_s (c_t l_t + kl * k3_t - entropy * H_t),
where c_t is the off-policy correction of `learner/correction.py`.
"""

import torch
from torch import Tensor

from shoal.learner.losses.base import LOG_RATIO_BOUND


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 estimate of KL(pi || ref) per token sampled from pi: exp(d) - d - 1 with d = log ref - log pi.

    d is bounded above only, before exp. Below, exp(d) fades and the linear part has to keep its gradient, for that is a
    policy far from its reference; above the bound the gradient is zero (a token e^20 times less likely than under ref).
    """
    d = (ref_logprobs - logprobs).clamp(max=LOG_RATIO_BOUND)
    return d.exp() - d - 1


def entropy_from_logits(logits: Tensor) -> Tensor:
    """H = -sum_v p_v log p_v over the whole vocabulary, from finite logits [..., V] already divided by temperature."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1)
