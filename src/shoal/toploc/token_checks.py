"""Checks on the tokens of one rollout: where it ends, how each token was drawn, and its claimed log-probs.

**Termination.** A rollout ends with the end token, or at exactly its token limit, and nowhere else.
- Rule: no end token before the last position; without one the rollout has exactly `max_tokens` tokens.
- Probability: the end token's probability h_T must exceed a bound b. An honest rollout ends at a position with
  h_t <= b with probability at most sum_t h_t 1[h_t <= b] <= b max_tokens, so b = rate / max_tokens is a proven bound.
  (The paper asks for 0.1, which honest rollouts miss whenever a model is unsure about stopping.) It is weak alone,
  hence:
- Hazard: for odds of stopping that are rho times the model's,

      W_rho = rho^[ended with the end token] / prod_t (1 + (rho - 1) h_t)

  has expectation 1 at every token under honest sampling. rho > 1 grows when a rollout ends where stopping was nearly
  impossible, rho < 1 when it continues for long where it should have stopped. The mean over RHOS reaches 1/a with
  probability at most a, in one rollout or, multiplied, over a node's whole history.

A forced end is also far outside the seed's interval, so with seeded sampling this check is the second line of defence:
it remains where numeric noise widens the interval (bfloat16), and is the only one for engines without seeds.

**Seeded sampling.** An honest sampler chose the smallest j with CDF_j > u (engine/sampling.py), so u is in
[CDF_{j-1}, CDF_j). Under the verifier's own distribution it still is, or it is slightly outside, where rounding moved
an edge across it. Any other way of choosing the token (another model, temperature or seed, an edited text) leaves it as
far outside as there is probability in between:

    distance_t = max(CDF_{j-1} - u_t, u_t - CDF_j, 0)        in probability, CDF_last = 1

At temperature 0 there is no draw: the distance is the probability by which the likeliest token exceeds the submitted
one.

**Log-probs.** Behaviour log-probs weight the samples in training, so a worker that shifts them shifts the update. Two
statistics count: the largest difference of a token, and the signed mean. A small shift of one sign on every token adds
up over a sequence, while rounding errors cancel.
"""

import math

import numpy as np
import torch
from torch import Tensor

from shoal.rollout import Finish, Rollout
from shoal.toploc.finding import Check, CheckResult

RHOS = (0.01, 0.1, 10.0, 1e2, 1e3, 1e4, 1e5, 1e6, 1e8, 1e12, 1e16)
"""The largest is far beyond what a rate can require: a single impossible end is enough."""


def check_ending(rollout: Rollout, *, eos_id: int, max_tokens: int) -> CheckResult:
    """The stop rule: needs no model. The statistic counts breaches."""
    ends = np.flatnonzero(rollout.token_ids == eos_id)
    last = rollout.num_tokens - 1
    if len(early := ends[ends < last]):
        return CheckResult(Check.ENDING, float(len(early)), 0.0, f"token {early[0]}, an end token before the last")
    stopped = len(ends) > 0
    if not stopped and rollout.num_tokens != max_tokens:
        return CheckResult(Check.ENDING, 1.0, 0.0, f"token {last}, neither the end token nor the limit of {max_tokens}")
    if (rollout.finish is Finish.STOP) != stopped:
        return CheckResult(Check.ENDING, 1.0, 0.0, f"finish, which says {rollout.finish}")
    return CheckResult(Check.ENDING, 0.0, 0.0, f"token {last}")


def check_probability(eos_probs: np.ndarray, *, stopped: bool, rate: float, max_tokens: int) -> CheckResult:
    """Whether the end token was possible at all; `eos_probs` (T,) are its probabilities."""
    where = f"token {len(eos_probs) - 1}"
    if not stopped:
        return CheckResult(Check.EOS, 0.0, -math.log10(rate / max_tokens), f"{where}, the limit")
    probability = float(eos_probs[-1])
    statistic = math.inf if probability == 0 else -math.log10(probability)
    return CheckResult(Check.EOS, statistic, -math.log10(rate / max_tokens), where)


def trace_hazard(eos_probs: np.ndarray, *, stopped: bool) -> np.ndarray:
    """Log wealth (T, rhos) after each token, from the end token's probabilities (T,)."""
    hazards = np.clip(eos_probs.astype(np.float64), 0.0, 1.0)[:, None]
    gains = -np.log1p((np.array(RHOS) - 1) * hazards)
    if stopped:
        gains[-1] += np.log(RHOS)
    return gains.cumsum(axis=0)


def measure_distances(logprobs: Tensor, tokens: Tensor, uniforms: Tensor, greedy: Tensor) -> Tensor:
    """Float64 distances (R,) of tokens (R,), from log-probs (R, V), float64 uniforms (R,) and which rows are greedy."""
    probs = logprobs.exp()
    cdf = probs.cumsum(-1, dtype=torch.float64)
    chosen = tokens[:, None]
    high = cdf.gather(1, chosen)[:, 0]
    low = torch.where(tokens > 0, cdf.gather(1, (chosen - 1).clamp_(min=0))[:, 0], 0.0)
    total = cdf[:, -1]
    target = uniforms * total
    distances = torch.maximum(low - target, target - high).clamp_(min=0) / total
    if bool(greedy.any()):
        gaps = (probs.amax(-1) - probs.gather(1, chosen)[:, 0]).double()
        distances = torch.where(greedy, gaps, distances)
    return distances


ROUNDING = 1e-6
"""A log-prob above 0 by no more than this belongs to a certain token, and comes from computing it as a difference."""


def compare_logprobs(claimed: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
    """claimed - recomputed as float64 (T,); infinite where a claim is not a valid log-prob."""
    claims = claimed.astype(np.float64)
    possible = np.isfinite(claims) & (claims <= ROUNDING)
    gaps = np.where(possible, claims, 0.0) - recomputed.astype(np.float64)
    return np.where(possible, gaps, np.inf)
