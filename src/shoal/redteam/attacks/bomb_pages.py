"""Pages that unpack to gigabytes, or to nothing in much time; their footer says that they are small."""

from shoal.recipe import Recipe
from shoal.redteam.files import FileAuthor
from shoal.redteam.footer import Footer, Page, make_list_page, squeeze_zeros
from shoal.worker.author import Author

MOST_VALUES = 2**29 - 100
"""of four bytes each in one page, whose size is a number of 31 bits"""
SLOW_PAGES, SLOW_BYTES = 10_000, 60_000_000
"""at most, as a column of honest work has no more values than tokens"""


def fill_page(honest: bytes) -> bytes:
    """One page of two gigabytes."""
    return _replace_tokens(honest, [make_list_page(MOST_VALUES, first=True)])


def fill_pages(honest: bytes) -> bytes:
    """Ten gigabytes in five pages, and in less than a megabyte."""
    more = make_list_page(MOST_VALUES, first=False)
    return _replace_tokens(honest, [make_list_page(MOST_VALUES, first=True), *([more] * 4)])


def waste_time(honest: bytes) -> bytes:
    """Each page unpacks to 60 MB for the sake of one value, for as many values as the footer has."""
    header, body = make_list_page(1, first=False)
    body += squeeze_zeros(SLOW_BYTES - header[2][1])
    header[2][1], header[3][1] = SLOW_BYTES, len(body)
    num_values = Footer(honest).meta("token_ids")[5][1]
    slow = [(header, body)] * min(num_values - 1, SLOW_PAGES)
    return _replace_tokens(honest, [make_list_page(1, first=True), *slow])


def _replace_tokens(honest: bytes, pages: list[Page]) -> bytes:
    footer = Footer(honest)
    footer.graft("token_ids", pages)
    return footer.build()


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (FileAuthor(recipe, fill_page, fill_pages, waste_time),)
