"""Advantages of a group."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.learner.advantage import AdvantageKind, compute_advantages

rewards_of_groups = st.lists(st.floats(-100, 100, allow_nan=False, width=32), min_size=1, max_size=32)


def test_zscore_matches_hand_computed_numbers() -> None:
    # mean 1/4, sum of squares 3/4, ddof 1: std = sqrt(0.75 / 3) = 1/2
    scale = 0.5 + 1e-6
    assert compute_advantages(np.array([1.0, 0, 0, 0]), "zscore").tolist() == pytest.approx(
        [0.75 / scale, -0.25 / scale, -0.25 / scale, -0.25 / scale], rel=1e-12
    )


def test_centred_matches_hand_computed_numbers() -> None:
    assert compute_advantages(np.array([1.0, 0, 0, 0]), "centred").tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("kind", ["zscore", "centred"])
@given(value=st.floats(-1e6, 1e6, allow_nan=False, width=32), size=st.integers(1, 17))
def test_equal_rewards_give_exact_zeros(kind: AdvantageKind, value: float, size: int) -> None:
    advantages = compute_advantages(np.full(size, value, dtype=np.float32), kind)
    assert advantages.tolist() == [0.0] * size


@pytest.mark.parametrize("kind", ["zscore", "centred"])
@given(rewards=rewards_of_groups)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(kind: AdvantageKind, rewards: list[float]) -> None:
    values = np.array(rewards, dtype=np.float32)
    advantages = compute_advantages(values, kind)
    # The mean is rounded once per reward; dividing by a std near 1e-6 magnifies that.
    tolerance = 1e-12 * len(values) * max(1.0, float(np.abs(values).max())) * (1e6 if kind == "zscore" else 1)
    assert abs(math.fsum(advantages)) <= tolerance
    assert (np.diff(advantages[np.argsort(values, kind="stable")]) >= 0).all()


@given(rewards=rewards_of_groups)
def test_zscores_are_bounded_by_the_group_size(rewards: list[float]) -> None:
    size = len(rewards)
    assert np.abs(compute_advantages(np.array(rewards), "zscore")).max() <= (size - 1) / math.sqrt(size) + 1e-6


def test_float32_rewards_are_computed_in_float64() -> None:
    assert compute_advantages(np.array([0, 1], dtype=np.float32), "zscore").dtype == np.float64


def test_rewards_that_are_not_finite_are_refused() -> None:
    with pytest.raises(AssertionError, match="not finite"):
        compute_advantages(np.array([0.0, math.nan]), "zscore")
