"""The seeded-sampling check: how far the uniform of a token lies outside the token's interval.

An honest sampler chose the smallest j with CDF_j > u (engine/choice.py), so u lies in [CDF_{j-1}, CDF_j). Under the
verifier's own distribution it still does, or it lies a hair outside, where rounding moved an edge across it. Any
other way of choosing the token leaves it as far outside as there is probability between: a token of another model,
another temperature, another seed, an edited text.

    distance_t = max(CDF_{j-1} - u_t, u_t - CDF_j, 0)        in probability, CDF_last = 1

At temperature 0 there is no draw: the distance is the probability by which the likeliest token exceeds the submitted
one.
"""

import torch
from torch import Tensor


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
