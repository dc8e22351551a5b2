"""Verifiable choice of tokens: inverse CDF with one uniform per token.

The chosen token is the smallest j with CDF_j > u, over the whole vocabulary, in order of ids. A verifier that
recomputes the distribution can measure how far u is outside the interval of the submitted token.

Changing breaks: the seeded-sampling check of every validator.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Choose = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Logits (R, V), temperatures (R,) and uniforms (R,) to tokens and their log-probs. The honest one is below."""


def choose_tokens(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (R,) and their float32 log-probs under log-softmax(logits / temperature), from logits (R, V).

    Temperature 0 is greedy: the lowest id of the largest logit, with its log-prob at temperature 1.
    """
    greedy = temperatures == 0
    scaled = logits / torch.where(greedy, 1.0, temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    tokens = _invert_cdf(logprobs, uniforms)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _invert_cdf(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    cdf = logprobs.double().exp_().cumsum(-1)
    total = cdf[:, -1:]
    if not bool(total.isfinite().all()):
        raise FloatingPointError("logits are not finite: cannot sample from these weights")
    # The largest double below the total: a u that rounds up to the total would point past the last token.
    ceiling = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms[:, None] * total, ceiling)
    return torch.searchsorted(cdf, target, right=True)[:, 0]
