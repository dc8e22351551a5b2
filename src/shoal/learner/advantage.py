"""Advantages of one group: its rewards against their own mean.

    zscore:   A_i = (r_i - mean(r)) / (std(r, ddof = 1) + 1e-6)
    centred:  A_i = r_i - mean(r)

Invariants: they sum to zero up to rounding; equal rewards give exact zeros, never rounding noise divided by 1e-6. The
caller groups by id and passes one group at a time.
"""

from typing import Literal

import numpy as np

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
