"""Rivals: work of other weights leans to them, honest work does not, and bets on that are fair."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.toploc.chunks import STATISTICS, ChunkStats
from shoal.toploc.finding import MAX_ODDS, SHARES, mix_odds, spell_odds, sum_odds
from shoal.toploc.rivals import (
    NUM_LEVELS,
    Lean,
    Rival,
    RivalBet,
    RivalBets,
    compare_replays,
    fit_stakes,
    judge_odds,
    list_gains,
)
from shoal.toploc.sequential_test import Level

CHANCES = (0.4, 0.2, 0.1, 0.02)
LEVELS = tuple(
    Level(value=value, chance=chance) for value, chance in zip((0.01, 0.1, 0.2, 0.4) * 2, CHANCES * 2, strict=True)
)
logs = st.floats(-30.0, 30.0)


def make_stats(mantissa: float, logprob: float, tokens: int = 32) -> ChunkStats:
    values = dict.fromkeys(STATISTICS, 0.0) | {"mantissa": mantissa, "logprob_mean": logprob}
    return ChunkStats(tokens=tokens, **values)


def draw_honest(rng: np.random.Generator, count: int) -> list[Lean]:
    """Leans that exceed each level exactly as often as it allows."""
    ranks = rng.random((count, 2))
    values = np.select([ranks < chance for chance in CHANCES[::-1]], [0.5, 0.3, 0.15, 0.05], -0.5)
    return [Lean(True, float(states), float(logprobs)) for states, logprobs in values]


def test_work_leans_to_the_weights_that_it_is_closer_to() -> None:
    stated = [make_stats(0.6, 0.0), make_stats(0.2, 3.0, 5), make_stats(0.0, 0.0)]
    rival = [make_stats(0.2, 0.0), make_stats(0.6, 1.0, 5), make_stats(0.0, 0.0)]
    first, second, third = compare_replays(stated, rival)
    assert (first.is_full, first.states, first.logprobs) == (True, pytest.approx(0.5), 0.0)
    assert (second.is_full, second.states, second.logprobs) == (False, pytest.approx(-0.5), pytest.approx(0.5))
    assert (third.states, third.logprobs) == (0.0, 0.0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_number_that_is_none_is_no_evidence_for_a_rival(value: float) -> None:
    """What cannot be compared fails other checks."""
    for stated, rival in ((value, 0.1), (0.1, value), (value, value)):
        (lean,) = compare_replays([make_stats(stated, stated)], [make_stats(rival, rival)])
        assert lean.states <= 0.0 and lean.logprobs <= 0.0


def test_the_odds_of_honest_work_are_one_at_most_on_average() -> None:
    stakes = (0.1, 0.2, 0.3, 0.2, 0.0, 0.05, 0.05, 0.05)
    odds = np.exp(RivalBet(levels=LEVELS, stakes=stakes).weigh(draw_honest(np.random.default_rng(0), 200_000)))
    assert odds.mean() == pytest.approx(1.0, abs=0.02) and odds.min() > 0.0


def test_fitted_stakes_gain_from_the_rival_and_lose_from_honest_work() -> None:
    rng = np.random.default_rng(1)
    cheated = [Lean(True, float(x), float(x) / 2) for x in rng.normal(0.25, 0.15, 400)]
    bet = RivalBet(levels=LEVELS, stakes=fit_stakes(list_gains(cheated[::2], LEVELS)))
    best = bet.weigh(cheated[1::2]).mean()
    assert best > 0.5 > 0.0 > bet.weigh(draw_honest(rng, 2000)).mean()
    for level in range(NUM_LEVELS):
        single = RivalBet(levels=LEVELS, stakes=tuple(0.9 * (place == level) for place in range(NUM_LEVELS)))
        assert best > single.weigh(cheated[1::2]).mean() - 0.05, "no single bet is clearly better than the fitted mix"


def test_nothing_is_staked_where_the_rival_looks_like_honest_work() -> None:
    honest = draw_honest(np.random.default_rng(2), 4000)
    assert sum(fit_stakes(list_gains(honest, LEVELS))) < 0.1
    assert fit_stakes(np.zeros((0, NUM_LEVELS))) == (0.0,) * NUM_LEVELS


@pytest.mark.parametrize("stakes", [(0.125,) * 8, (-0.1, *(0.0,) * 7)])
def test_stakes_that_could_lose_everything_are_refused(stakes: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="stakes"):
        RivalBet(levels=LEVELS, stakes=stakes)


def test_full_and_short_chunks_have_bets_of_their_own() -> None:
    still = RivalBet(levels=LEVELS, stakes=(0.0,) * 8)
    bold = RivalBet(levels=LEVELS, stakes=(0.5, *(0.0,) * 7))
    leans = [Lean(True, 1.0, 1.0), Lean(False, 1.0, 1.0), Lean(False, -1.0, 0.0)]
    gain, loss = math.log(1 + 0.5 * (1 / 0.4 - 1)), math.log(0.5)
    assert RivalBets(full=bold, short=still).weigh(leans) == pytest.approx(gain)
    assert RivalBets(full=still, short=bold).weigh(leans) == pytest.approx(gain + loss)
    assert RivalBets(full=bold, short=bold).weigh([]) == 0.0


@given(st.lists(logs, max_size=20), st.sampled_from(SHARES))
def test_the_odds_of_several_rollouts_are_the_product(rollouts: list[float], share: float) -> None:
    wanted = sum(math.log((1 - share) + share * math.exp(log)) for log in rollouts)
    assert sum_odds(rollouts, share) == pytest.approx(wanted, abs=1e-6)


@given(logs)
def test_stated_odds_are_never_larger_than_found(log: float) -> None:
    assert spell_odds(log) <= 1e6 * math.exp(log) and spell_odds(1000.0) == MAX_ODDS
    assert mix_odds(800.0, 0.1) == pytest.approx(800.0 + math.log(0.1))


def test_a_submission_is_judged_by_the_mean_over_all_rivals_and_shares() -> None:
    assert judge_odds({}) == (0.0, "none")
    found, rival = judge_odds({Rival.INT8: [5.0] * 8, Rival.PREVIOUS: [-2.0] * 8})
    assert rival == "int8" and 40.0 - math.log(6) <= found < 40.0
