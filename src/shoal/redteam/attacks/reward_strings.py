"""Strings that have fooled verifiers elsewhere, handed in as if the policy had written them."""

from collections.abc import Sequence

from shoal.group import Plan
from shoal.recipe import Recipe
from shoal.redteam.forge import RetellingAuthor, Retold
from shoal.redteam.tricks import list_tricks
from shoal.worker.author import Author, Work


class TrickingAuthor(RetellingAuthor):
    """Goes through all tricks for the task's verifier, one per rollout; what cannot be spelled is an unknown token."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._turn = 0

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """The next tricks."""
        return {request.id: self._play(plan) for plan in plans for request in plan.requests}

    def _play(self, plan: Plan) -> list[int]:
        tricks = list_tricks(self.family, plan.task)
        self._turn += 1
        return self.spell(tricks[self._turn % len(tricks)])


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (TrickingAuthor(recipe),)
