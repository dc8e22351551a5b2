"""A submission's Parquet file, taken apart so that a number in it can be another, and put together again.

Field numbers are those of Parquet's own Thrift definitions. Of a column's metadata: 4 codec, 5 values, 6 bytes
unpacked, 7 bytes, 9 where its pages are. Of a page's header: 1 kind, 2 bytes unpacked, 3 bytes, 5 the header of a page
of data, 7 that of a dictionary; of each of these: 1 values, 2 encoding.
"""

import pyarrow as pa

from shoal.redteam.thrift import I32, STRUCT, Source, Struct, put_struct, put_varint
from shoal.submission.layout import COLUMNS

DATA_PAGE, DICTIONARY_PAGE = 0, 2
PLAIN, RLE, RLE_DICTIONARY = 0, 3, 8
_BLOCK_BYTES = 1 << 24
_TAIL_BYTES = 8

Page = tuple[Struct, bytes]
"""header and body"""


class Footer:
    """A file with its footer as structs."""

    def __init__(self, data: bytes) -> None:
        start = len(data) - _TAIL_BYTES - int.from_bytes(data[-_TAIL_BYTES:-4], "little")
        self.pages = data[:start]
        self.fields = Source(data, start).take_struct()

    @property
    def schema(self) -> list[Struct]:
        found: list[Struct] = self.fields[2][1][1]
        return found

    @property
    def row_group(self) -> Struct:
        """The only one."""
        found: Struct = self.fields[4][1][1][0]
        return found

    @property
    def num_rows(self) -> int:
        return int(self.fields[3][1])

    def chunk(self, column: str) -> Struct:
        """ColumnChunk of a column."""
        found: Struct = self.row_group[1][1][1][COLUMNS.index(column)]
        return found

    def meta(self, column: str) -> Struct:
        """ColumnMetaData of a column."""
        found: Struct = self.chunk(column)[3][1]
        return found

    def page(self, column: str) -> Page:
        """The only page of a column."""
        source = Source(self.pages, self.meta(column)[9][1])
        header = source.take_struct()
        return header, source.take(header[3][1])

    def graft(self, column: str, pages: list[Page], *, honest: bool = False) -> None:
        """Give a column other pages; the footer goes on saying what it said, unless it is to be honest."""
        meta = self.meta(column)
        start = len(self.pages)
        self.pages += b"".join(put_struct(header) + body for header, body in pages)
        meta[9][1] = start
        meta[7][1] = len(self.pages) - start
        if honest:
            meta[6][1] = sum(len(put_struct(header)) + header[2][1] for header, _ in pages)
            meta[5][1] = sum(header[5][1][1][1] for header, _ in pages)

    def build(self, magic: bytes = b"PAR1") -> bytes:
        """The file put together again."""
        return seal_file(self.pages, put_struct(self.fields), magic)


def seal_file(pages: bytes, footer: bytes, magic: bytes = b"PAR1") -> bytes:
    """A file of pages, which begin with the magic, and the bytes of a footer."""
    return pages + footer + len(footer).to_bytes(4, "little") + magic


def make_page(count: int, body: bytes, num_bytes: int, encoding: int = PLAIN) -> Page:
    """A page of that many values; `num_bytes` is what the body unpacks to."""
    inner: Struct = {1: [I32, count], 2: [I32, encoding], 3: [I32, RLE], 4: [I32, RLE]}
    return {1: [I32, DATA_PAGE], 2: [I32, num_bytes], 3: [I32, len(body)], 5: [STRUCT, inner]}, body


def make_list_page(count: int, *, first: bool) -> Page:
    """A page with that many zeros, all in one list, which goes on from page to page."""
    starts = _put_run(0, 1) if first else b""
    repeats = starts + _put_run(1, count - first)
    levels = _frame(repeats) + _frame(_put_run(1, count))
    body = pack(levels) + squeeze_zeros(4 * count)
    return make_page(count, body, len(levels) + 4 * count)


def make_empty_page(count: int) -> Page:
    """A page with that many empty lists."""
    levels = 2 * _frame(_put_run(0, count))
    return make_page(count, pack(levels), len(levels))


def make_zero_page(count: int, value_bytes: int) -> Page:
    """A page with that many zeros of so many bytes each; four of them are an empty text."""
    return make_page(count, squeeze_zeros(value_bytes * count), value_bytes * count)


def squeeze_zeros(count: int) -> bytes:
    """That many zero bytes in zstd, made without having them all."""
    whole = pack(bytes(_BLOCK_BYTES)) if count >= _BLOCK_BYTES else b""
    return whole * (count // _BLOCK_BYTES) + pack(bytes(count % _BLOCK_BYTES))


def _put_run(level: int, count: int) -> bytes:
    """A run of levels of one bit each."""
    return put_varint(count << 1) + bytes([level])


def _frame(levels: bytes) -> bytes:
    return len(levels).to_bytes(4, "little") + levels


def pack(data: bytes) -> bytes:
    """Bytes in zstd."""
    return bytes(pa.compress(data, codec="zstd", asbytes=True))
