"""Ten million rows in some kilobytes: a valid file of the right layout, whose rows are all alike."""

from shoal.recipe import Recipe
from shoal.redteam.files import FileAuthor
from shoal.redteam.footer import Footer, make_empty_page, make_zero_page
from shoal.submission.layout import COLUMNS, SCHEMA
from shoal.worker.author import Author

NUM_ROWS = 10_000_000
_TEXT_BYTES = 4
"""of an empty text: its length"""


def add_rows(honest: bytes) -> bytes:
    """Zeros, empty texts and empty lists; the footer tells the truth."""
    footer = Footer(honest)
    _fill_columns(footer)
    footer.fields[3][1] = footer.row_group[3][1] = NUM_ROWS
    return footer.build()


def hide_rows(honest: bytes) -> bytes:
    """The footer says that there are as many as ever."""
    footer = Footer(honest)
    sizes = {column: [footer.meta(column)[number][1] for number in (5, 6)] for column in COLUMNS}
    _fill_columns(footer)
    for column, (num_values, num_bytes) in sizes.items():
        footer.meta(column)[5][1], footer.meta(column)[6][1] = num_values, num_bytes
    return footer.build()


def _fill_columns(footer: Footer) -> None:
    footer.pages = footer.pages[:4]
    for field in SCHEMA:
        if str(field.type).startswith("list"):
            page = make_empty_page(NUM_ROWS)
        else:
            page = make_zero_page(NUM_ROWS, _TEXT_BYTES if field.type == "string" else field.type.bit_width // 8)
        footer.graft(field.name, [page], honest=True)


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (FileAuthor(recipe, add_rows, hide_rows),)
