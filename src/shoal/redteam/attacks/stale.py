"""Old weights: who never downloads a new version saves all of its traffic. Claimed as the newest ones."""

from pathlib import Path

from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.toploc.calibration import hash_weights
from shoal.worker.author import Author


class StaleAuthor(Author):
    """Goes on with the first version that it ever held."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._first: Policy | None = None
        self.is_honest = True

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The first one, whatever is asked for; which is honest while nothing was trained since."""
        newest = super().open_policy(version, folder)
        self._first = self._first or newest
        self.is_honest = hash_weights(newest.model) == hash_weights(self._first.model)
        return self._first


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (StaleAuthor(recipe),)
