"""Thresholds from samples: what is proven, what is extrapolated, and the error of the extrapolation."""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.toploc.threshold import bound_count, bound_hits, bound_rate, pick_threshold


def test_enough_samples_need_no_extrapolation() -> None:
    """300 samples at a rate of 1 %: the largest is enough at 95 % (0.99^300 = 0.049), the second is not."""
    threshold = pick_threshold(np.arange(300.0), 0.01, 0.95)
    assert (threshold.value, threshold.method) == (299.0, "order")
    assert threshold.proven == pytest.approx(1 - 0.05 ** (1 / 300), rel=1e-6) and threshold.proven <= 0.01
    assert pick_threshold(np.arange(298.0), 0.01, 0.95).method == "tail"


def test_more_samples_allow_a_lower_threshold() -> None:
    threshold = pick_threshold(np.arange(2000.0), 0.01, 0.95)
    assert 1980 < threshold.value < 1999 and threshold.method == "order"
    assert 0.008 < threshold.proven <= 0.01


def test_order_statistics_hold_at_their_confidence() -> None:
    rng = np.random.default_rng(0)
    held = [pick_threshold(rng.random(500), 0.02, 0.9).value >= 0.98 for _ in range(500)]
    assert 450 <= sum(held) <= 490


@pytest.mark.parametrize(
    ("name", "least"),
    [("exponential", 0.99), ("gamma", 0.99), ("gaussian", 1.0), ("uniform", 1.0), ("log-normal", 0.0), ("pareto", 0.0)],
)
def test_the_extrapolated_tail_holds_up_to_exponential_tails(name: str, least: float) -> None:
    """Of 60 fits to 1,500 samples, the share that keeps the rate 1e-6; heavier tails break it a hundredfold."""
    rng = np.random.default_rng(1)
    normal = NormalDist()
    kinds: dict[str, tuple[Callable[[], np.ndarray], Callable[[float], float]]] = {
        "exponential": (lambda: rng.exponential(size=1500), lambda t: math.exp(-t)),
        "gamma": (lambda: rng.gamma(3, size=1500), lambda t: math.exp(-t) * (1 + t + t * t / 2)),
        "gaussian": (lambda: np.abs(rng.normal(size=1500)), lambda t: 2 * normal.cdf(-t)),
        "uniform": (lambda: rng.random(1500), lambda t: max(0.0, 1 - t)),
        "log-normal": (lambda: np.exp(rng.normal(size=1500)), lambda t: normal.cdf(-math.log(t))),
        "pareto": (lambda: rng.pareto(4, size=1500) + 1, lambda t: t**-4),
    }
    draw, survive = kinds[name]
    fits = [pick_threshold(draw(), 1e-6, 0.99) for _ in range(60)]
    assert {fit.method for fit in fits} == {"tail"}
    rates = [survive(fit.value) for fit in fits]
    assert sum(rate <= 1e-6 for rate in rates) >= least * 60
    assert max(rates) < 2e-4, "even where it errs it is far out in the tail"


def test_a_light_tail_is_not_taken_for_a_heavy_one() -> None:
    """10,000 Gaussian samples: 5.6 standard deviations is the truth at 2e-8, and no more than 9 are allowed."""
    samples = 1 + 0.1 * np.random.default_rng(0).normal(size=10_000)
    assert 1.56 < pick_threshold(samples, 2e-8, 0.99).value < 1.9


def test_fewer_samples_give_a_wider_threshold() -> None:
    samples = np.random.default_rng(0).exponential(size=20_000)
    values = [pick_threshold(samples[:num], 1e-6, 0.95).value for num in (300, 2000, 20_000)]
    assert values == sorted(values, reverse=True) and values[-1] < 18 < 25 < values[0]


def test_zeros_give_zero_or_the_floor() -> None:
    assert pick_threshold(np.zeros(100), 1e-6, 0.95).value == 0.0
    floored = pick_threshold(np.zeros(100), 1e-6, 0.95, floor=0.03)
    assert (floored.value, floored.method) == (0.03, "floor")


def test_a_few_odd_samples_get_a_margin() -> None:
    samples = np.zeros(1000)
    samples[:5] = 1.0
    assert pick_threshold(samples, 1e-6, 0.95) == pick_threshold(samples[::-1], 1e-6, 0.95)
    threshold = pick_threshold(samples, 1e-6, 0.95)
    assert (threshold.value, threshold.method) == (2.0, "margin")


def test_whole_numbers_are_no_problem() -> None:
    counts = np.random.default_rng(0).poisson(2.0, 2000)
    threshold = pick_threshold(counts, 1e-6, 0.95)
    assert threshold.method == "tail" and counts.max() < threshold.value < 40
    rare = np.random.default_rng(0).poisson(0.02, 5000)
    assert pick_threshold(rare, 1e-6, 0.95).value < 10


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=200), st.floats(1e-9, 0.5), st.floats(0.5, 0.999))
def test_no_sample_set_breaks_it(samples: list[float], rate: float, confidence: float) -> None:
    threshold = pick_threshold(samples, rate, confidence)
    assert math.isfinite(threshold.value) and 0 < threshold.proven <= 1
    if threshold.method != "order":
        assert threshold.value >= max(samples)


@given(st.floats(0.001, 0.1), st.integers(10, 400))
def test_a_scaled_sample_scales_its_threshold(scale: float, num: int) -> None:
    samples = np.random.default_rng(num).exponential(size=num)
    assert pick_threshold(samples * scale, 1e-5, 0.95).value == pytest.approx(
        pick_threshold(samples, 1e-5, 0.95).value * scale, rel=1e-9
    )


@pytest.mark.parametrize(
    ("samples", "rate", "confidence"),
    [([], 0.1, 0.9), ([math.nan], 0.1, 0.9), ([math.inf], 0.1, 0.9), ([1.0], 0.0, 0.9), ([1.0], 0.1, 1.0)],
)
def test_nonsense_is_refused(samples: list[float], rate: float, confidence: float) -> None:
    with pytest.raises(ValueError, match="finite samples"):
        pick_threshold(samples, rate, confidence)


@pytest.mark.parametrize(
    ("hits", "trials", "expected"), [(0, 10_000, 2.9953e-4), (1, 100, 0.04656), (5, 10, 0.77756), (10, 10, 1.0)]
)
def test_rates_are_bounded_as_clopper_and_pearson_did(hits: int, trials: int, expected: float) -> None:
    assert bound_rate(hits, trials, 0.95) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("trials", "chance", "rate"), [(64, 0.031, 1e-6), (10, 0.5, 0.01), (1, 0.03, 1e-6), (0, 0.5, 0.1)]
)
def test_hits_by_chance_are_bounded(trials: int, chance: float, rate: float) -> None:
    most = bound_hits(trials, chance, rate)
    odds = [math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(trials + 1)]
    assert sum(odds[most + 1 :]) <= rate
    assert most == 0 or sum(odds[most:]) > rate


@pytest.mark.parametrize(("often", "rate"), [(0.01, 2e-8), (0.3, 1e-6), (1e-6, 1e-3), (0.999, 1e-9), (1.0, 0.1)])
def test_counts_of_rare_events_are_bounded_by_poissons_tail(often: float, rate: float) -> None:
    count = bound_count(often, rate)
    if often == 1.0:
        assert count == 128
        return
    mean = -math.log1p(-often)
    tails = [
        1 - math.fsum(math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) for k in range(c + 1))
        for c in (count, count - 1)
    ]
    assert tails[0] <= rate + 1e-12 and (count == 0 or tails[1] > rate - 1e-12)
