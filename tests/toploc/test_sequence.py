"""Evidence: bounded for honest work at any time, growing for anything else, and small enough to store."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.toploc.chunks import STATISTICS, ChunkStats
from shoal.toploc.sequence import CALIBRATED, Bet, Evidence, Stream, bound_mean

QUIET = ChunkStats(tokens=32, **dict.fromkeys(STATISTICS, 0.0))
UNIT = {stream: Bet(low=-1.0 if "bias" in stream else 0.0, high=1.0, mean=0.5) for stream in CALIBRATED}
BETS = {True: UNIT, False: UNIT}
FIELDS = ("exponent", "mantissa", "distance_mean", "logprob_mean", "bias")


def watch(values: np.ndarray, field: str = "mantissa") -> Evidence:
    """Evidence of rollouts (R, chunks) whose statistic takes these values."""
    evidence = Evidence()
    for row in values:
        evidence = evidence.extend([replace(QUIET, **{field: float(value)}) for value in row], BETS)
    return evidence


@pytest.mark.parametrize("kind", ["coin", "uniform", "rare"])
def test_honest_evidence_rarely_ever_reaches_its_bound(kind: str) -> None:
    """Honest nodes at the very edge, each watched after every chunk of 20 rollouts: Ville's inequality.

    All streams sit at their allowed mean, which is as bad as honest work can be.
    """
    rng = np.random.default_rng(7)
    draw = {
        "coin": lambda size: (rng.random(size) < 0.5).astype(float),
        "uniform": rng.random,
        "rare": lambda size: np.where(rng.random(size) < 0.05, 1.0, 0.45 / 0.95),
    }[kind]
    alarms = 0
    for _ in range(50):
        evidence = Evidence()
        for rollout in draw((20, 3, 5)):
            rows = [dict(zip(FIELDS, (*row[:4], 2 * row[4] - 1), strict=True)) for row in rollout.tolist()]
            evidence = evidence.extend([replace(QUIET, **row) for row in rows], BETS)
        alarms += evidence.judge(0.1).failed
    assert alarms <= 0.1 * 50


def test_a_small_excess_shows_in_the_mean_of_many() -> None:
    rng = np.random.default_rng(0)
    noisy = np.clip(rng.normal(0.65, 0.15, (60, 4)), 0, 1)
    assert not watch(noisy[:1]).judge(1e-4).failed
    finding = watch(noisy).judge(1e-4)
    assert finding.failed and finding.where == "mantissa, 240 chunks"


@pytest.mark.parametrize("field", ["exponent", "mantissa", "distance_mean", "logprob_mean"])
def test_each_statistic_is_bet_on(field: str) -> None:
    evidence = watch(np.ones((16, 3)), field)
    assert evidence.judge(1e-4).failed and evidence.leader == field


@pytest.mark.parametrize(("sign", "leader"), [(1.0, "bias_above"), (-1.0, "bias_below")])
def test_a_bias_is_bet_on_in_both_directions(sign: float, leader: str) -> None:
    evidence = watch(np.full((16, 3), sign), "bias")
    assert evidence.judge(1e-4).failed and evidence.leader == leader


def test_a_long_honest_past_does_not_hide_a_cheat() -> None:
    honest = watch(np.zeros((500, 4)))
    assert honest.peak == 0.0
    caught = 0
    evidence = honest
    while not evidence.judge(1e-4).failed:
        evidence = evidence.extend([replace(QUIET, mantissa=1.0)] * 4, BETS)
        caught += 1
    assert caught <= 12


def test_the_fresh_stakes_never_exceed_one() -> None:
    """With odds that stand still all money that was ever staked is there: it must stay below 1 for ever."""
    values = dict(zip(FIELDS, (0.5, 0.5, 0.5, 0.5, 0.0), strict=True))
    evidence = Evidence()
    for _ in range(1000):
        evidence = evidence.extend([replace(QUIET, **values)], BETS)
    assert max(max(logs) for logs in evidence.wealth.values()) < 0
    assert evidence.peak == 0.0


def test_exact_odds_are_counted_at_chunk_ends_with_everything_else() -> None:
    path = np.linspace(0, 40, 70)[:, None] * np.ones((1, 3))
    chunks = [QUIET, QUIET, replace(QUIET, tokens=6)]
    evidence = Evidence().extend(chunks, BETS, {Stream.HAZARD: path})
    assert evidence.leader == "hazard" and evidence.judge(1e-4).failed
    again = evidence.extend([QUIET], BETS)  # no end of a rollout this time: the stream stands still
    assert again.wealth[Stream.HAZARD] == evidence.wealth[Stream.HAZARD]
    assert again.peak == evidence.peak


def test_short_chunks_have_bets_of_their_own() -> None:
    lenient = {stream: bet.model_copy(update={"mean": 0.99}) for stream, bet in UNIT.items()}
    loud = [replace(QUIET, mantissa=1.0, tokens=tokens) for tokens in [5] * 40]
    assert not Evidence().extend(loud, {True: UNIT, False: lenient}).judge(1e-4).failed
    assert Evidence().extend(loud, {True: lenient, False: UNIT}).judge(1e-4).failed


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_what_is_not_a_number_counts_as_the_worst(value: float) -> None:
    assert watch(np.full((8, 4), value)).peak == watch(np.ones((8, 4))).peak > 5


def test_evidence_is_stored_and_goes_on_from_there() -> None:
    first = watch(np.random.default_rng(0).random((5, 3)))
    stored = Evidence.from_json(first.to_json())
    assert stored == first and len(first.to_json()) < 1000
    more = [replace(QUIET, mantissa=0.9)]
    assert stored.extend(more, BETS) == first.extend(more, BETS)


def test_no_evidence_is_stored_too() -> None:
    assert Evidence.from_json(Evidence().to_json()) == Evidence()
    assert not Evidence().judge(0.5).failed


@given(st.integers(0, 2**32 - 1))
def test_the_order_of_evidence_of_one_rollout_leaves_its_sum(seed: int) -> None:
    values = np.random.default_rng(seed).random((1, 6))
    forward, backward = watch(values).wealth, watch(values[:, ::-1]).wealth
    for stream in CALIBRATED:
        np.testing.assert_allclose(forward[stream], backward[stream], atol=1e-9)


@pytest.mark.parametrize("kind", ["zeros", "uniform", "coin", "lump"])
def test_the_bound_of_a_mean_holds_at_its_confidence_and_shrinks(kind: str) -> None:
    rng = np.random.default_rng(0)
    draw = {
        "zeros": np.zeros,
        "uniform": rng.random,
        "coin": lambda n: (rng.random(n) < 0.02).astype(float),
        "lump": lambda n: np.where(rng.random(n) < 0.1, 0.9, 0.1),
    }[kind]
    mean = {"zeros": 0.0, "uniform": 0.5, "coin": 0.02, "lump": 0.18}[kind]
    bounds = [bound_mean(draw(200), 0.9) for _ in range(100)]
    assert sum(bound < mean for bound in bounds) <= 10
    assert bound_mean(draw(5000), 0.9) < mean + 0.03
    assert bound_mean(draw(2), 0.999) > 0.9


def test_a_bet_scales_and_clips() -> None:
    bet = Bet(low=-2.0, high=2.0, mean=0.5)
    assert bet.scale(np.array([-5.0, -2.0, 0.0, 1.0, 9.0])).tolist() == [0.0, 0.0, 0.5, 0.75, 1.0]
