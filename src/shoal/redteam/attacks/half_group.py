"""A file that lacks samples: who hands in only what turned out well chooses what is learned from."""

import pyarrow.compute as pc

from shoal.recipe import Recipe
from shoal.redteam.files import FileAuthor, load_table, save_table
from shoal.worker.author import Author


def drop_last(honest: bytes) -> bytes:
    """The last sample of the last group; the manifest goes on to name it."""
    table = load_table(honest)
    return save_table(table.slice(0, table.num_rows - 1))


def drop_half(honest: bytes) -> bytes:
    """Every other sample of all groups."""
    table = load_table(honest)
    return save_table(table.take(list(range(0, table.num_rows, 2))))


def drop_group(honest: bytes) -> bytes:
    """All samples of the last group, if there are others."""
    table = load_table(honest)
    rest = table.filter(pc.less(table["group"], pc.max(table["group"])))
    return save_table(rest) if rest.num_rows else drop_last(honest)


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (FileAuthor(recipe, drop_last, drop_half, drop_group),)
