"""Forgers, fitted to a model's states on other texts. They know the token ids of the text to forge, but run no model.

constant   one pattern everywhere: the most frequent among top values
channels   one pattern per channel, with the modulus set to the width, so that all tokens share them
linear     states predicted by ridge regression from the embeddings of nearby tokens, including the next ones
network    states predicted by a network with one hidden layer on the same features, fitted by gradient descent
shared     the network's, with any modulus under which one residue serves several positions
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from guesses import Forger, Guess, Limits, Texts, compare_patterns, measure_guesses, passes
from shoal.engine.base import CHUNK
from shoal.redteam.behaviours.forged_work import Bits, pick_pattern
from shoal.seeds import derive_seed
from shoal.toploc.build import find_moduli
from shoal.toploc.field import P
from shoal.toploc.proof import TOPK
from shoal.toploc.select import read_bits, select_top

Predict = Callable[[Tensor], Tensor]
"""States (..., W) from features (..., F)."""
_HIDDEN, _EPOCHS, _BATCH, _RATE = 768, 30, 256, 1e-3
_MODULI, _LIKELY = 64, 1024
_SURE, _SERVED = 9.0, 0.75
"""Target mean mantissa error, and target share of top values with matching exponent: 10 and 0.7 pass."""


def fit_forgers(train: Texts) -> dict[str, Forger]:
    """Every forger, fitted to texts other than the ones it will forge."""
    forgers: dict[str, Forger] = {"constant": fit_constant(train), "channels": fit_channels(train)}
    if train.features.shape[2]:
        linear, network = Predictor(train, fit_linear), Predictor(train, fit_network)
        forgers |= {"linear": pick_points(linear), "network": pick_points(network)}
        forgers["shared"] = share_points(network, train.width)
    return forgers


def fit_constant(train: Texts) -> Forger:
    """The most frequent exponent of top values with its median mantissa, everywhere: a polynomial of degree 0."""
    pattern = pick_pattern(select_top(train.bits, TOPK)[1].ravel())

    def forge(test: Texts) -> list[Guess]:
        return [Guess(P, np.arange(TOPK), np.full(TOPK, pattern)) for _ in test.states]

    return forge


def fit_channels(train: Texts) -> Forger:
    """The 128 channels with the most top values, each with its most frequent pattern.

    Mantissas count only where exponents match, and 38 exponents need not match: the channels whose mantissas vary most
    are sacrificed, as many as give the best pass rate on the training texts.
    """
    indices, patterns = select_top(train.bits, TOPK)
    channels, patterns = indices.ravel() % train.width, patterns.ravel()
    counts = np.bincount(channels, minlength=train.width)
    kept = np.sort(np.argsort(-counts, kind="stable")[: min(TOPK, train.width)])
    pools = [patterns[channels == channel] if counts[channel] else patterns for channel in kept]
    chosen = np.array([pick_pattern(pool) for pool in pools], dtype=np.uint16)
    spread = np.array([compare_patterns(np.full(len(pool), c), pool)[1] for pool, c in zip(pools, chosen, strict=True)])
    order = np.argsort(-spread)

    def forge_without(given_up: int) -> Forger:
        values = chosen.copy()
        values[order[:given_up]] = 0
        return lambda test: [Guess(train.width, kept, values) for _ in test.states]

    return _pick_best([forge_without(num) for num in range(0, len(kept), max(1, len(kept) // 16))], train)


def fit_linear(train: Texts) -> Predict:
    """Ridge regression; the penalty is chosen on held-out texts."""
    fit, held = _split_texts(train)
    x, y = fit.features.flatten(0, 1).double(), fit.states.flatten(0, 1).double()
    x_held, y_held = held.features.flatten(0, 1).double(), held.states.flatten(0, 1).double()
    gram, cross = x.T @ x, x.T @ y
    best, least = torch.zeros(0), float("inf")
    for penalty in (1e-3, 1e-2, 1e-1, 1.0):
        scale = penalty * gram.diagonal().mean()
        weights = torch.linalg.solve(gram + scale * torch.eye(len(gram), dtype=torch.float64), cross)
        lost = float((x_held @ weights - y_held).square().mean())
        if lost < least:
            best, least = weights.float(), lost
    return lambda features: features @ best


def fit_network(train: Texts) -> Predict:
    """One hidden layer in parallel to a linear path; keeps the best epoch on held-out texts."""
    fit, held = _split_texts(train)
    x, y = fit.features.flatten(0, 1), fit.states.flatten(0, 1)
    torch.manual_seed(derive_seed("forgery") % 2**31)
    scale = y.std(0) + 1e-6
    layers = [torch.nn.Linear(x.shape[1], _HIDDEN), torch.nn.Linear(_HIDDEN, y.shape[1])]
    skip = torch.nn.Linear(x.shape[1], y.shape[1])

    def predict(features: Tensor) -> Tensor:
        return (layers[1](F.gelu(layers[0](features))) + skip(features)) * scale

    parameters = [p for layer in (*layers, skip) for p in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=0.1)
    best, least = [p.detach().clone() for p in parameters], float("inf")
    for _ in range(_EPOCHS):
        for rows in torch.randperm(len(x)).split(_BATCH):
            optimizer.zero_grad()
            ((predict(x[rows]) - y[rows]) / scale).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            lost = float((predict(held.features.flatten(0, 1)) - held.states.flatten(0, 1)).square().mean())
            if lost < least:
                best, least = [p.detach().clone() for p in parameters], lost
    with torch.no_grad():
        for parameter, value in zip(parameters, best, strict=True):
            parameter.copy_(value)
    return predict


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction for every position of a chunk: the probability of a top value there, and its pattern."""

    chances: NDArray[np.float64]
    patterns: Bits
    errors: NDArray[np.float64]
    """expected mantissa error"""


