"""Metrics of a training step, summed over micro-batches and updates, under the names used by dashboards."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from torch import Tensor

from shoal.learner.correction import Mismatch
from shoal.learner.losses.base import LossOutput


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

    def add_terms(self, *, total: Tensor, policy: Tensor, kl: Tensor) -> None:
        """Add the loss terms of a micro-batch; they are already weighted, so they can be summed."""
        self.total += float(total.detach())
        self.policy += float(policy.detach())
        self.kl += float(kl.detach())

    def add_tokens(self, output: LossOutput, entropy: Tensor, mismatch: Mismatch) -> None:
        """Add the per-token numbers of a micro-batch."""
        self.num_tokens += len(output.ratio)
        self.num_clipped += int(output.clipped.sum())
        self.entropy_sum += float(entropy.detach().sum())
        self.ratio_max = max(self.ratio_max, float(output.ratio.max()))
        self.mismatch = mismatch if self.mismatch is None else self.mismatch.merge(mismatch)


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
