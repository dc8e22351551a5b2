"""Best of n: several completions are drawn, and the one with the best reward is handed in as the seed's."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from shoal.group import Plan
from shoal.recipe import Recipe
from shoal.redteam.forge import RetellingAuthor, Retold
from shoal.rollout import Request
from shoal.seeds import derive_seed
from shoal.worker.author import Author, Work
from shoal.worker.intake import Order

TRIES = 4


class BestAuthor(RetellingAuthor):
    """Three more seeds for each rollout. Where none does better than the right one, that one's is handed in."""

    def plan(self, order: Order, tokenizer: PreTrainedTokenizerBase) -> list[Plan]:
        """Plans with all tries of a request side by side, the honest one first."""
        plans = super().plan(order, tokenizer)
        return [replace(p, requests=tuple(t for r in p.requests for t in list_tries(r, TRIES))) for p in plans]

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """The best try of each."""
        best = {}
        for plan, group in zip(plans, work.groups, strict=True):
            for place, request in enumerate(plan.requests):
                first = TRIES * place
                chosen = first + int(group.rewards[first : first + TRIES].argmax())  # of equals the first
                best[request.id] = group.rollouts[chosen].token_ids
        return best


def list_tries(request: Request, count: int) -> list[Request]:
    """The request, and the same with other seeds."""
    others = range(1, count)
    return [
        request,
        *(replace(request, id=f"{request.id}+{n}", seed=derive_seed("try", n, request.seed)) for n in others),
    ]


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (BestAuthor(recipe),)
