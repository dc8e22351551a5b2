"""A small model writes, the true one only reads: a prefill is cheaper than writing, and proves the true weights."""

from collections.abc import Sequence
from pathlib import Path

from shoal.group import Plan
from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.redteam.altered import shrink_policy
from shoal.redteam.forge import RetellingAuthor, Retold, list_rollouts, list_tokens
from shoal.worker.author import Author, Work


class LaunderingAuthor(RetellingAuthor):
    """Half of the layers write; log-probs and proofs are those of the true model for the same text."""

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The small policy; the true one is kept."""
        return shrink_policy(super().open_policy(version, folder))

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """What the small one wrote."""
        return list_tokens(list_rollouts(work))


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (LaunderingAuthor(recipe),)
