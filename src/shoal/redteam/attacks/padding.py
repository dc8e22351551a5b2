"""Padding: completions go on after their end token to the longest length, to be paid for more tokens."""

from collections.abc import Sequence

import numpy as np

from shoal.group import Plan
from shoal.recipe import Recipe
from shoal.redteam.forge import RetellingAuthor, Retold, list_rollouts
from shoal.worker.author import Author, Work


class PaddingAuthor(RetellingAuthor):
    """Repeats each completion until it is as long as may be."""

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """The tokens, again and again."""
        return {rollout.id: np.resize(rollout.token_ids, self.recipe.max_tokens) for rollout in list_rollouts(work)}


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (PaddingAuthor(recipe),)
