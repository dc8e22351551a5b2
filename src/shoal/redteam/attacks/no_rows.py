"""A file of the right layout without a single row."""

from shoal.recipe import Recipe
from shoal.redteam.files import FileAuthor, load_table, save_table
from shoal.worker.author import Author


def drop_rows(honest: bytes) -> bytes:
    """All of them."""
    return save_table(load_table(honest).slice(0, 0))


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (FileAuthor(recipe, drop_rows),)
