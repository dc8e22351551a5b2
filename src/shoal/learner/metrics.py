"""Metrics of a training step, summed over micro-batches and updates, under the names used by dashboards."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from shoal.learner.correction import Correction, Mismatch
from shoal.learner.losses.base import LossOutput
from shoal.policy.packing import Pack

NUM_TERMS = 7 + 8
"""numbers of a micro-batch: finite, total, policy, kl, clipped, entropy, largest ratio, then the sums of `Mismatch`"""


def list_numbers(
    finite: Tensor,
    *,
    total: Tensor,
    policy: Tensor,
    kl: Tensor,
    output: LossOutput,
    entropy: Tensor,
    correction: Correction,
) -> Tensor:
    """The numbers of one micro-batch in float64, on the device of the model; nothing is read."""
    tensors = (finite, total, policy, kl, output.clipped.sum(), entropy.sum(), output.ratio.max())
    terms = torch.stack([tensor.detach().double() for tensor in tensors])
    return torch.cat((terms, correction.sums))


@dataclass(slots=True)
class UpdateMetrics:
    """One optimizer update."""

    total: float = 0.0
    policy: float = 0.0
    kl: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    skipped: bool = False
    num_tokens: int = 0
    num_clipped: int = 0
    entropy_sum: float = 0.0
    ratio_max: float = 0.0
    mismatch: Mismatch | None = None

    def read(self, packs: Sequence[Pack], numbers: Tensor, norm: Tensor) -> None:
        """Read the numbers of all micro-batches (packs, NUM_TERMS) and the gradient norm in one transfer: each waits
        for the device."""
        *rows, self.grad_norm = torch.cat((numbers.flatten(), norm.detach().double()[None])).tolist()
        for index, pack in enumerate(packs):
            self._add_numbers(pack, rows[index * NUM_TERMS : (index + 1) * NUM_TERMS])
        self.skipped |= not math.isfinite(self.grad_norm)

    def _add_numbers(self, pack: Pack, numbers: list[float]) -> None:
        finite, total, policy, kl, clipped, entropy, ratio, *mismatch = numbers
        if not finite:
            self.skipped = True  # no ratio could be formed; gradients of the other micro-batches are not applied either
            return
        # The terms are already weighted, so they can be summed.
        self.total, self.policy, self.kl = self.total + total, self.policy + policy, self.kl + kl
        self.num_tokens += len(pack.targets)
        self.num_clipped += int(clipped)
        self.entropy_sum += entropy
        self.ratio_max = max(self.ratio_max, ratio)
        own = Mismatch(len(pack.targets), len(pack.samples), *mismatch)
        self.mismatch = own if self.mismatch is None else self.mismatch.merge(own)


def describe_step(done: Sequence[UpdateMetrics]) -> dict[str, float]:
    """Metric names and values of all updates of a training step; without a trained token only counts."""
    tokens = sum(u.num_tokens for u in done)
    counts = {
        "optim/updates": float(len(done)),
        "optim/skipped": float(sum(u.skipped for u in done)),
        "train/tokens": float(tokens),
    }
    if not tokens:
        return counts
    losses = {
        "loss/total": _mean([u.total for u in done]),
        "loss/policy": _mean([u.policy for u in done]),
        "loss/kl": _mean([u.kl for u in done]),
        "policy/entropy": sum(u.entropy_sum for u in done) / tokens,
        "policy/clip_fraction": sum(u.num_clipped for u in done) / tokens,
        "policy/ratio_max": max(u.ratio_max for u in done),
        "optim/grad_norm": _mean([u.grad_norm for u in done]),
        "optim/grad_norm_max": max(u.grad_norm for u in done),
        "optim/lr": done[-1].lr,
    }
    return counts | losses | _mismatch_metrics([u.mismatch for u in done if u.mismatch is not None])


def _mismatch_metrics(parts: list[Mismatch]) -> dict[str, float]:
    whole = reduce(Mismatch.merge, parts)
    return {
        "off_policy/mismatch_kl": whole.kl,
        "off_policy/ess": whole.ess,
        "off_policy/raw_ess": whole.raw_ess,
        "off_policy/truncated": whole.truncated,
        "off_policy/masked": whole.masked,
        "off_policy/max_diff": whole.max_diff,
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
