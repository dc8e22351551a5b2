"""The shape test: fair for honest sampling whatever the distribution, and blind only where documented."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.toploc.finding import Check
from shoal.toploc.shape_test import (
    TAILS,
    TILTS,
    average_wealth,
    check_odds,
    measure_masses,
    measure_tilts,
    trace_choices,
    trace_tails,
)

BETS = len(TILTS) + len(TAILS)


def trace(probs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Wealth of tokens (T,) under distributions (T, V)."""
    logprobs, chosen = torch.from_numpy(probs).log(), torch.from_numpy(tokens)
    own = logprobs.gather(1, chosen[:, None])[:, 0].numpy()
    return trace_choices(own, measure_tilts(logprobs).numpy(), measure_masses(logprobs, chosen).numpy())


def draw(probs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    cdf = probs.cumsum(1)
    return np.minimum((cdf < rng.random((len(probs), 1)) * cdf[:, -1:]).sum(1), probs.shape[1] - 1)


def language(rng: np.random.Generator, tokens: int, vocabulary: int = 200) -> np.ndarray:
    """Distributions like those of a model: some certain, some open."""
    logits = rng.normal(size=(tokens, vocabulary)) * rng.uniform(1, 6, (tokens, 1))
    return np.exp(logits - np.log(np.exp(logits).sum(1, keepdims=True)))


@given(seed=st.integers(0, 2**32 - 1), vocabulary=st.integers(1, 40), spread=st.floats(0.01, 8))
def test_every_bet_is_fair(seed: int, vocabulary: int, spread: float) -> None:
    """The expectation over all tokens, each weighed by its probability, is 1 for each bet."""
    rng = np.random.default_rng(seed)
    logits = np.round(spread * rng.normal(size=vocabulary), 1)  # rounded, so that there are ties
    probs = np.exp(logits) / np.exp(logits).sum()
    wealth = np.stack([trace(probs[None], np.array([token]))[0] for token in range(vocabulary)])
    assert wealth.shape == (vocabulary, BETS)
    np.testing.assert_allclose(probs @ np.exp(wealth), 1.0, rtol=1e-6)


def test_honest_sampling_rarely_alarms_at_any_length() -> None:
    rng = np.random.default_rng(0)
    alarms = 0
    for length in [1, 3, 30, 300] * 150:
        probs = language(rng, length, 50)
        alarms += check_odds(Check.SHAPE, trace(probs, draw(probs, rng)), 0.02).failed
    assert alarms <= 600 * 0.02


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("greedy", 200),
        ("temperature 0.5", 400),
        ("temperature 0.9", 6000),
        ("top-p 0.95", 1200),
        ("another model", 100),
    ],
)
def test_other_choices_alarm(name: str, tokens: int) -> None:
    rng = np.random.default_rng(1)
    probs = language(rng, tokens)
    kind, _, number = name.partition(" ")
    if kind == "greedy":
        chosen = probs.argmax(1)
    elif kind == "temperature":
        cold = probs ** (1 / float(number))
        chosen = draw(cold / cold.sum(1, keepdims=True), rng)
    elif kind == "top-p":
        order = np.argsort(-probs, axis=1)
        ranked = np.take_along_axis(probs, order, axis=1)
        kept = np.where(ranked.cumsum(1) - ranked < float(number), ranked, 0.0)
        chosen = np.take_along_axis(order, draw(kept, rng)[:, None], axis=1)[:, 0]
    else:
        chosen = draw(language(rng, tokens), rng)
    assert check_odds(Check.SHAPE, trace(probs, chosen), 1e-5).failed


def test_honest_tokens_afterwards_do_not_wash_a_start_clean() -> None:
    rng = np.random.default_rng(2)
    probs = language(rng, 900)
    tokens = draw(probs, rng)
    tokens[:60] = draw(language(rng, 60), rng)
    finding = check_odds(Check.SHAPE, trace(probs, tokens), 1e-5)
    assert finding.failed and int(finding.where.removeprefix("token ")) < 100
    assert average_wealth(trace(probs, tokens))[-1] < finding.statistic - 10


def test_an_impossible_token_is_no_crash() -> None:
    own = np.array([-2000.0, -1.0])
    path = trace_choices(own, np.zeros((2, len(TILTS))), np.array([1.0, 0.2]))
    assert np.isfinite(path).all()
    assert check_odds(Check.SHAPE, path, 1e-5).failed


def test_tail_bets_are_fair_to_honest_sampling_and_see_tokens_from_far_out() -> None:
    """Exactly fair: the expectation of a token's odds is 1, whatever the distribution."""
    probs = np.array([0.9, 0.0985, 0.0014, 9e-5, 9e-6, 1e-6])
    probs /= probs.sum()
    masses = np.concatenate([[0.0], probs.cumsum()[:-1]])
    odds = np.exp([trace_tails(np.log(probs[i : i + 1]), masses[i : i + 1])[0] for i in range(len(probs))])
    np.testing.assert_allclose(probs @ odds, 1.0, rtol=1e-9)
    assert odds[-1].max() > 100 and (odds[0] < 1).all()
