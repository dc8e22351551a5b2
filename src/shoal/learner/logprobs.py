"""Log-probs and entropy of given tokens under a model, and the KL and entropy terms of the loss.

The terms carry gradient and share the loss's sample weights: the optimizer step minimises
sum_t w_s (c_t l_t + kl * k3_t - entropy * H_t), where c_t is the off-policy correction of `learner/correction.py`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from shoal.learner.losses.base import LOG_RATIO_BOUND
from shoal.policy.decoder import compute_logits, run_decoder
from shoal.policy.packing import Pack


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 estimate of KL(pi || ref) per token sampled from pi: exp(d) - d - 1 with d = log ref - log pi.

    d is bounded only from above before exp. Below, exp(d) vanishes and the linear part must keep its gradient, because
    the policy is then far from its reference; above the bound the gradient is zero (a token e^20 times less likely than
    under ref).
    """
    d = (ref_logprobs - logprobs).clamp(max=LOG_RATIO_BOUND)
    return d.exp() - d - 1


def entropy_from_logits(logits: Tensor) -> Tensor:
    """H = -sum_v p_v log p_v over the whole vocabulary, from finite logits [..., V] already divided by temperature."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Float32, per completion token [T]."""

    logprobs: Tensor
    entropy: Tensor


def score_tokens(
    model: PreTrainedModel, pack: Pack, *, entropy_grad: bool = False, dtype: torch.dtype | None = None
) -> TokenScores:
    """log-softmax(logits / temperature) of each completion token, and the distribution's entropy.

    `dtype` is the type of the forward pass up to the logits (default: that of the weights).
    """
    hidden = run_decoder(model, pack.token_ids, pack.positions, pack.attention, dtype=dtype)
    logits = compute_logits(model, hidden.index_select(0, pack.rows))
    if pack.is_scaled:
        logits = logits / pack.temperatures[:, None]
    logprobs = -F.cross_entropy(logits, pack.targets, reduction="none")
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = entropy_from_logits(logits if entropy_grad else logits.detach())
    return TokenScores(logprobs, entropy)
