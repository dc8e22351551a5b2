"""Token choice: the exact inverse of the CDF, and the log-probs of the chosen tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.engine.sampling import choose_tokens
from shoal.seeds import token_uniforms

INF = float("inf")
BELOW_ONE = 1 - 2.0**-53  # the largest uniform there is


def choose(logits: list[float], u: float, temperature: float = 1.0) -> tuple[int, float]:
    tokens, logprobs = choose_tokens(torch.tensor([logits]), torch.tensor([temperature]), torch.tensor([u]).double())
    return int(tokens[0]), float(logprobs[0])


def walk_cdf(logits: Tensor, u: float) -> int:
    """The definition as a loop: the first token at which the running sum exceeds u times the whole sum."""
    probabilities = torch.log_softmax(logits, -1).double().exp().tolist()
    running = 0.0
    total = sum(probabilities)
    for token, probability in enumerate(probabilities):
        running += probability
        if running > u * total:
            return token
    raise AssertionError("u is below 1")


@settings(max_examples=60)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20),
    u=st.floats(0, BELOW_ONE),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_the_token_is_the_first_whose_cdf_exceeds_u(logits: list[float], u: float, temperature: float) -> None:
    scaled = torch.tensor(logits) / temperature
    token, logprob = choose(logits, u, temperature)
    assert token == walk_cdf(scaled, u)
    assert logprob == torch.log_softmax(scaled, -1)[token].item()


@pytest.mark.parametrize(("u", "token"), [(0.0, 0), (0.4999, 0), (0.5001, 1), (0.7999, 1), (0.8001, 2), (BELOW_ONE, 2)])
def test_the_worked_example_of_the_docs_holds(u: float, token: int) -> None:
    assert choose([math.log(0.5), math.log(0.3), math.log(0.2)], u)[0] == token


@pytest.mark.parametrize("u", [0.0, 1e-300, 0.3, 0.5, 0.999, BELOW_ONE])
def test_a_token_without_probability_is_never_chosen(u: float) -> None:
    token, logprob = choose([-INF, 0.0, -INF, -INF, 0.0, -1e30, -INF], u)
    assert token == (1 if u < 0.5 else 4)
    assert logprob == pytest.approx(math.log(0.5))


@pytest.mark.parametrize("size", [3, 7, 1000, 50_021])
def test_the_largest_u_stays_within_the_vocabulary(size: int) -> None:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(size)) * 10
    tokens, logprobs = choose_tokens(logits, torch.ones(4), torch.full((4,), BELOW_ONE, dtype=torch.float64))
    assert tokens.max() < size and bool(logprobs.isfinite().all())


def test_equal_logits_split_the_line_evenly() -> None:
    assert [choose([3.0] * 4, u)[0] for u in (0.0, 0.2499, 0.25, 0.5, 0.75, BELOW_ONE)] == [0, 0, 1, 2, 3, 3]


def test_greedy_takes_the_lowest_of_the_largest_whatever_u_is() -> None:
    for u in (0.0, 0.5, BELOW_ONE):
        token, logprob = choose([0.0, 2.0, 2.0, -1.0], u, temperature=0.0)
        assert token == 1
        assert logprob == torch.log_softmax(torch.tensor([0.0, 2.0, 2.0, -1.0]), -1)[1].item()


def test_greedy_and_sampled_rows_stand_side_by_side() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0]]).expand(3, -1)
    uniforms = torch.tensor([0.99, 0.99, 0.01], dtype=torch.float64)
    tokens, _ = choose_tokens(logits, torch.tensor([0.0, 1.0, 1.0]), uniforms)
    assert tokens.tolist() == [1, 2, 0]


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    logits = [0.0, 1.0, 2.0]
    assert choose(logits, 0.5, 0.1)[1] > choose(logits, 0.5, 1.0)[1] > choose(logits, 0.5, 10.0)[1]
    assert choose(logits, 0.95, 10.0)[1] == pytest.approx(math.log(1 / 3), abs=0.11)


def test_frequencies_are_the_probabilities() -> None:
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3])
    draws = 20_000
    uniforms = torch.from_numpy(token_uniforms(7, 0, draws))
    tokens, _ = choose_tokens(probabilities.log().expand(draws, -1), torch.ones(draws), uniforms)
    shares = torch.bincount(tokens, minlength=4) / draws
    assert (shares - probabilities).abs().max() < 5 * 0.5 / math.sqrt(draws)  # five standard deviations


@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    with pytest.raises(FloatingPointError, match="not finite"):
        choose([0.0, bad, 1.0], 0.5)
