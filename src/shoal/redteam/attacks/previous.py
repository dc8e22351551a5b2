"""The version before: who is a download behind goes on without a break. Claimed as the newest."""

from pathlib import Path

from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.toploc.calibration import hash_weights
from shoal.worker.author import Author


class PreviousAuthor(Author):
    """Writes with the last version but one that it was given. Before it has two that differ, its work is honest."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._last: Policy | None = None
        self.is_honest = True

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The one before the one that is asked for."""
        newest = super().open_policy(version, folder)
        before, self._last = self._last or newest, newest
        self.is_honest = hash_weights(newest.model) == hash_weights(before.model)
        return before


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (PreviousAuthor(recipe),)
