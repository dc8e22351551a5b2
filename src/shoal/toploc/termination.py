"""The termination check: a rollout ends with the end token, or at exactly its token limit, and nowhere else.

- Rule: no end token before the last place; without one the rollout has exactly `max_tokens` tokens.
- Probability: the end token's probability h_T must exceed a bound b. An honest rollout ends at a place with h_t <= b
  with probability at most sum_t h_t 1[h_t <= b] <= b max_tokens, so b = rate / max_tokens is a bound and no guess.
  (The paper asks for 0.1, which honest rollouts miss whenever a model is in doubt about stopping.) It is weak alone,
  hence:
- Hazard: for odds of stopping that are rho times the model's,

      W_rho = rho^[ended with the end token] / prod_t (1 + (rho - 1) h_t)

  has expectation 1 at every token under honest sampling. rho > 1 grows when a rollout ends where stopping was hardly
  possible so far, rho < 1 when it goes on and on where it should have stopped. The mean over RHOS reaches 1/a with
  probability at most a, in one rollout or, multiplied, over a node's whole history.

A forced end is also far outside the seed's interval, so with seeded sampling this check is the second line: it is
what is left where numeric noise widens the interval (bfloat16), and all there is where an engine has no seeds.
"""

import math

import numpy as np

from shoal.rollout import Finish, Rollout
from shoal.toploc.finding import Check, Finding

RHOS = (0.01, 0.1, 10.0, 1e2, 1e3, 1e4, 1e5, 1e6, 1e8, 1e12, 1e16)
"""The largest is far beyond what a rate can ask for: a single end that was impossible is enough."""


def check_ending(rollout: Rollout, *, eos_id: int, max_tokens: int) -> Finding:
    """The stop rule: needs no model. The statistic counts breaches."""
    ends = np.flatnonzero(rollout.token_ids == eos_id)
    last = rollout.num_tokens - 1
    if len(early := ends[ends < last]):
        return Finding(Check.ENDING, float(len(early)), 0.0, f"token {early[0]}, an end token before the last")
    stopped = len(ends) > 0
    if not stopped and rollout.num_tokens != max_tokens:
        return Finding(Check.ENDING, 1.0, 0.0, f"token {last}, neither the end token nor the limit of {max_tokens}")
    if (rollout.finish is Finish.STOP) != stopped:
        return Finding(Check.ENDING, 1.0, 0.0, f"finish, which says {rollout.finish}")
    return Finding(Check.ENDING, 0.0, 0.0, f"token {last}")


def check_probability(eos_probs: np.ndarray, *, stopped: bool, rate: float, max_tokens: int) -> Finding:
    """Whether the end token was possible at all; (T,) probabilities of the end token."""
    where = f"token {len(eos_probs) - 1}"
    if not stopped:
        return Finding(Check.EOS, 0.0, -math.log10(rate / max_tokens), f"{where}, the limit")
    probability = float(eos_probs[-1])
    statistic = math.inf if probability == 0 else -math.log10(probability)
    return Finding(Check.EOS, statistic, -math.log10(rate / max_tokens), where)


def trace_hazard(eos_probs: np.ndarray, *, stopped: bool) -> np.ndarray:
    """Log wealth (T, rhos) after each token, from the end token's probabilities (T,)."""
    hazards = np.clip(eos_probs.astype(np.float64), 0.0, 1.0)[:, None]
    gains = -np.log1p((np.array(RHOS) - 1) * hazards)
    if stopped:
        gains[-1] += np.log(RHOS)
    return gains.cumsum(axis=0)
