"""Advantages of one group: its rewards relative to their mean.

    zscore:   A_i = (r_i - mean(r)) / (std(r, ddof = 1) + 1e-6)
    centred:  A_i = r_i - mean(r)

Invariants:
- they sum to zero up to rounding; equal rewards give exact zeros, never rounding noise divided by 1e-6;
- they follow from task rewards and the length reward in the settings: the only numbers of a worker that are trained on
  are tokens, log-probs and recomputed rewards.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from shoal.config.run import LengthConfig
from shoal.policy.packing import Sample
from shoal.rollout import Group
from shoal.tasks.length import total_rewards

NO_LENGTH = LengthConfig()
AdvantageKind = Literal["zscore", "centred"]
STD_FLOOR = 1e-6


def compute_advantages(rewards: np.ndarray, kind: AdvantageKind) -> np.ndarray:
    """A [G] in float64 from the rewards [G] of one group."""
    values = np.asarray(rewards, dtype=np.float64)
    assert values.ndim == 1 and len(values) > 0, "one group of rewards at a time"
    assert np.isfinite(values).all(), "rewards are not finite"
    if values.min() == values.max():
        return np.zeros_like(values)
    advantages: np.ndarray = values - values.mean()
    if kind == "zscore":
        advantages /= values.std(ddof=1) + STD_FLOOR
    return advantages


def build_samples(groups: Sequence[Group], kind: AdvantageKind, length: LengthConfig = NO_LENGTH) -> list[Sample]:
    """Samples in order of group and sample index, with advantages within each group."""
    samples = []
    for group in groups:
        advantages = compute_advantages(total_rewards(length, group), kind)
        pairs = zip(group.rollouts, advantages, strict=True)
        samples += [Sample(group.index, rollout, float(advantage)) for rollout, advantage in pairs]
    return samples
