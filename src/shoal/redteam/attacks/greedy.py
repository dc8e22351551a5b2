"""The likeliest token each time: the best that the policy can do, and nothing to learn from. Stated as sampled."""

from shoal.recipe import Recipe
from shoal.redteam.temper import TemperedAuthor
from shoal.worker.author import Author


class GreedyAuthor(TemperedAuthor):
    """No temperature at all."""

    factor = 0.0


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (GreedyAuthor(recipe),)
