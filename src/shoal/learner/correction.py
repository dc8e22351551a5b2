"""Off-policy correction: rollouts came from the behaviour policy mu, the ratio is relative to the learner's pi_old.

    d_t = log pi_old(o_t) - log mu(o_t)
    token:     c_t = min(exp(d_t), cap)                            truncated importance sampling (Ionides 2008)
    sequence:  c_t = 1 if 1/cap <= exp(mean_t d_t) <= cap else 0   mean over the token's sample
    none:      c_t = 1

pi_old is the learner before its first update of the step (`old_logprobs = "recompute"`); mu differs from it by the
versions that the sampler lagged behind and by the numerics of its engine. With `old_logprobs = "behaviour"` the ratio
of the loss is relative to mu itself: correcting again would count d twice, so the caller omits the correction (all
weights 1), and the reported mismatch is that of the policy at each update.

Invariants:
- weights multiply the policy loss, not the KL and entropy terms, and carry no gradient;
- they do not change the denominator: a masked sample still counts in `sample_weights`, so masking makes a step smaller
  and never increases the weight of the other samples;
- metrics are sums: merged over micro-batches and ranks they equal those of the whole batch.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from shoal.learner.logprobs import kl_k3
from shoal.learner.losses.base import LOG_RATIO_BOUND, average_segments, is_finite

CorrectionKind = Literal["none", "token", "sequence"]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far pi_old is from mu, as sums over tokens and samples, in the order of `build_correction`."""

    num_tokens: int
    num_samples: int
    kl_sum: float
    """k3 estimates of KL(mu || pi_old)"""
    raw_sum: float
    """exp(d_t), before truncation"""
    raw_square_sum: float
    weight_sum: float
    """c_t, as applied"""
    weight_square_sum: float
    num_truncated: float
    """tokens cut to cap"""
    num_masked: float
    """samples masked"""
    max_diff: float
    """largest |d_t|"""

    @property
    def kl(self) -> float:
        """Mismatch KL per token."""
        return self.kl_sum / max(self.num_tokens, 1)

    @property
    def ess(self) -> float:
        """Effective sample size of the applied weights, as a fraction: (sum c)^2 / (T sum c^2); 0 if all are masked."""
        return _divide_ess(self.weight_sum, self.weight_square_sum, self.num_tokens)

    @property
    def raw_ess(self) -> float:
        """The same before truncation or masking: comparable between kinds, and not improved by the cap."""
        return _divide_ess(self.raw_sum, self.raw_square_sum, self.num_tokens)

    @property
    def truncated(self) -> float:
        """Fraction of tokens cut to cap."""
        return self.num_truncated / max(self.num_tokens, 1)

    @property
    def masked(self) -> float:
        """Fraction of samples masked."""
        return self.num_masked / max(self.num_samples, 1)

    def merge(self, other: "Mismatch") -> "Mismatch":
        """The combined mismatch of both parts."""
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return Mismatch(**sums | {"max_diff": max(self.max_diff, other.max_diff)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """Weights c_t [T], without gradient, and the sums of their metrics, both on the device of the model."""

    weights: Tensor
    sums: Tensor
    """float64, the numbers of `Mismatch` after its counts"""
    num_tokens: int
    num_samples: int

    @property
    def mismatch(self) -> Mismatch:
        """The metrics on the host; waits for the device."""
        return Mismatch(self.num_tokens, self.num_samples, *self.sums.tolist())


@torch.no_grad()
def build_correction(
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    segment: Tensor,
    num_segments: int,
    *,
    kind: CorrectionKind,
    cap: float,
) -> Correction:
    """Weights and metrics of tokens [T] that belong to samples 0 .. num_segments - 1."""
    assert old_logprobs.shape == behaviour_logprobs.shape == segment.shape, "per-token arrays differ in length"
    diff = old_logprobs - behaviour_logprobs
    assert is_finite(diff), "log-probs are not finite"
    raw = diff.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    truncated, masked = torch.zeros_like(diff, dtype=torch.bool), diff.new_zeros(num_segments, dtype=torch.bool)
    if kind == "token":
        truncated = raw > cap
        weights = raw.clamp(max=cap)
    elif kind == "sequence":
        masked = average_segments(diff, segment, num_segments).abs() > math.log(cap)
        weights = (~masked)[segment].to(diff.dtype)
    else:
        weights = torch.ones_like(diff)
    kl = kl_k3(behaviour_logprobs, old_logprobs)
    sums = [kl, raw, raw.double() ** 2, weights, weights**2, truncated, masked]
    largest = diff.abs().max() if len(diff) else diff.new_zeros(())
    numbers = torch.stack([tensor.double().sum() for tensor in sums] + [largest.double()])
    return Correction(weights=weights, sums=numbers, num_tokens=len(diff), num_samples=num_segments)


def _divide_ess(total: float, squares: float, count: float) -> float:
    return total * total / (count * squares) if squares > 0 else 0.0
