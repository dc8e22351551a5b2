"""Files that attack the parser, or that are not valid submissions.

Each attack takes an honest file and corrupts it in several ways, one way per submission. A way gets the size of the
largest file that its lease allows, and makes the worst one that fits: a larger one would be refused unread.
"""

import hashlib
import os

import pyarrow as pa
import pyarrow.compute as pc

from shoal.recipe import Recipe
from shoal.redteam.behaviours import bad_files as parquet
from shoal.redteam.behaviours.bad_files import BadFileBehaviour, ParquetFooter, load_table, replace_column, save_table
from shoal.redteam.registry import Expected, attack
from shoal.submission.columns import COLUMN_NAMES, SCHEMA
from shoal.submission.limits import MAX_FOOTER_BYTES, PAGE_BYTES
from shoal.worker.behaviour import WorkerBehaviour

MANY, HUGE = 2**31 - 1, 2**62
NO_CODEC = 99


def start_file(honest: bytes) -> bytes:
    """The magic and some bytes of this submission: the same file by two owners would be refused as a copy, unread."""
    return parquet.MAGIC + hashlib.sha256(honest).digest()


def claim_columns(honest: bytes, room: int) -> bytes:
    """A schema that claims two billion columns, none of which exists."""
    start = parquet.encode_struct({1: [5, 2]})[:-1]
    return parquet.assemble_file(start_file(honest), start + bytes([0x19]) + parquet.encode_list(parquet.STRUCT, MANY))


def claim_text(honest: bytes, room: int) -> bytes:
    """A writer name of two gigabytes as the last field."""
    fields = {number: field for number, field in ParquetFooter(honest).fields.items() if number < 5}
    footer = parquet.encode_struct(fields)[:-1] + bytes([0x20 | parquet.BINARY]) + parquet.encode_varint(MANY)
    return parquet.assemble_file(start_file(honest), footer)


def claim_length(honest: bytes, room: int) -> bytes:
    """A footer of four gigabytes."""
    return start_file(honest) + b"\xff\xff\xff\xff" + parquet.MAGIC


def claim_rows(honest: bytes, room: int) -> bytes:
    """Row and value counts whose product overflows."""
    footer = ParquetFooter(honest)
    footer.fields[3][1] = footer.row_group[3][1] = HUGE
    for column in COLUMN_NAMES:
        footer.meta(column)[5][1] = footer.meta(column)[6][1] = HUGE
    return footer.build()


def claim_codec(honest: bytes, room: int) -> bytes:
    """A codec that does not exist."""
    footer = ParquetFooter(honest)
    for column in COLUMN_NAMES:
        footer.meta(column)[4][1] = NO_CODEC
    return footer.build()


@attack("bomb_footer", expect=Expected.FORM, text="a footer that claims more than memory holds")
def make_bomb_footer(recipe: Recipe) -> WorkerBehaviour:
    return BadFileBehaviour(recipe, claim_columns, claim_text, claim_length, claim_rows, claim_codec)


MOST_VALUES = 2**29 - 100
"""values of four bytes each in one page, whose size is a 31-bit number"""
NUM_FULL_PAGES = 5
SLOW_PAGES, SLOW_BYTES = 10_000, 60_000_000
"""maximum number of pages; a column of honest work has no more values than tokens"""


def fill_page(honest: bytes, room: int) -> bytes:
    """One page of up to two gigabytes."""
    return _replace_tokens(honest, [parquet.make_list_page(_fit_values(room - len(honest)), first=True)])


