"""The log-prob check: what the worker says the tokens' log-probs were, against what the verifier finds.

Behaviour log-probs weigh the samples in training, so a worker who shifts them shifts the update. Beside the largest
difference of a token, the signed mean counts: a small shift of one sign on every token adds up over a sequence where
rounding cancels.
"""

import numpy as np

ROUNDING = 1e-6
"""A log-prob above 0 by no more than this is one of a sure token, computed as a difference."""


def compare_logprobs(claimed: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
    """claimed - recomputed as float64 (T,); infinite where a claim is no log-prob at all."""
    claims = claimed.astype(np.float64)
    possible = np.isfinite(claims) & (claims <= ROUNDING)
    gaps = np.where(possible, claims, 0.0) - recomputed.astype(np.float64)
    return np.where(possible, gaps, np.inf)
