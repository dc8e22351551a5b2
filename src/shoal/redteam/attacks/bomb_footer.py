"""Footers that claim more than memory holds, in files of some hundred bytes; and one that is known to crash readers."""

from shoal.recipe import Recipe
from shoal.redteam.files import FileAuthor
from shoal.redteam.footer import Footer, seal_file
from shoal.redteam.thrift import BINARY, STRUCT, put_list, put_struct, put_varint
from shoal.submission.layout import COLUMNS
from shoal.worker.author import Author

MAGIC = b"PAR1"
MANY, HUGE = 2**31 - 1, 2**62
NO_CODEC = 99


def claim_columns(honest: bytes) -> bytes:
    """A schema of two thousand million columns, none of which is there."""
    start = put_struct({1: [5, 2]})[:-1]
    return seal_file(MAGIC, start + bytes([0x19]) + put_list(STRUCT, MANY))


def claim_text(honest: bytes) -> bytes:
    """The name of who wrote it, of two gigabytes, as the last field."""
    fields = {number: field for number, field in Footer(honest).fields.items() if number < 5}
    return seal_file(MAGIC, put_struct(fields)[:-1] + bytes([0x20 | BINARY]) + put_varint(MANY))


def claim_length(honest: bytes) -> bytes:
    """A footer of four gigabytes."""
    return MAGIC + b"\xff\xff\xff\xff" + MAGIC


def claim_rows(honest: bytes) -> bytes:
    """So many rows and values that their product is no number any more."""
    footer = Footer(honest)
    footer.fields[3][1] = footer.row_group[3][1] = HUGE
    for column in COLUMNS:
        footer.meta(column)[5][1] = footer.meta(column)[6][1] = HUGE
    return footer.build()


def claim_codec(honest: bytes) -> bytes:
    """A codec that there is none."""
    footer = Footer(honest)
    for column in COLUMNS:
        footer.meta(column)[4][1] = NO_CODEC
    return footer.build()


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (FileAuthor(recipe, claim_columns, claim_text, claim_length, claim_rows, claim_codec),)
