"""Corrupting a submission's Parquet file: parse it, change a number in it, and assemble it again.

Thrift's compact protocol is read and written as far as Parquet uses it: a struct is {field number: [type, value]}, a
list is [type of its elements, values]. Nothing is validated, because the input is our own file.

Field numbers are those of Parquet's Thrift definitions. Column metadata: 4 codec, 5 values, 6 uncompressed bytes,
7 bytes, 9 offset of the pages. Page header: 1 type, 2 uncompressed bytes, 3 bytes, 5 data page header, 7 dictionary
page header; in each of these two: 1 values, 2 encoding.
"""

import io
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.recipe import Recipe
from shoal.rollout import Group
from shoal.submission.columns import COLUMN_NAMES, limit_file
from shoal.submission.limits import SubmissionLimits
from shoal.submission.write import Proofs, WrittenSubmission, encode_groups, write_file
from shoal.worker.behaviour import WorkerBehaviour

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
Struct = dict[int, list[Any]]

MAGIC = b"PAR1"
_SHORT_LIST = 15
_SHORT_STEP = 16


class ThriftReader:
    """Reads values from bytes, starting at an offset."""

    def __init__(self, data: bytes, place: int) -> None:
        self.data, self.place = data, place

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self.place += count
        return self.data[self.place - count : self.place]

    def take_struct(self) -> Struct:
        """The struct that starts here."""
        fields: Struct = {}
        last = 0
        while head := self.take(1)[0]:
            last = last + (head >> 4) if head >> 4 else self._take_value(I16)
            fields[last] = [head & 15, self._take_value(head & 15)]
        return fields

    def _take_value(self, kind: int) -> Any:
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind == BYTE:
            return self.take(1)[0]
        if kind in (I16, I32, I64):
            raw = self._take_varint()
            return (raw >> 1) ^ -(raw & 1)
        if kind == BINARY:
            return self.take(self._take_varint())
        if kind == LIST:
            head = self.take(1)[0]
            count = head >> 4 if head >> 4 < _SHORT_LIST else self._take_varint()
            return [head & 15, [self._take_value(head & 15) for _ in range(count)]]
        assert kind == STRUCT, f"type {kind} does not occur in our files"
        return self.take_struct()

    def _take_varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7


