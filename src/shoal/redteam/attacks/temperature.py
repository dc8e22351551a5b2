"""A lower temperature: likelier texts, better rewards. Stated as the one that was asked for."""

from shoal.recipe import Recipe
from shoal.redteam.temper import TemperedAuthor
from shoal.worker.author import Author


class CoolAuthor(TemperedAuthor):
    """Nine tenths of it."""

    factor = 0.9


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (CoolAuthor(recipe),)
