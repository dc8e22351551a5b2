"""Log-probs of given tokens under a model: the one place where learner, reference and validator compute them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from shoal.learner.sample import Pack
from shoal.learner.terms import entropy_from_logits
from shoal.policy.decoder import compute_logits, run_decoder


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Float32, per completion token [T]."""

    logprobs: Tensor
    entropy: Tensor


def score_tokens(model: PreTrainedModel, pack: Pack, *, entropy_grad: bool = False) -> TokenScores:
    """log-softmax(logits / temperature) of each completion token, and the distribution's entropy."""
    hidden = run_decoder(model, pack.token_ids, pack.positions, pack.attention)
    logits = compute_logits(model, hidden.index_select(0, pack.rows))
    if bool((pack.temperatures != 1).any()):
        logits = logits / pack.temperatures[:, None]
    logprobs = -F.cross_entropy(logits, pack.targets, reduction="none")
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = entropy_from_logits(logits if entropy_grad else logits.detach())
    return TokenScores(logprobs, entropy)