def encode_varint(value: int) -> bytes:
    """Encode a number as a varint."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_struct(fields: Struct) -> bytes:
    """The bytes of a struct."""
    out, last = [], 0
    for number, (kind, value) in sorted(fields.items()):
        step = number - last
        out.append(bytes([step << 4 | kind]) if 0 < step < _SHORT_STEP else bytes([kind]) + _encode_value(I16, number))
        out.append(_encode_value(kind, value))
        last = number
    return b"".join(out) + b"\0"


def _encode_value(kind: int, value: Any) -> bytes:
    if kind in (TRUE, FALSE):
        return b""
    if kind == BYTE:
        return bytes([value & 255])
    if kind in (I16, I32, I64):
        return encode_varint(((value << 1) ^ (value >> 63)) & (2**64 - 1))
    if kind == BINARY:
        return encode_varint(len(value)) + bytes(value)
    if kind == LIST:
        inner, values = value
        return encode_list(inner, len(values)) + b"".join(_encode_value(inner, item) for item in values)
    return encode_struct(value)


def encode_list(inner: int, count: int) -> bytes:
    """The header of a list."""
    if count < _SHORT_LIST:
        return bytes([count << 4 | inner])
    return bytes([_SHORT_LIST << 4 | inner]) + encode_varint(count)


DATA_PAGE, DICTIONARY_PAGE = 0, 2
PLAIN, RLE, RLE_DICTIONARY = 0, 3, 8
_BLOCK_BYTES = 1 << 24
_TAIL_BYTES = 8

Page = tuple[Struct, bytes]
"""header and body"""


class ParquetFooter:
    """A file with its footer parsed into structs."""

    def __init__(self, data: bytes) -> None:
        start = len(data) - _TAIL_BYTES - int.from_bytes(data[-_TAIL_BYTES:-4], "little")
        self.pages = data[:start]
        self.fields = ThriftReader(data, start).take_struct()

    @property
    def schema(self) -> list[Struct]:
        return self.fields[2][1][1]

    @property
    def row_group(self) -> Struct:
        """The only row group."""
        return self.fields[4][1][1][0]

    @property
    def num_rows(self) -> int:
        return int(self.fields[3][1])

    def chunk(self, column: str) -> Struct:
        """ColumnChunk of a column."""
        return self.row_group[1][1][1][COLUMN_NAMES.index(column)]

    def meta(self, column: str) -> Struct:
        """ColumnMetaData of a column."""
        return self.chunk(column)[3][1]

    def page(self, column: str) -> Page:
        """The only page of a column."""
        source = ThriftReader(self.pages, self.meta(column)[9][1])
        header = source.take_struct()
        return header, source.take(header[3][1])

    def graft(self, column: str, pages: list[Page], *, honest: bool = False) -> None:
        """Replace the pages of a column; the footer keeps its numbers unless `honest` is set."""
        meta = self.meta(column)
        start = len(self.pages)
        self.pages += b"".join(encode_struct(header) + body for header, body in pages)
        meta[9][1] = start
        meta[7][1] = len(self.pages) - start
        if honest:
            meta[6][1] = sum(len(encode_struct(header)) + header[2][1] for header, _ in pages)
            meta[5][1] = sum(header[5][1][1][1] for header, _ in pages)

    def build(self) -> bytes:
        """Assemble the file again."""
        return assemble_file(self.pages, encode_struct(self.fields))


def assemble_file(pages: bytes, footer: bytes) -> bytes:
    """A file made of pages, which begin with the magic, and an encoded footer."""
    return pages + footer + len(footer).to_bytes(4, "little") + MAGIC


def make_page(count: int, body: bytes, num_bytes: int, encoding: int = PLAIN) -> Page:
    """A page with that many values; `num_bytes` is the uncompressed size of the body."""
    inner: Struct = {1: [I32, count], 2: [I32, encoding], 3: [I32, RLE], 4: [I32, RLE]}
    return {1: [I32, DATA_PAGE], 2: [I32, num_bytes], 3: [I32, len(body)], 5: [STRUCT, inner]}, body


def make_list_page(count: int, *, first: bool) -> Page:
    """A page with that many zeros, all in one list that continues across pages."""
    starts = _encode_run(0, 1) if first else b""
    repeats = starts + _encode_run(1, count - first)
    levels = _frame(repeats) + _frame(_encode_run(1, count))
    body = compress(levels) + squeeze_zeros(4 * count)
    return make_page(count, body, len(levels) + 4 * count)


def make_empty_page(count: int) -> Page:
    """A page with that many empty lists."""
    levels = 2 * _frame(_encode_run(0, count))
    return make_page(count, compress(levels), len(levels))


def make_zero_page(count: int, value_bytes: int) -> Page:
    """A page with that many zeros of the given size; a zero of four bytes is an empty string."""
    return make_page(count, squeeze_zeros(value_bytes * count), value_bytes * count)


def count_zeros(size: int) -> int:
    """Zero bytes that `squeeze_zeros` packs into so many bytes."""
    return size // len(compress(bytes(_BLOCK_BYTES))) * _BLOCK_BYTES


def squeeze_zeros(count: int) -> bytes:
    """That many zero bytes in zstd, created without holding them in memory."""
    whole = compress(bytes(_BLOCK_BYTES)) if count >= _BLOCK_BYTES else b""
    return whole * (count // _BLOCK_BYTES) + compress(bytes(count % _BLOCK_BYTES))


def _encode_run(level: int, count: int) -> bytes:
    """A run of 1-bit levels."""
    return encode_varint(count << 1) + bytes([level])


def _frame(levels: bytes) -> bytes:
    return len(levels).to_bytes(4, "little") + levels


def compress(data: bytes) -> bytes:
    """Compress with zstd."""
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


Corruption = Callable[[bytes, int], bytes]
"""turns an honest file into the submitted one, given the size of the largest file that its lease allows"""
_LAYOUT = {"compression": "zstd", "use_dictionary": False, "write_statistics": False, "store_schema": False}


class BadFileBehaviour(WorkerBehaviour):
    """Does honest work and submits a corrupted file, cycling through its ways; the manifest matches the bytes."""

    def __init__(self, recipe: Recipe, *ways: Corruption) -> None:
        super().__init__(recipe)
        self.ways = ways
        """applied in this order"""
        self._next = cycle(ways)

    def write(self, path: Path, groups: Sequence[Group], proofs: Proofs) -> WrittenSubmission:
        """Write a bad file; hash, size and rollouts of its manifest are such that the coordinator accepts it."""
        honest, room = encode_groups(groups, proofs), limit_groups(groups, self.recipe.max_tokens)
        return write_file(path, next(self._next)(honest, room), groups)


def limit_groups(groups: Sequence[Group], max_tokens: int) -> int:
    """Bytes of a file that no run refuses for its size: the largest with these groups and prompts of their length."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return limit_file(
        SubmissionLimits(
            max_rollouts=len(rollouts),
            group_size=1,
            max_tokens=max_tokens,
            vocab_size=1,
            max_prompt_tokens=max(len(rollout.prompt_ids) for rollout in rollouts),
        )
    )


def load_table(data: bytes) -> pa.Table:
    """The rows of an honest file."""
    return pq.read_table(io.BytesIO(data))


def save_table(table: pa.Table, **options: Any) -> bytes:
    """Write the standard layout, except for the options."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, row_group_size=max(1, table.num_rows), **_LAYOUT | options)
    return buffer.getvalue()


def replace_column(
    table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray, *, nullable: bool = False
) -> pa.Table:
    """The table with one column replaced."""
    place = table.schema.get_field_index(name)
    return table.set_column(place, pa.field(name, column.type, nullable=nullable), column)
