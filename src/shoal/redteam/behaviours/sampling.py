"""Ways of choosing tokens other than the seed's draw, with the signature that an engine expects.

All of them state the log-probs that honest sampling would have recorded: a worker with the true weights has them.
Positions of a rollout are identified by their draws: 53 bits distinguish them, whatever row an engine puts them in.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.engine.sampling import Choose, choose_tokens
from shoal.group import GroupPlan
from shoal.redteam.behaviours.forged_work import SubstitutingBehaviour, TokensById
from shoal.rollout import Request
from shoal.seeds import token_uniforms
from shoal.worker.behaviour import FinishedWork


def claim_tokens(logits: Tensor, temperatures: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens with the log-probs that honest sampling would have recorded for them."""
    logprobs = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def plan_uniforms(requests: Sequence[Request], places: Mapping[str, Sequence[int]]) -> Tensor:
    """The draws at the given token positions of each request."""
    draws = [token_uniforms(r.seed, 0, r.max_tokens)[list(places.get(r.id, ()))] for r in requests]
    return torch.from_numpy(np.concatenate(draws))


def choose_cooler(factor: float) -> Choose:
    """Sample at `factor` times the temperature."""

    def choose(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        return claim_tokens(logits, temperatures, choose_tokens(logits, temperatures * factor, uniforms)[0])

    return choose


def choose_nucleus(share: float) -> Choose:
    """Sample from the likeliest tokens whose total probability is at least `share`."""

    def choose(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        tokens = choose_tokens(keep_nucleus(logits, share), temperatures, uniforms)[0]
        return claim_tokens(logits, temperatures, tokens)

    return choose


def choose_likeliest(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest."""
    return claim_tokens(logits, temperatures, logits.argmax(-1))


def choose_others(planned: Tensor) -> Choose:
    """At the planned draws, a token other than the seed's, sampled from the rest."""

    def choose(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        tokens = choose_tokens(logits, temperatures, uniforms)[0]
        without = logits.scatter(1, tokens[:, None], float("-inf"))
        others = choose_tokens(without, temperatures, (uniforms + 0.5) % 1.0)[0]
        return claim_tokens(logits, temperatures, torch.where(torch.isin(uniforms, planned), others, tokens))

    return choose


class CloseChoice:
    """If other tokens are within `tolerance` of the draw, choose the likeliest of them.

    `places` counts the chosen tokens, `openings` the positions at which there was an alternative.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self.places = self.openings = 0

    def __call__(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        tokens = choose_tokens(logits, temperatures, uniforms)[0]
        probs = torch.softmax(logits / temperatures[:, None], -1).double()
        high = probs.cumsum(-1)
        distances = torch.maximum(high - probs - uniforms[:, None], uniforms[:, None] - high)
        near = (distances <= self._tolerance).scatter(1, tokens[:, None], False)
        open_rows = near.any(-1)
        self.places += len(tokens)
        self.openings += int(open_rows.sum())
        others = probs.masked_fill(~near, -1.0).argmax(-1)
        return claim_tokens(logits, temperatures, torch.where(open_rows, others, tokens))


def keep_nucleus(logits: Tensor, share: float) -> Tensor:
    """Logits (R, V) of the likeliest tokens whose total probability is at least `share`; the rest is -inf."""
    order = logits.argsort(dim=-1, descending=True)
    probs = torch.softmax(logits, -1).gather(1, order)
    before = probs.cumsum(-1) - probs
    cut = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= share)
    return logits.masked_fill(cut, float("-inf"))


class ChoosingBehaviour(SubstitutingBehaviour):
    """Generates the leased requests again, with a different choice of tokens."""

    choose: Callable[..., tuple[Tensor, Tensor]] = staticmethod(choose_tokens)
    """honest by default"""

    def substitute(self, plans: Sequence[GroupPlan], work: FinishedWork) -> TokensById:
        """The tokens chosen this way."""
        return self.decode(plans, self.choose)
