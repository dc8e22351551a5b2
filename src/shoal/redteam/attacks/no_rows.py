"""A file of the right layout without a single row."""

import hashlib

from shoal.recipe import Recipe
from shoal.redteam.files import FileAuthor, load_table, save_table
from shoal.worker.author import Author


def drop_rows(honest: bytes) -> bytes:
    """All of them. What is left differs from file to file, or it would be refused as handed in before."""
    mark = {"of": hashlib.sha256(honest).hexdigest()}
    return save_table(load_table(honest).slice(0, 0).replace_schema_metadata(mark), store_schema=True)


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (FileAuthor(recipe, drop_rows),)
