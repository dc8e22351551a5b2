"""Shared by all losses: inputs, output, bounded ratio, sums over samples.

Shapes: T completion tokens of a micro-batch on one flat axis, S samples; `segment` maps token -> sample, so there is no
padding and no mask.

Invariants:

- old log-probs and advantages are finite before any loss sees them. A non-finite value is a bug upstream (untrusted
  behaviour log-probs are checked on arrival), so it fails an assertion here instead of spreading as NaN. The current
  log-probs may overflow in one pass: the gradient is then not finite and the learner skips the update;
- the log-ratio is bounded before exp, so ratios and losses are finite and a later zero weight is never multiplied by
  inf;
- the denominator is in `sample_weights`, fixed once over all samples of the optimizer step, never per micro-batch.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.config.run import LossConfig

LOG_RATIO_BOUND = 20.0
"""|log r| is clamped to this before exp: e^20 = 4.9e8 leaves float32 room for sums. Beyond it the gradient is zero."""


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite, where reading them is free; on a device the learner's own flag reports it."""
    return values.device.type != "cpu" or bool(torch.isfinite(values).all())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The tokens of one micro-batch. Samples are whole: no sample is split over two micro-batches."""

    logprobs: Tensor
    """[T] log pi_theta, float32 or wider, with gradient"""
    old_logprobs: Tensor
    """[T] log pi_old, the denominator of the ratio"""
    advantages: Tensor
    """[T] A, the same for all tokens of a sample"""
    segment: Tensor
    """[T] int64, sample of each token: 0 .. num_segments - 1"""
    num_segments: int

    def __post_init__(self) -> None:
        shapes = {tensor.shape for tensor in (self.logprobs, self.old_logprobs, self.advantages, self.segment)}
        assert len(shapes) == 1 and self.logprobs.dim() == 1, "per-token arrays differ in length"
        assert self.logprobs.dtype in (torch.float32, torch.float64), "log-probs must be float32 or wider"
        assert not (self.old_logprobs.requires_grad or self.advantages.requires_grad), "old log-probs carry gradient"
        assert is_finite(self.old_logprobs), "old_logprobs are not finite"
        assert is_finite(self.advantages), "advantages are not finite"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """Per-token results, to be minimised after weighting with `sum_tokens`."""

    token_loss: Tensor
    """[T] with gradient"""
    clipped: Tensor
    """[T] bool, where a bound is active and stops the gradient through the ratio (cispo: the weight was changed)"""
    ratio: Tensor
    """[T] detached"""


class Loss(Protocol):
    """A loss; the modules of this package implement it."""

    def token_loss(self, inputs: LossInputs, config: LossConfig) -> LossOutput:
        """Per-token loss l_t."""

    def sample_weights(self, lengths: Tensor, max_tokens: int) -> Tensor:
        """w_s [S] from completion lengths [S] of ALL samples of the optimizer step, on all ranks."""


def sum_tokens(token_loss: Tensor, weights: Tensor, segment: Tensor) -> Tensor:
    """sum_t w_{segment(t)} * l_t; summed over micro-batches and ranks it is the loss of the optimizer step."""
    return (weights[segment] * token_loss).sum()


def bound_ratio(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """r = exp(clamp(log r, -20, 20)), and a mask where the clamp is active and stops the gradient."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp(), log_ratio.abs() > LOG_RATIO_BOUND


def clip_ratio(log_ratio: Tensor, advantages: Tensor, config: LossConfig) -> LossOutput:
    """PPO's l = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), clipped where the second is the smaller."""
    ratio, bounded = bound_ratio(log_ratio)
    free = ratio * advantages
    clip = ratio.clamp(1 - config.eps_low, 1 + config.eps_high) * advantages
    return LossOutput(token_loss=-torch.minimum(free, clip), clipped=(clip < free) | bounded, ratio=ratio.detach())


def average_segments(values: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """[S] mean of the values [T] of each segment; 0 for a segment without tokens."""
    zeros = values.new_zeros(num_segments)
    sums, counts = zeros.index_add(0, segment, values), zeros.index_add(0, segment, torch.ones_like(values))
    return sums / counts.clamp(min=1)


def weigh_tokens(lengths: Tensor) -> Tensor:
    """Token mean: w_s = 1 / sum_s |o_s|."""
    return _fill_weights(lengths, _check_lengths(lengths).sum())


def weigh_sequences(lengths: Tensor) -> Tensor:
    """Mean over samples of their token means: w_s = 1 / (S |o_s|)."""
    return _fill_weights(lengths, len(lengths) * _check_lengths(lengths))


def weigh_budget(lengths: Tensor, max_tokens: int) -> Tensor:
    """A constant that does not depend on sample lengths: w_s = 1 / (S max_tokens)."""
    return _fill_weights(lengths, len(lengths) * max_tokens * torch.ones_like(_check_lengths(lengths)))


def _fill_weights(lengths: Tensor, denominator: Tensor) -> Tensor:
    return denominator.double().reciprocal().float().expand(lengths.shape).contiguous()


def _check_lengths(lengths: Tensor) -> Tensor:
    assert lengths.dim() == 1 and not lengths.is_floating_point(), "lengths must be one count per sample"
    assert (lengths >= 1).all(), "a sample without tokens has no mean"
    return lengths
