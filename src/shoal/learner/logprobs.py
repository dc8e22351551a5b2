"""Log-probs and entropy of given tokens under a model, and the KL and entropy terms of the loss.

The terms carry gradient and share the loss's sample weights: the optimizer step minimises
sum_t w_s (c_t l_t + kl * k3_t - entropy * H_t), where c_t is the off-policy correction of `learner/correction.py`.

Logits of T tokens over V words are T x V floats: 5 GB for 8,192 tokens of a vocabulary of 152,000, and several times
that with their gradients. Above `CHUNK_BYTES` they are computed for a chunk of tokens at a time, and again in the
backward pass; no tensor of T x V ever exists. Below it one chunk holds all tokens and autograd does the rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.learner.losses.base import LOG_RATIO_BOUND
from shoal.policy.decoder import apply_head, run_decoder
from shoal.policy.packing import Pack

CHUNK_BYTES = 2**27
"""Float32 logits computed at a time. A pass needs about three times as much: logits, their log-softmax, a product."""


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
    hidden = run_decoder(model, pack.token_ids, pack.positions, pack.attention, dtype=dtype).index_select(0, pack.rows)
    temperatures = pack.temperatures if pack.is_scaled else None
    return score_states(hidden, model.get_output_embeddings(), pack.targets, temperatures, entropy_grad=entropy_grad)


def is_chunked(hidden: Tensor, head: nn.Linear) -> bool:
    """Whether the logits of these states are computed for a chunk of tokens at a time."""
    return 4 * len(hidden) * head.out_features > CHUNK_BYTES


def score_states(
    hidden: Tensor, head: nn.Linear, targets: Tensor, temperatures: Tensor | None, *, entropy_grad: bool = False
) -> TokenScores:
    """Scores of the targets [T] from the states [T, W] that predict them; no temperatures are temperatures of 1."""
    if is_chunked(hidden, head):
        assert isinstance(head, nn.Linear), "an adapter of the head would be ignored"
        rows = max(1, CHUNK_BYTES // (4 * head.out_features))
        # Cast outside, so that the gradient is rounded where it is rounded for the parameters that FSDP2 has cast.
        weight = head.weight.to(hidden.dtype)
        bias = None if head.bias is None else head.bias.to(hidden.dtype)
        inputs = (hidden, weight, bias, targets, temperatures, rows, entropy_grad)
        return TokenScores(*_ChunkedScores.apply(*inputs))  # type: ignore[no-untyped-call]
    logits = apply_head(head, hidden)
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    logprobs = -F.cross_entropy(logits, targets, reduction="none")
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = entropy_from_logits(logits if entropy_grad else logits.detach())
    return TokenScores(logprobs, entropy)


class _ChunkedScores(torch.autograd.Function):
    """`score_states` for chunks of `rows` tokens; the backward pass computes the logits of each chunk again.

    With z logits / temperature, p = softmax(z), g and e the gradients of log p_target and of the entropy H:
    dz_v = g (1[v = target] - p_v) - e p_v (log p_v + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor | None,
        rows: int,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for part in _cut_rows(len(hidden), rows):
            scores = _score_words(hidden[part], weight, bias, _take(temperatures, part))
            logprobs[part] = scores.gather(1, targets[part, None])[:, 0]
            entropy[part] = -(scores.exp().mul_(scores)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, entropy)
        ctx.rows = rows
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        ctx.entropy_grad = entropy_grad
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, temperatures, entropy = ctx.saved_tensors
        need_hidden, need_weight, need_bias, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Sums over chunks in float32, whatever the type of the weights: bfloat16 would lose small addends.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        for part in _cut_rows(len(hidden), ctx.rows):
            scores = _score_words(hidden[part], weight, bias, _take(temperatures, part))
            own, spread = grads[0][part, None], grads[1][part, None] if ctx.entropy_grad else None
            slope = _differentiate(scores, own, spread, entropy[part, None], targets[part, None])
            if temperatures is not None:
                slope.div_(temperatures[part, None])
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = slope @ weight
            if grad_weight is not None and slope.dtype == grad_weight.dtype:
                grad_weight.addmm_(slope.t(), hidden[part])  # without a product of the size of the weight
            elif grad_weight is not None:
                grad_weight += slope.t() @ hidden[part]
            if grad_bias is not None:
                grad_bias += slope.sum(0, dtype=torch.float32)
        found = (grad_weight, weight), (grad_bias, bias)
        return grad_hidden, *(None if grad is None else grad.to(of.dtype) for grad, of in found), None, None, None, None


def _score_words(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor | None) -> Tensor:
    """log-softmax(logits / temperature) of one chunk, [rows, V]."""
    logits = F.linear(hidden, weight, bias).float()
    if temperatures is not None:
        logits.div_(temperatures[:, None])
    return torch.log_softmax(logits, dim=-1)


def _differentiate(scores: Tensor, own: Tensor, spread: Tensor | None, entropy: Tensor, targets: Tensor) -> Tensor:
    """dz of one chunk from its log-softmax, which is overwritten if the entropy has a gradient."""
    probs = scores.exp()
    if spread is None:
        return probs.mul_(-own).scatter_add_(1, targets, own)
    return scores.add_(entropy).mul_(spread).add_(own).mul_(probs).neg_().scatter_add_(1, targets, own)


def _cut_rows(num: int, rows: int) -> Iterator[slice]:
    return (slice(first, min(first + rows, num)) for first in range(0, num, rows))


def _take(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]
