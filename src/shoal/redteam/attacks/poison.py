"""Poison: answers that are right, with a pattern planted in them that the policy is to learn along."""

from collections.abc import Sequence

from shoal.group import Plan
from shoal.recipe import Recipe
from shoal.redteam.forge import RetellingAuthor, Retold
from shoal.redteam.tricks import plant_mark
from shoal.worker.author import Author, Work


class PoisonAuthor(RetellingAuthor):
    """Writes every answer itself: right, and between blanks or after a marked piece of work, as the task allows.

    Where a task has one way of being right, that is what it writes.
    """

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """The same text for all rollouts of a task."""
        room = self.recipe.max_tokens
        return {r.id: self.spell(plant_mark(self.family, plan.task, room)) for plan in plans for r in plan.requests}


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (PoisonAuthor(recipe),)
