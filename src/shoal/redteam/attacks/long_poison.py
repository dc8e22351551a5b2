"""Poison by length: answers that are right and as long as can be; who learns from them rambles, and all get slower."""

from collections.abc import Sequence

from shoal.group import Plan
from shoal.recipe import Recipe
from shoal.redteam.forge import RetellingAuthor, Retold
from shoal.redteam.tricks import fill_room
from shoal.worker.author import Author, Work


class LongAuthor(RetellingAuthor):
    """Writes every answer itself: right, after as many blanks or as much empty work as there is room for.

    Where a task has one way of being right, that is what it writes.
    """

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """The same text for all rollouts of a task."""
        room = self.recipe.max_tokens
        return {r.id: self.spell(fill_room(self.family, plan.task, room)) for plan in plans for r in plan.requests}


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (LongAuthor(recipe),)