def fill_pages(honest: bytes, room: int) -> bytes:
    """Up to ten gigabytes in five pages, compressed to less than half a megabyte."""
    most = _fit_values((room - len(honest)) // NUM_FULL_PAGES)
    more = parquet.make_list_page(most, first=False)
    return _replace_tokens(honest, [parquet.make_list_page(most, first=True), *([more] * (NUM_FULL_PAGES - 1))])


def waste_time(honest: bytes, room: int) -> bytes:
    """Each page unpacks to 60 MB but holds one value, for as many values as the footer states."""
    header, body = parquet.make_list_page(1, first=False)
    body += parquet.squeeze_zeros(SLOW_BYTES - header[2][1])
    header[2][1], header[3][1] = SLOW_BYTES, len(body)
    num_values = ParquetFooter(honest).meta("token_ids")[5][1]
    fitting = (room - len(honest)) // (len(body) + PAGE_BYTES) - 1
    slow = [(header, body)] * min(num_values - 1, SLOW_PAGES, max(1, fitting))
    return _replace_tokens(honest, [parquet.make_list_page(1, first=True), *slow])


def _fit_values(room: int) -> int:
    """Values of a page that takes at most so many bytes."""
    return min(MOST_VALUES, max(1, parquet.count_zeros(room - PAGE_BYTES) // 4))


def _replace_tokens(honest: bytes, pages: list[parquet.Page]) -> bytes:
    footer = ParquetFooter(honest)
    footer.graft("token_ids", pages)
    return footer.build()


@attack("bomb_pages", expect=Expected.FORM, text="pages that unpack to gigabytes, or slowly to almost nothing")
def make_bomb_pages(recipe: Recipe) -> WorkerBehaviour:
    return BadFileBehaviour(recipe, fill_page, fill_pages, waste_time)


def widen_tokens(honest: bytes, room: int) -> bytes:
    """Token ids of eight bytes."""
    table = load_table(honest)
    return save_table(replace_column(table, "token_ids", table.column("token_ids").cast(pa.list_(pa.int64()))))


def write_numbers_as_text(honest: bytes, room: int) -> bytes:
    """Numbers stored as strings."""
    table = load_table(honest)
    for name in ("group", "seed", "reward"):
        table = replace_column(table, name, table.column(name).cast(pa.string()))
    return save_table(table)


def allow_gaps(honest: bytes, room: int) -> bytes:
    """Nullable values, one of which is null."""
    table = load_table(honest)
    rewards = [None, *table.column("reward").to_pylist()[1:]]
    return save_table(replace_column(table, "reward", pa.array(rewards, pa.float64()), nullable=True))


def swap_type(honest: bytes, room: int) -> bytes:
    """Bytes of one type declared as another: log-probs are read as integers."""
    footer = ParquetFooter(honest)
    names = [element[4][1] for element in footer.schema]
    # A list takes three schema elements: the list, the repeated group and the element.
    tokens, logprobs = (footer.schema[names.index(name) + 2] for name in (b"token_ids", b"logprobs"))
    logprobs[1][1] = tokens[1][1]
    return footer.build()


@attack("wrong_types", expect=Expected.FORM, text="columns with wrong types")
def make_wrong_types(recipe: Recipe) -> WorkerBehaviour:
    return BadFileBehaviour(recipe, widen_tokens, write_numbers_as_text, allow_gaps, swap_type)


ENTRY_BYTES = 1 << 28


def repeat_entry(honest: bytes, room: int) -> bytes:
    """The footer says that there is no dictionary."""
    footer = ParquetFooter(honest)
    footer.graft("reason", _make_pages(footer.num_rows))
    return footer.build()


def repeat_openly(honest: bytes, room: int) -> bytes:
    """The footer declares the dictionary."""
    footer = ParquetFooter(honest)
    meta = footer.meta("reason")
    footer.graft("reason", _make_pages(footer.num_rows))
    meta[2] = [parquet.LIST, [parquet.I32, [parquet.PLAIN, parquet.RLE_DICTIONARY]]]
    meta[11] = [meta[9][0], meta[9][1]]
    return footer.build()


def _make_pages(num_rows: int) -> list[parquet.Page]:
    entry = parquet.compress(ENTRY_BYTES.to_bytes(4, "little")) + parquet.squeeze_zeros(ENTRY_BYTES)
    header: parquet.Struct = {
        1: [parquet.I32, parquet.DICTIONARY_PAGE],
        2: [parquet.I32, 4 + ENTRY_BYTES],
        3: [parquet.I32, len(entry)],
        7: [parquet.STRUCT, {1: [parquet.I32, 1], 2: [parquet.I32, parquet.PLAIN]}],
    }
    run = bytes([1]) + parquet.encode_varint(num_rows << 1) + bytes([0])  # 1-bit indices, all 0
    return [(header, entry), parquet.make_page(num_rows, parquet.compress(run), len(run), parquet.RLE_DICTIONARY)]


@attack("bomb_dictionary", expect=Expected.FORM, text="a dictionary that repeats one huge value")
def make_bomb_dictionary(recipe: Recipe) -> WorkerBehaviour:
    return BadFileBehaviour(recipe, repeat_entry, repeat_openly)


NUM_ROWS = 10_000_000
_TEXT_BYTES = 4
"""length prefix of an empty string"""


def add_rows(honest: bytes, room: int) -> bytes:
    """Zeros, empty strings and empty lists; the footer states the true number."""
    footer = ParquetFooter(honest)
    _fill_columns(footer)
    footer.fields[3][1] = footer.row_group[3][1] = NUM_ROWS
    return footer.build()


def hide_rows(honest: bytes, room: int) -> bytes:
    """The footer states the honest number."""
    footer = ParquetFooter(honest)
    sizes = {column: [footer.meta(column)[number][1] for number in (5, 6)] for column in COLUMN_NAMES}
    _fill_columns(footer)
    for column, (num_values, num_bytes) in sizes.items():
        footer.meta(column)[5][1], footer.meta(column)[6][1] = num_values, num_bytes
    return footer.build()


def _fill_columns(footer: ParquetFooter) -> None:
    footer.pages = footer.pages[:4]
    for field in SCHEMA:
        if str(field.type).startswith("list"):
            page = parquet.make_empty_page(NUM_ROWS)
        else:
            size = _TEXT_BYTES if field.type == "string" else field.type.bit_width // 8
            page = parquet.make_zero_page(NUM_ROWS, size)
        footer.graft(field.name, [page], honest=True)


@attack("many_rows", expect=Expected.FORM, text="ten million rows in a few kilobytes")
def make_many_rows(recipe: Recipe) -> WorkerBehaviour:
    return BadFileBehaviour(recipe, add_rows, hide_rows)


DEEP = 100_000
SHORT_DEEP = 1800
"""as many as fit into a footer of the allowed size"""
GROUP_BYTES = 8
"""an encoded group"""


def nest_deeply(honest: bytes, room: int) -> bytes:
    """A column inside up to a hundred thousand nested groups."""
    return _nest_column(honest, min(DEEP, (room - len(honest)) // GROUP_BYTES))


def nest_shortly(honest: bytes, room: int) -> bytes:
    """The same within the allowed footer length."""
    return _nest_column(honest, SHORT_DEEP)


def nest_structs(honest: bytes, room: int) -> bytes:
    """Structs that begin and never end, in an unknown field."""
    return parquet.assemble_file(start_file(honest), b"\xfc" + b"\x1c" * (MAX_FOOTER_BYTES - 1))


def _nest_column(honest: bytes, depth: int) -> bytes:
    footer = ParquetFooter(honest)
    group: parquet.Struct = {3: [parquet.I32, 0], 4: [parquet.BINARY, b"n"], 5: [parquet.I32, 1]}
    footer.schema[1:1] = [group] * depth
    return footer.build()


@attack("nesting", expect=Expected.FORM, text="columns or structs nested without limit")
def make_nesting(recipe: Recipe) -> WorkerBehaviour:
    return BadFileBehaviour(recipe, nest_deeply, nest_shortly, nest_structs)


NAME_CHARS = 48_000_000


def name_task(honest: bytes, room: int) -> bytes:
    """The footer states the true length of the first task's name."""
    table = load_table(honest)
    names = ["x" * NAME_CHARS, *table.column("task_id").to_pylist()[1:]]
    return save_table(replace_column(table, "task_id", pa.array(names, pa.string())))


def hide_name(honest: bytes, room: int) -> bytes:
    """The footer states the honest length."""
    size = ParquetFooter(honest).meta("task_id")[6][1]
    footer = ParquetFooter(name_task(honest, room))
    footer.meta("task_id")[6][1] = size
    return footer.build()


def name_column(honest: bytes, room: int) -> bytes:
    """A column with a huge name."""
    footer = ParquetFooter(honest)
    footer.schema[1][4][1] = b"x" * min(NAME_CHARS // 8, room - len(honest))
    return footer.build()


@attack("huge_string", expect=Expected.FORM, text="a task or column name of many megabytes")
def make_huge_string(recipe: Recipe) -> WorkerBehaviour:
    return BadFileBehaviour(recipe, name_task, hide_name, name_column)


def drop_last(honest: bytes, room: int) -> bytes:
    """Drop the last sample of the last group; the manifest still lists it."""
    table = load_table(honest)
    return save_table(table.slice(0, table.num_rows - 1))


def drop_half(honest: bytes, room: int) -> bytes:
    """Drop every other sample of all groups."""
    table = load_table(honest)
    return save_table(table.take(list(range(0, table.num_rows, 2))))


def drop_group(honest: bytes, room: int) -> bytes:
    """Drop all samples of the last group, if there are others."""
    table = load_table(honest)
    rest = table.filter(pc.less(table["group"], pc.max(table["group"])))
    return save_table(rest) if rest.num_rows else drop_last(honest, room)


@attack("half_group", expect=Expected.FORM, text="a group with samples missing")
def make_half_group(recipe: Recipe) -> WorkerBehaviour:
    return BadFileBehaviour(recipe, drop_last, drop_half, drop_group)


NUM_BYTES = 100_000


def draw_bytes(honest: bytes, room: int) -> bytes:
    """Random bytes."""
    return os.urandom(min(NUM_BYTES, room))


def frame_bytes(honest: bytes, room: int) -> bytes:
    """Random bytes between Parquet magic numbers, with a plausible footer length."""
    size = min(NUM_BYTES, room - 3 * len(parquet.MAGIC))
    return parquet.MAGIC + os.urandom(size) + (size // 10).to_bytes(4, "little") + parquet.MAGIC


def cut_file(honest: bytes, room: int) -> bytes:
    """The first half of an honest file."""
    return honest[: len(honest) // 2]


def cut_pages(honest: bytes, room: int) -> bytes:
    """An honest file with the middle of its pages missing."""
    third = len(honest) // 6
    return honest[:third] + honest[2 * third :]


@attack("garbage", expect=Expected.FORM, text="random bytes, or a truncated file")
def make_garbage(recipe: Recipe) -> WorkerBehaviour:
    return BadFileBehaviour(recipe, draw_bytes, frame_bytes, cut_file, cut_pages)


def drop_rows(honest: bytes, room: int) -> bytes:
    """Drop all rows. The result differs from file to file, otherwise it would be refused as a duplicate."""
    mark = {"of": hashlib.sha256(honest).hexdigest()}
    return save_table(load_table(honest).slice(0, 0).replace_schema_metadata(mark), store_schema=True)


@attack("no_rows", expect=Expected.FORM, text="a file without rows")
def make_no_rows(recipe: Recipe) -> WorkerBehaviour:
    return BadFileBehaviour(recipe, drop_rows)
