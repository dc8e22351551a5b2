"""Bytes that are no file of any kind, or were one."""

import os

from shoal.recipe import Recipe
from shoal.redteam.files import FileAuthor
from shoal.worker.author import Author

NUM_BYTES = 100_000
_MAGIC = b"PAR1"


def draw_bytes(honest: bytes) -> bytes:
    """At random."""
    return os.urandom(NUM_BYTES)


def dress_bytes(honest: bytes) -> bytes:
    """At random, between the marks of a Parquet file and with a footer of a fitting length."""
    return _MAGIC + os.urandom(NUM_BYTES) + (NUM_BYTES // 10).to_bytes(4, "little") + _MAGIC


def cut_file(honest: bytes) -> bytes:
    """The first half of an honest one."""
    return honest[: len(honest) // 2]


def cut_pages(honest: bytes) -> bytes:
    """An honest one with the middle of its pages missing."""
    third = len(honest) // 6
    return honest[:third] + honest[2 * third :]


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (FileAuthor(recipe, draw_bytes, dress_bytes, cut_file, cut_pages),)
