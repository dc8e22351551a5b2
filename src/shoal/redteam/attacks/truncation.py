"""Truncation: a completion is cut and ends with a forced end token, which saves half of the tokens."""

from collections.abc import Sequence

from shoal.group import Plan
from shoal.recipe import Recipe
from shoal.redteam.forge import RetellingAuthor, Retold, list_rollouts
from shoal.worker.author import Author, Work


class CuttingAuthor(RetellingAuthor):
    """Ends each rollout at half its length. One of a single token stays as it is."""

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """The first halves."""
        rollouts = list_rollouts(work)
        return {r.id: [*r.token_ids[: r.num_tokens // 2].tolist(), self.policy.eos_id] for r in rollouts}


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (CuttingAuthor(recipe),)
