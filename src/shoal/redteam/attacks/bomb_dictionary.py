"""A dictionary whose only entry is huge, and a run that repeats it: a few bytes for each copy of the whole."""

from shoal.recipe import Recipe
from shoal.redteam.files import FileAuthor
from shoal.redteam.footer import DICTIONARY_PAGE, PLAIN, RLE_DICTIONARY, Footer, Page, make_page, pack, squeeze_zeros
from shoal.redteam.thrift import I32, LIST, STRUCT, Struct, put_varint
from shoal.worker.author import Author

ENTRY_BYTES = 1 << 28


def repeat_entry(honest: bytes) -> bytes:
    """Behind the footer's back, which says that there is no dictionary."""
    footer = Footer(honest)
    footer.graft("reason", _make_pages(footer.num_rows))
    return footer.build()


def repeat_openly(honest: bytes) -> bytes:
    """The footer names the dictionary."""
    footer = Footer(honest)
    meta = footer.meta("reason")
    footer.graft("reason", _make_pages(footer.num_rows))
    meta[2] = [LIST, [I32, [PLAIN, RLE_DICTIONARY]]]
    meta[11] = [meta[9][0], meta[9][1]]
    return footer.build()


def _make_pages(num_rows: int) -> list[Page]:
    entry = pack(ENTRY_BYTES.to_bytes(4, "little")) + squeeze_zeros(ENTRY_BYTES)
    header: Struct = {
        1: [I32, DICTIONARY_PAGE],
        2: [I32, 4 + ENTRY_BYTES],
        3: [I32, len(entry)],
        7: [STRUCT, {1: [I32, 1], 2: [I32, PLAIN]}],
    }
    run = bytes([1]) + put_varint(num_rows << 1) + bytes([0])  # indices of one bit each, all of them 0
    return [(header, entry), make_page(num_rows, pack(run), len(run), RLE_DICTIONARY)]


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (FileAuthor(recipe, repeat_entry, repeat_openly),)
