"""The ways of choosing tokens do what they say, and claim the log-probs of honest sampling."""

import math

import pytest
import torch

from shoal.redteam.behaviours.sampling import (
    CloseChoice,
    choose_cooler,
    choose_likeliest,
    choose_nucleus,
    choose_others,
    claim_tokens,
    keep_nucleus,
    plan_uniforms,
)
from shoal.rollout import Request
from shoal.seeds import token_uniforms

LOGITS = torch.log(torch.tensor([[0.1, 0.5, 0.15, 0.25]]))
ONE = torch.tensor([1.0])


def draw(u: float) -> torch.Tensor:
    return torch.tensor([u], dtype=torch.float64)


def test_a_nucleus_is_the_fewest_likeliest_tokens_that_reach_the_share() -> None:
    assert keep_nucleus(LOGITS, 0.7).isfinite().tolist() == [[False, True, False, True]]
    assert keep_nucleus(LOGITS, 0.76).isfinite().tolist() == [[False, True, True, True]]


def test_claimed_logprobs_are_those_of_honest_sampling() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    _, logprobs = claim_tokens(logits, ONE, torch.tensor([1]))
    assert float(logprobs) == pytest.approx(math.log(0.75))


def test_planned_draws_are_those_of_their_places() -> None:
    first, second = (Request(id=name, prompt_ids=(1,), seed=seed, max_tokens=8) for name, seed in (("a", 1), ("b", 2)))
    assert plan_uniforms([first, second], {"b": [3, 0]}).tolist() == token_uniforms(2, 0, 4)[[3, 0]].tolist()


@pytest.mark.parametrize(
    ("choose", "u", "token"),
    [
        (choose_likeliest, 0.99, 1),
        (choose_nucleus(0.7), 0.05, 1),  # the seed would have drawn token 0
        (choose_nucleus(0.7), 0.7, 3),
        (choose_cooler(0.1), 0.99, 1),
        (choose_others(draw(0.3)), 0.3, 3),  # the seed's is 1; 0.8 of the rest
        (choose_others(draw(0.4)), 0.3, 1),
    ],
)
def test_a_choice_takes_its_token_and_claims_the_honest_logprob(choose, u: float, token: int) -> None:
    tokens, logprobs = choose(LOGITS, ONE, draw(u))
    assert tokens.tolist() == [token]
    assert float(logprobs) == pytest.approx(float(LOGITS[0, token]))


@pytest.mark.parametrize(
    ("u", "token"),
    [(0.6 + 1e-4, 1), (0.6 - 1e-4, 2), (0.6 + 1e-2, 2), (0.3, 1), (0.1 - 1e-4, 1)],
)
def test_the_other_side_of_an_edge_is_taken_where_it_is_close(u: float, token: int) -> None:
    assert CloseChoice(1e-3)(LOGITS, ONE, draw(u))[0].tolist() == [token]


def test_of_several_close_tokens_the_likeliest_is_taken_and_openings_are_counted() -> None:
    logits = torch.log(torch.tensor([[0.5, 1e-6, 0.1, 0.4 - 1e-6]])).expand(3, -1)
    choice = CloseChoice(1e-4)
    tokens, _ = choice(logits, torch.ones(3), torch.tensor([0.5 - 1e-5, 0.25, 0.99], dtype=torch.float64))
    assert tokens.tolist() == [2, 0, 3]
    assert (choice.places, choice.openings) == (3, 1)
