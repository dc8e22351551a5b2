"""Early stop: completions break off half-way, without an end token, as if they had reached their longest length."""

from collections.abc import Sequence

from shoal.group import Plan
from shoal.recipe import Recipe
from shoal.redteam.forge import RetellingAuthor, Retold, list_rollouts
from shoal.worker.author import Author, Work


class BreakingAuthor(RetellingAuthor):
    """Saves half of the writing."""

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """The first half of each; one of a single token is left as it is."""
        rollouts = list_rollouts(work)
        return {rollout.id: rollout.token_ids[: max(1, rollout.num_tokens // 2)] for rollout in rollouts}


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (BreakingAuthor(recipe),)
