"""Guessed proofs are scored as by a verifier, and honest proofs are recognised."""

import numpy as np
import torch

from forgers import Prediction, fit_channels, fit_constant, share_residues
from guesses import Guess, Limits, Texts, compare_patterns, interpolate_guess, measure_guesses, passes
from shoal.redteam.behaviours.forged_work import pick_pattern
from shoal.toploc.field import P, Vandermonde, to_canonical
from shoal.toploc.select import select_top

LIMITS = Limits(2.0, 4 / 128, 0.0)


def draw_texts(num: int, width: int, seed: int) -> Texts:
    states = torch.randn(num, 32, width, generator=torch.Generator().manual_seed(seed))
    return Texts(states.bfloat16().float(), torch.zeros(num, 32, 0))


def test_patterns_are_compared_field_by_field() -> None:
    own = np.array([0x4000, 0x4010, 0x4020, 0x3F80], dtype=np.uint16)
    claimed = np.array([0x4000, 0x4012, 0xC028, 0x4080], dtype=np.uint16)
    assert compare_patterns(claimed, own) == (1, 10 / 3, 2.0, 1)
    assert compare_patterns(own ^ np.uint16(0x8000), own) == (0, 0.0, 0.0, 4)


def test_the_picked_pattern_has_the_commonest_exponent_and_its_median_mantissa() -> None:
    pool = np.array([0x4001, 0x4005, 0xC00F, 0x3F80, 0x3F90], dtype=np.uint16)
    assert pick_pattern(pool) == 0x4005


def test_a_guess_takes_its_patterns_at_its_residues() -> None:
    guess = Guess(97, np.array([3, 50, 96]), np.array([7, 0x4000, 0xC001], dtype=np.uint16))
    coefficients = interpolate_guess(guess)
    assert len(coefficients) == 128
    values = Vandermonde(guess.residues[None].astype(np.float64), 128).evaluate(coefficients[None].astype(np.float64))
    assert to_canonical(values)[0].tolist() == guess.patterns.tolist()


def test_an_honest_commitment_passes_every_rule() -> None:
    texts = draw_texts(3, 64, 1)
    indices, patterns = select_top(texts.bits, 128)
    scores = measure_guesses([Guess(P, i, p) for i, p in zip(indices, patterns, strict=True)], texts)
    assert scores.exponents.tolist() == [0, 0, 0]
    assert passes("all", scores, LIMITS).all()


def test_a_constant_passes_the_published_rule_on_gaussian_states_and_not_ours() -> None:
    train, test = draw_texts(4, 5120, 1), draw_texts(4, 5120, 2)
    scores = measure_guesses(fit_constant(train)(test), test)
    assert passes("published", scores, LIMITS).all()
    assert scores.void.all()
    assert (scores.outside == 1).all()
    for rule in ("form", "outside", "sign", "calibrated", "all"):
        assert not passes(rule, scores, LIMITS).any(), rule


def test_channel_patterns_pass_the_published_rule_where_few_channels_dominate() -> None:
    texts = [draw_texts(6, 96, seed) for seed in (1, 2)]
    for part in texts:
        part.states[..., :5] = torch.tensor([30.0, -25.0, 20.0, 33.0, -28.0]) * (1 + 0.02 * part.states[..., :5])
    scores = measure_guesses(fit_channels(texts[0])(texts[1]), texts[1])
    assert passes("published", scores, LIMITS).all()
    assert not passes("form", scores, LIMITS).any()
    assert not passes("calibrated", scores, LIMITS).any()


def test_one_residue_serves_places_of_like_patterns() -> None:
    chances = np.array([0.9, 0.8, 0.1, 0.7])
    patterns = np.array([0x4000, 0x4100, 0x4004, 0x4002], dtype=np.uint16)
    _, guess = share_residues(Prediction(chances, patterns, np.zeros(4)), 3)  # positions 0 and 3 share residue 0
    served = dict(zip(guess.residues.tolist(), guess.patterns.tolist(), strict=True))
    assert served[0] in (0x4000, 0x4001, 0x4002)
    assert served[1] == 0x4100
