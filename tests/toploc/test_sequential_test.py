"""Evidence: bounded for honest work at any time, growing for anything else, and small enough to store."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.toploc.chunks import STATISTICS, ChunkStats
from shoal.toploc.sequential_test import CALIBRATED, FRACTIONS, Bet, EvidenceStream, Level, SequentialEvidence

QUIET = ChunkStats(tokens=32, **dict.fromkeys(STATISTICS, 0.0))
CHANCES = (0.5, 0.1, 0.01, 0.001)
UNIFORM = Bet(levels=tuple(Level(value=1 - chance, chance=chance) for chance in CHANCES))
"""bets for honest statistics that are uniform in [0, 1]"""
UNIT = dict.fromkeys(CALIBRATED, UNIFORM)
BETS = {True: UNIT, False: UNIT}
FIELDS = ("exponent", "mantissa", "distance_mean", "logprob_mean", "bias")


def watch(values: np.ndarray, field: str = "mantissa") -> SequentialEvidence:
    """Evidence of rollouts (R, chunks) whose statistic takes these values."""
    evidence = SequentialEvidence()
    for row in values:
        evidence = evidence.extend([replace(QUIET, **{field: float(value)}) for value in row], BETS)
    return evidence


@pytest.mark.parametrize("kind", ["uniform", "coin", "rare"])
def test_honest_evidence_rarely_ever_reaches_its_bound(kind: str) -> None:
    """Honest nodes at the limit, each watched after every chunk of 20 rollouts: Ville's inequality.

    All streams exceed their levels as often as allowed, which is the worst case of honest work.
    """
    rng = np.random.default_rng(7)
    draw = {
        "uniform": rng.random,
        "coin": lambda size: np.where(rng.random(size) < 0.5, 0.7, 0.0),
        "rare": lambda size: np.where(rng.random(size) < 0.001, 1.0, 0.0),
    }[kind]
    alarms = 0
    for _ in range(60):
        evidence = SequentialEvidence()
        for rollout in draw((20, 3, 5)):
            rows = [dict(zip(FIELDS, row, strict=True)) for row in rollout.tolist()]
            evidence = evidence.extend([replace(QUIET, **row) for row in rows], BETS)
        alarms += evidence.judge(0.1).failed
    assert alarms <= 0.1 * 60


def test_rare_large_values_show_where_the_middle_is_honest() -> None:
    values = np.full((40, 4), 0.3)
    values[::4, 0] = 0.9995
    assert watch(values).judge(1e-4).failed


def test_a_finding_says_how_many_chunks_it_is_based_on() -> None:
    where = [watch(np.full((1, count), 0.3)).judge(1e-4).where for count in (1, 2)]
    assert where == ["exponent, 1 chunk", "exponent, 2 chunks"]


def test_a_small_excess_shows_in_the_mean_of_many() -> None:
    rng = np.random.default_rng(0)
    noisy = rng.random((60, 4)) ** 0.5  # above the honest median in three of four chunks
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
    """With constant odds all stakes are still there: their sum must stay below 1 forever."""
    still = Bet(levels=(Level(value=0.5, chance=1 - 1e-12),) * 4)
    bets = {kind: dict.fromkeys(CALIBRATED, still) for kind in (True, False)}
    evidence = SequentialEvidence()
    for _ in range(1000):
        evidence = evidence.extend([replace(QUIET, **dict.fromkeys(FIELDS, 1.0))], bets)
    assert max(max(logs) for logs in evidence.wealth.values()) < 0
    assert evidence.peak == 0.0


def test_exact_odds_are_counted_at_chunk_ends_with_everything_else() -> None:
    path = np.linspace(0, 40, 70)[:, None] * np.ones((1, 3))
    chunks = [QUIET, QUIET, replace(QUIET, tokens=6)]
    evidence = SequentialEvidence().extend(chunks, BETS, {EvidenceStream.HAZARD: path})
    assert evidence.leader == "hazard" and evidence.judge(1e-4).failed
    again = evidence.extend([QUIET], BETS)  # no end of a rollout this time: the stream is unchanged
    assert again.wealth[EvidenceStream.HAZARD] == evidence.wealth[EvidenceStream.HAZARD]
    assert again.peak == evidence.peak


def test_short_chunks_have_bets_of_their_own() -> None:
    lenient = dict.fromkeys(CALIBRATED, Bet(levels=(Level(value=0.5, chance=0.99),) * 4))
    loud = [replace(QUIET, mantissa=1.0, tokens=tokens) for tokens in [5] * 40]
    assert not SequentialEvidence().extend(loud, {True: UNIT, False: lenient}).judge(1e-4).failed
    assert SequentialEvidence().extend(loud, {True: lenient, False: UNIT}).judge(1e-4).failed


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_what_is_not_a_number_counts_as_the_worst(value: float) -> None:
    assert watch(np.full((8, 4), value)).peak == watch(np.ones((8, 4))).peak > 5


def test_no_evidence_is_no_alarm() -> None:
    assert not SequentialEvidence().judge(0.5).failed


@given(st.integers(0, 2**32 - 1))
def test_the_order_of_evidence_of_one_rollout_leaves_its_sum(seed: int) -> None:
    values = np.random.default_rng(seed).random((1, 6))
    forward, backward = watch(values).wealth, watch(values[:, ::-1]).wealth
    for stream in CALIBRATED:
        np.testing.assert_allclose(forward[stream], backward[stream], atol=1e-9)


def test_a_bet_pays_what_its_chance_is_worth_and_at_the_level_nothing() -> None:
    shares = np.array(FRACTIONS)
    lost = np.array(watch(np.zeros((1, 1))).wealth[EvidenceStream.MANTISSA]).reshape(4, 4)
    for value, expected in (
        (0.5, [0, 0, 0, 0]),
        (0.6, [2, 0, 0, 0]),
        (0.9901, [2, 10, 100, 0]),
        (1.0, [2, 10, 100, 1000]),
    ):
        wealth = np.array(watch(np.full((1, 1), value)).wealth[EvidenceStream.MANTISSA]).reshape(4, 4)
        odds = (np.exp(wealth - lost) - 1) * (1 - shares) / shares
        np.testing.assert_allclose(odds, np.array(expected)[:, None] * np.ones(4), atol=1e-9)