class Predictor:
    """States are assumed Gaussian around their prediction; a top value is one beyond the typical smallest top value."""

    def __init__(self, train: Texts, fit: Callable[[Texts], Predict]) -> None:
        fitted, held = _split_texts(train)
        self._predict = fit(fitted)
        with torch.no_grad():
            self._noise = (self._predict(held.features) - held.states).flatten(0, 1).square().mean(0).sqrt()
        sizes = (select_top(train.bits, TOPK)[1] & 0x7FFF).min(axis=1)
        self._least = float(torch.from_numpy(sizes.view(np.int16)).view(torch.bfloat16).float().median())

    @torch.no_grad()
    def look(self, features: Tensor) -> Prediction:
        """The prediction on the positions of one chunk, from features (32, F)."""
        mean = self._predict(features)
        sign = torch.where(mean < 0, -1.0, 1.0)
        beyond = (self._least - mean.abs()) / self._noise
        chances = torch.special.ndtr(-beyond).clamp_(min=1e-12)
        density = torch.exp(-0.5 * beyond.square()) / (2 * torch.pi) ** 0.5
        values = sign * (mean.abs() + self._noise * density / chances)
        patterns = read_bits(values).view(np.uint16).ravel()
        binades = torch.exp2(values.abs().log2().floor())
        errors = 0.8 * 128 * self._noise / binades  # the mean of |x| is 0.8 sigma; in the tail x varies even less
        return Prediction(chances.double().numpy().ravel(), patterns, errors.double().numpy().ravel())


def pick_points(predictor: Predictor) -> Forger:
    """The 128 positions where top values are likeliest, with the modulus of an honest prover."""

    def forge(test: Texts) -> list[Guess]:
        guesses = []
        for rows in test.features:
            prediction = predictor.look(rows)
            places = np.argsort(-prediction.chances, kind="stable")[:TOPK]
            modulus = int(find_moduli(places[None])[0])
            guesses.append(Guess(modulus, places % modulus, prediction.patterns[places]))
        return guesses

    return forge


def share_points(predictor: Predictor, width: int) -> Forger:
    """The same, with any modulus under which one residue serves several likely positions of similar patterns."""
    rng = np.random.default_rng(derive_seed("moduli"))
    size = min(P, CHUNK * width)
    moduli = [*(width * step for step in range(1, CHUNK + 1)), *rng.integers(TOPK, size, _MODULI)]

    def forge(test: Texts) -> list[Guess]:
        outlooks = [predictor.look(rows) for rows in test.features]
        return [max((share_residues(o, int(m)) for m in moduli if m <= P), key=lambda g: g[0])[1] for o in outlooks]

    return forge


def share_residues(prediction: Prediction, modulus: int) -> tuple[tuple[float, float], Guess]:
    """Score of a modulus, and its guess: 128 residues, each with the mean pattern of its most frequent exponent.

    The residues with the least certain mantissas are sacrificed until the expected mean error passes, within the
    number of exponents that may differ.
    """
    places = np.argsort(-prediction.chances, kind="stable")[:_LIKELY]
    patterns, chances = prediction.patterns[places].astype(np.int64), prediction.chances[places]
    keys, inverse = np.unique((places % modulus << 9) | (patterns >> 7), return_inverse=True)
    weights = np.bincount(inverse, chances)
    means = np.bincount(inverse, chances * patterns) / weights
    errors = np.bincount(inverse, chances * np.hypot(patterns - means[inverse], prediction.errors[places])) / weights
    order = np.argsort(-weights, kind="stable")
    _, first = np.unique(keys[order] >> 9, return_index=True)  # the heaviest exponent of each residue
    best = order[np.sort(first)[:TOPK]]
    best = best[np.argsort(errors[best])]
    served = np.cumsum(weights[best])
    expected = np.cumsum(weights[best] * errors[best]) / served
    keep = max(int((expected <= _SURE).sum()), int((served < _SERVED * chances.sum()).sum()) + 1)
    values = np.where(np.arange(len(best)) < keep, np.rint(means[best]), 0)
    guess = Guess(modulus, keys[best] >> 9, values.astype(np.uint16))
    last = min(keep, len(best)) - 1
    return (-max(float(expected[last]), _SURE), float(served[last])), guess


def _pick_best(forgers: Sequence[Forger], texts: Texts) -> Forger:
    """The forger that passes the published rule most often; ties go to the one that comes closest."""

    def rank(forge: Forger) -> tuple[float, float]:
        scores = measure_guesses(forge(texts), texts)
        excess = np.maximum(scores.exponents / 38, np.minimum(scores.means, 128) / 10)
        return float(passes("published", scores, Limits(0, 0, 0)).mean()), -float(excess.mean())

    return max(forgers, key=rank)


def _split_texts(texts: Texts) -> tuple[Texts, Texts]:
    """Four fifths for fitting, the rest held out."""
    cut = len(texts.states) * 4 // 5
    return Texts(texts.states[:cut], texts.features[:cut]), Texts(texts.states[cut:], texts.features[cut:])
