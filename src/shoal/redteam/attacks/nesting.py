"""Columns and structs nested without end, for readers that call themselves for each level."""

from shoal.recipe import Recipe
from shoal.redteam.files import FileAuthor
from shoal.redteam.footer import Footer, seal_file
from shoal.redteam.thrift import BINARY, I32, Struct
from shoal.submission.layout import MAX_FOOTER_BYTES
from shoal.worker.author import Author

DEEP = 100_000
SHORT_DEEP = 1800
"""that fit into a footer of the allowed size"""


def nest_deeply(honest: bytes) -> bytes:
    """A column at the bottom of a hundred thousand groups."""
    return _nest_column(honest, DEEP)


def nest_shortly(honest: bytes) -> bytes:
    """The same within the length that a footer may have."""
    return _nest_column(honest, SHORT_DEEP)


def nest_structs(honest: bytes) -> bytes:
    """Structs that begin and never end, in a field that nobody knows."""
    return seal_file(b"PAR1", b"\xfc" + b"\x1c" * (MAX_FOOTER_BYTES - 1))


def _nest_column(honest: bytes, depth: int) -> bytes:
    footer = Footer(honest)
    group: Struct = {3: [I32, 0], 4: [BINARY, b"n"], 5: [I32, 1]}
    footer.schema[1:1] = [group] * depth
    return footer.build()


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (FileAuthor(recipe, nest_deeply, nest_shortly, nest_structs),)
