"""Loops: a completion goes round and round up to the longest length, to be paid for more tokens at no cost."""

from collections.abc import Sequence

from shoal.group import Plan
from shoal.recipe import Recipe
from shoal.redteam.forge import RetellingAuthor, Retold, list_rollouts
from shoal.worker.author import Author, Work


class LoopingAuthor(RetellingAuthor):
    """Repeats what was written, without its end token, until there is no more room."""

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """The repetitions."""
        return {rollout.id: self._repeat(rollout.token_ids.tolist()) for rollout in list_rollouts(work)}

    def _repeat(self, ids: list[int]) -> list[int]:
        text = [token for token in ids if token != self.policy.eos_id] or self.spell(" ")[:1]
        longest = self.recipe.max_tokens
        return (text * longest)[:longest]


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (LoopingAuthor(recipe),)
