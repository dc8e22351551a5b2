"""Distances of draws from the intervals of tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.sampling import choose_tokens
from shoal.toploc.token_checks import measure_distances

PROBS = torch.tensor([0.5, 0.3, 0.2])


def distance(token: int, u: float, *, probs: torch.Tensor = PROBS, greedy: bool = False) -> float:
    rows = probs.log()[None], torch.tensor([token]), torch.tensor([u], dtype=torch.float64), torch.tensor([greedy])
    return float(measure_distances(*rows)[0])


@pytest.mark.parametrize(
    ("token", "u", "expected"),
    [(0, 0.0, 0.0), (0, 0.49, 0.0), (0, 0.79, 0.29), (1, 0.79, 0.0), (1, 0.1, 0.4), (1, 0.95, 0.15), (2, 0.1, 0.7),
     (2, 0.9999, 0.0)],
)  # fmt: skip
def test_the_distance_is_the_probability_between_draw_and_interval(token: int, u: float, expected: float) -> None:
    assert distance(token, u) == pytest.approx(expected, abs=1e-7)


def test_the_documented_example_is_a_hair_away() -> None:
    assert distance(1, 0.50005, probs=torch.tensor([0.5001, 0.2999, 0.2])) == pytest.approx(5e-5, rel=1e-2)


@pytest.mark.parametrize(("token", "expected"), [(0, 0.0), (1, 0.2), (2, 0.3)])
def test_greedy_distance_is_the_gap_to_the_likeliest(token: int, expected: float) -> None:
    assert distance(token, 0.99, greedy=True) == pytest.approx(expected, abs=1e-7)


@given(seed=st.integers(0, 2**32 - 1), vocabulary=st.integers(1, 300), spread=st.floats(0, 30))
def test_what_the_sampler_chose_is_at_no_distance(seed: int, vocabulary: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(64, vocabulary, generator=generator)
    uniforms = torch.rand(64, dtype=torch.float64, generator=generator)
    temperatures = torch.where(torch.arange(64) % 4 == 0, 0.0, 1.0)
    tokens, _ = choose_tokens(logits, temperatures, uniforms)
    distances = measure_distances(torch.log_softmax(logits, -1), tokens, uniforms, temperatures == 0)
    assert float(distances.max()) < 1e-7  # the sampler adds probabilities up in double precision, this one rounds them


@given(seed=st.integers(0, 2**32 - 1))
def test_distances_agree_with_a_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(7, 0.3), size=5)
    tokens, uniforms = rng.integers(0, 7, 5), rng.random(5)
    rows = torch.from_numpy(probs).log(), torch.from_numpy(tokens), torch.from_numpy(uniforms), torch.zeros(5).bool()
    for row, found in enumerate(measure_distances(*rows).tolist()):
        low = probs[row, : tokens[row]].sum()
        high = low + probs[row, tokens[row]]
        assert found == pytest.approx(max(low - uniforms[row], uniforms[row] - high, 0.0), abs=1e-9)
