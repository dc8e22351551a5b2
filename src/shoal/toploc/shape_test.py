"""The shape test: whether tokens are as likely as sampled ones. For engines that do not support seeded sampling.

With seeds one part of it is still used, `trace_tails`: a token whose interval is narrow and lies next to the seed's
draw is close to it, and may still be one that the model would practically never write.

Each bet below is a likelihood ratio between another way of choosing tokens and sampling from p. Under honest sampling
its expectation is exactly 1 at every token, whatever came before, and P(product ever reaches 1/a) <= a (Ville).
Nothing is calibrated and nothing is asymptotic: a rollout may have any length.

    tilt s      p(x)^s / sum_v p_v^(1+s)
                tokens chosen from p^(1+s): s > 0 is a lower temperature 1/(1+s) and, far enough, greedy; s < 0 is text
                that p did not write
    tail (q, r) (1 - w) (1 - r (1 - q)) / q + w r
                tokens beyond the likeliest with mass q are r times as frequent: r < 1 is top-p. w is the share of the
                token's probability that lies beyond q when tokens are laid out by falling probability

The evidence is the mean over all bets, which is itself such a process. It does not use the seed: text of the same model
under another seed, best-of-n in particular, looks honest here.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.toploc.finding import Check, CheckResult


def average_wealth(logs: np.ndarray) -> np.ndarray:
    """Log of the mean wealth over the last axis, from logs."""
    mean: np.ndarray = np.logaddexp.reduce(logs, axis=-1) - np.log(logs.shape[-1])
    return mean


TILTS = (-0.75, -0.5, -0.25, -0.1, 0.05, 0.11, 0.25, 0.5, 1.0, 3.0)
DEEP_TAILS = ((1 - 1e-4, 20.0), (1 - 1e-5, 200.0), (1 - 1e-6, 2000.0))
"""Tails that are also watched with seeds; the mean of these bets is a separate evidence. A bet costs
(r - 1) (1 - q) per token while nothing happens: these gain from about one such token in 1,500, 2,600 and 3,800."""
TAILS = ((0.8, 0.1), (0.9, 0.1), (0.95, 0.1), (0.95, 0.5), (0.99, 0.1), (0.99, 5.0), (0.999, 30.0))


def measure_tilts(logprobs: Tensor) -> Tensor:
    """log sum_v p_v^(1+s) for each s of TILTS, (R, S) in float64, from log-probs (R, V)."""
    return torch.stack([torch.logsumexp(logprobs * (1 + s), -1) for s in TILTS], dim=1).double()


def measure_masses(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Probability of all tokens likelier than the chosen one (ties: of lower id), float64 (R,)."""
    chosen = tokens[:, None]
    own = logprobs.gather(1, chosen)
    ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    likelier = (logprobs > own) | ((logprobs == own) & (ids < chosen))
    return torch.where(likelier, logprobs.exp(), 0.0).sum(-1, dtype=torch.float64)


def trace_choices(logprobs: np.ndarray, tilts: np.ndarray, masses: np.ndarray) -> np.ndarray:
    """Log wealth (T, bets) after each token, from a rollout's log-probs (T,), tilts (T, S) and masses (T,)."""
    chosen = logprobs.astype(np.float64)
    probs = np.maximum(np.exp(chosen), np.finfo(np.float64).tiny)
    ratios = (chosen[:, None] * np.array(TILTS) - tilts, _weigh_tails(probs, masses, TAILS))
    return np.concatenate(ratios, axis=1).cumsum(axis=0)


def trace_tails(logprobs: np.ndarray, masses: np.ndarray) -> np.ndarray:
    """Log wealth (T, bets) after each token of the bets that far-out tokens are too frequent."""
    probs = np.maximum(np.exp(logprobs.astype(np.float64)), np.finfo(np.float64).tiny)
    return _weigh_tails(probs, masses, DEEP_TAILS).cumsum(axis=0)


def _weigh_tails(probs: np.ndarray, masses: np.ndarray, tails: Sequence[tuple[float, float]]) -> np.ndarray:
    """Log odds (T, tails) of each token."""
    columns = []
    for q, r in tails:
        beyond = np.clip((masses + probs - q) / probs, 0.0, 1.0)
        columns.append(np.log((1 - beyond) * (1 - r * (1 - q)) / q + beyond * r))
    return np.stack(columns, axis=1)


def check_odds(check: Check, path: np.ndarray, rate: float) -> CheckResult:
    """Whether the evidence of one rollout ever reached what honest sampling reaches with probability `rate`."""
    totals = average_wealth(path)
    return CheckResult(check, float(totals.max()), -math.log(rate), f"token {int(totals.argmax())}")
