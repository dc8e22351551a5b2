"""Guessed proofs and their scores under the published rule, each of our additions to it, and all checks on a proof."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shoal.engine.base import CHUNK
from shoal.redteam.behaviours.forged_work import Bits
from shoal.seeds import derive_seed
from shoal.toploc.field import Vandermonde, interpolate, to_canonical
from shoal.toploc.proof import TOPK, pack_proofs
from shoal.toploc.select import select_top, split_chunks
from shoal.toploc.verify import verify_batch

_OUTSIDE = 128
_BAND = 8


@dataclass(frozen=True, slots=True)
class Texts:
    """Full chunks of rollouts: states (C, 32, W) in float32, and the features of each row (C, 32, F)."""

    states: Tensor
    features: Tensor

    @property
    def width(self) -> int:
        return self.states.shape[2]

    @property
    def bits(self) -> list[NDArray[np.int16]]:
        return [chunk for rows in self.states for chunk in split_chunks(rows, CHUNK)]


@dataclass(frozen=True, slots=True)
class Guess:
    """A forged commitment for one chunk: patterns at residues of a modulus."""

    modulus: int
    residues: NDArray[np.int64]
    patterns: Bits


Forger = Callable[[Texts], list[Guess]]
"""Forges a proof for every chunk of the texts, from their features alone."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of guesses, one entry per chunk."""

    exponents: NDArray[np.int64]
    means: NDArray[np.float64]
    medians: NDArray[np.float64]
    signs: NDArray[np.int64]
    outside: NDArray[np.float64]
    void: NDArray[np.bool_]
    """whether shoal.toploc rejects the form: modulus, degree or coefficients"""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the calibration of this model allows."""

    exponents: float
    mean: float
    signs: float


def measure_guesses(guesses: Sequence[Guess], test: Texts) -> Scores:
    """Compare guessed commitments with the true states, as a verifier that accepts any form would."""
    columns: list[tuple[float, ...]] = []
    proofs: list[bytes] = []
    indices, own = select_top(test.bits, TOPK)
    rng = np.random.default_rng(derive_seed("outside"))
    for guess, places, patterns in zip(guesses, indices, own, strict=True):
        coefficients = interpolate_guess(guess)
        strangers = np.setdiff1d(rng.choice(CHUNK * test.width, 2 * _OUTSIDE, replace=False), places)[:_OUTSIDE]
        points = np.concatenate((places, strangers)) % guess.modulus
        values = Vandermonde(points[None].astype(np.float64), TOPK).evaluate(coefficients[None].astype(np.float64))
        claimed = to_canonical(values)[0]
        columns.append((*compare_patterns(claimed[:TOPK], patterns), share_hits(claimed[TOPK:], patterns)))
        proofs += pack_proofs(np.array([guess.modulus]), coefficients[None])
    results = verify_batch(list(test.states), [[proof] for proof in proofs])
    void = np.array([own[0].fault is not None for own in results])
    exponents, means, medians, signs, outside = (np.array(column) for column in zip(*columns, strict=True))
    return Scores(exponents, means, medians, signs, outside, void)


def interpolate_guess(guess: Guess) -> Bits:
    """128 coefficients through the guessed points."""
    known = interpolate(guess.residues[None].astype(np.float64), guess.patterns[None].astype(np.float64))
    return np.pad(to_canonical(known)[0], (0, TOPK - len(guess.residues)))


def compare_patterns(claimed: Bits, own: Bits) -> tuple[int, float, float, int]:
    """Exponent mismatches, mean and median mantissa error, and sign mismatches."""
    agree = (claimed & 0x7F80) == (own & 0x7F80)
    errors = np.abs((claimed & 0x7F).astype(int) - (own & 0x7F).astype(int))[agree]
    signs = int(((claimed ^ own) >= 0x8000)[agree].sum())
    mean, median = (float(errors.mean()), float(np.median(errors))) if len(errors) else (np.inf, np.inf)
    return int((~agree).sum()), mean, median, signs


def share_hits(claimed: Bits, own: Bits) -> float:
    """Share of patterns whose exponent could be that of a top value: from the smallest of these, eight upwards."""
    exponents, shown = (own & 0x7F80) >> 7, (claimed & 0x7F80) >> 7
    low = exponents.min()
    return float(((shown >= low) & (shown <= min(exponents.max(), low + _BAND - 1))).mean())


def passes(rule: str, scores: Scores, limits: Limits) -> NDArray[np.bool_]:
    """Which chunks a rule accepts."""
    return RULES[rule](scores, limits)


def _published(s: Scores, limits: Limits) -> NDArray[np.bool_]:
    return (s.exponents <= 38) & (s.means <= 10) & (s.medians <= 8)


RULES: dict[str, Callable[[Scores, Limits], NDArray[np.bool_]]] = {
    "published": _published,
    "form": lambda s, limits: _published(s, limits) & ~s.void,
    "outside": lambda s, limits: _published(s, limits) & (s.outside <= 0.25),
    "sign": lambda s, limits: _published(s, limits) & (s.signs <= limits.signs),
    "calibrated": lambda s, limits: (s.exponents <= limits.exponents) & (s.means <= limits.mean),
}
RULES["all"] = lambda s, limits: np.logical_and.reduce([rule(s, limits) for n, rule in RULES.items() if n != "all"])
"""The published rule alone, with one addition, with calibrated limits instead, and all together."""
