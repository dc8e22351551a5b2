"""One's own old work: written once, handed in for every later lease too."""

from shoal.recipe import Recipe
from shoal.redteam.copying import Copier, Leak
from shoal.worker.author import Author, Work


class OldWorkAuthor(Copier):
    """Does the first lease honestly, and lives on it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe, leak := Leak())
        self._own = leak

    def finish(self, work: Work) -> Work:
        """The first work, proven anew."""
        if self._own.is_dry:
            self._own.add(work)
            return work
        return super().finish(work)


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (OldWorkAuthor(recipe),)
