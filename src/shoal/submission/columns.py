"""The columns of a submission: one table that defines schema, limits, writer, parser, frame and reader.

A submission is a Parquet file with one row per rollout, in order of group, then sample. The format is narrower than
Parquet: one row group, no nulls, no dictionaries, no key-value metadata, plain encoding, pages uncompressed or
compressed with zstd. Features that are not needed cannot be used against the parser. The same rollouts written twice
with the same library give the same bytes.

To add a field: add a line to `COLUMNS`, and read it in `submission/read.py`.
Changing breaks: exchange between workers and validators of different releases.

A column is kept as plain arrays: its values back to back (`data`), and for each level of nesting the number of elements
of each list (`lengths`, outermost first). The parser sends these arrays to its caller as

    frame {"sizes": [number of elements of each array]}, then the arrays in the order of `ARRAYS`

with integers and floats in little-endian order, wide types first so that all are aligned.

Invariants:
- from the sizes alone, before reading anything else, the caller knows how much will follow and that it is within
  limits;
- only numbers and bytes are sent: nothing in them names a type, a module or an unchecked length.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.rollout import Group, Rollout, Score
from shoal.submission.limits import (
    FINISH_BYTES,
    MAX_FOOTER_BYTES,
    MAX_NUMBER,
    PAGE_BYTES,
    PROOF_BYTES,
    REASON_BYTES,
    TASK_BYTES,
    SubmissionLimits,
)
from shoal.util.units import count_things

_LENGTH = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Row:
    """The source of one row of the file."""

    group: Group
    sample: int
    rollout: Rollout
    score: Score
    proofs: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Length:
    """The allowed number of elements of a list, or of bytes of a text."""

    least: int
    most: Callable[[SubmissionLimits], int]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the file."""

    name: str
    kind: pa.DataType
    get: Callable[[Row], Any]
    """extracts the value of a row: a number, a text, a sequence of numbers or of bytes"""
    lengths: tuple[Length, ...] = ()
    """for each level of nesting, outermost first; a text or a binary is a level of bytes"""
    check: Callable[[np.ndarray, SubmissionLimits], np.ndarray] | None = None
    """marks the valid values"""
    error: str = ""
    """what is wrong with a value that fails `check`; formatted with the limits"""

    @property
    def dtype(self) -> np.dtype:
        """The type of the innermost values."""
        kind = self.kind.value_type if pa.types.is_list(self.kind) else self.kind
        return np.dtype(np.uint8 if is_bytes(kind) else kind.to_pandas_dtype()).newbyteorder("<")


def is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_binary(kind)


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


def _text(name: str, get: Callable[[Row], str], least: int, most: int) -> Column:
    return Column(name, pa.string(), get, (Length(least, lambda _: most),), *_PRINTABLE)


_PRINTABLE = (lambda data, _: (data >= 0x20) & (data <= 0x7E), "with other than printable ASCII characters")
_INDEX = (lambda data, _: (data >= 0) & (data <= MAX_NUMBER), "out of range")
_TOKEN = (lambda data, limits: (data >= 0) & (data < limits.vocab_size), "outside of the vocabulary of {0.vocab_size}")
_FINITE = (lambda data, _: np.isfinite(data), "that are not finite")
_TEMPERATURE = (lambda data, _: np.isfinite(data) & (data >= 0), "that is negative or not finite")
_FRACTION = (lambda data, _: (data >= 0) & (data <= 1), "outside of 0 to 1")
_TOKENS = (Length(1, attrgetter("max_tokens")),)
_PROMPT_TOKENS = (Length(1, attrgetter("max_prompt_tokens")),)
_PROOFS = (Length(0, attrgetter("max_proofs")), Length(0, lambda _: PROOF_BYTES))

COLUMNS = (
    Column("group", pa.int64(), lambda row: row.group.index, (), *_INDEX),
    Column("sample", pa.int32(), lambda row: row.sample),
    _text("task_id", lambda row: row.group.task_id, 1, TASK_BYTES),
    Column("prompt_ids", _list_of(pa.int32()), lambda row: row.rollout.prompt_ids, _PROMPT_TOKENS, *_TOKEN),
    Column("token_ids", _list_of(pa.int32()), lambda row: row.rollout.token_ids, _TOKENS, *_TOKEN),
    Column("logprobs", _list_of(pa.float32()), lambda row: row.rollout.logprobs, _TOKENS, *_FINITE),
    _text("finish", lambda row: row.rollout.finish.value, 1, FINISH_BYTES),
    Column("version", pa.int64(), lambda row: row.rollout.version, (), *_INDEX),
    Column("temperature", pa.float64(), lambda row: row.rollout.temperature, (), *_TEMPERATURE),
    Column("seed", pa.uint64(), lambda row: row.rollout.seed),
    Column("reward", pa.float64(), lambda row: row.score.value, (), *_FRACTION),
    _text("reason", lambda row: row.score.reason[:REASON_BYTES], 0, REASON_BYTES),
    Column("proofs", _list_of(pa.binary()), lambda row: row.proofs, _PROOFS),
)
COLUMN_NAMES = tuple(column.name for column in COLUMNS)
SCHEMA = pa.schema([pa.field(column.name, column.kind, nullable=False) for column in COLUMNS])


# Columns as arrays


Arrays = tuple[np.ndarray, ...]
"""The arrays of one column for all rows: for each level the number of elements of each list (the first level has one
per row), then the innermost values.
"""
Columns = Mapping[str, Arrays]


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a column."""

    column: Column
    level: int
    dtype: np.dtype

    @property
    def name(self) -> str:
        return f"{self.column.name} at level {self.level}" if self.column.lengths else self.column.name

    def limit(self, limits: SubmissionLimits) -> int:
        """The maximum number of elements per row."""
        return prod(length.most(limits) for length in self.column.lengths[: self.level])


ARRAYS = tuple(
    sorted(
        (
            ArraySpec(column, level, column.dtype if level == len(column.lengths) else _LENGTH)
            for column in COLUMNS
            for level in range(len(column.lengths) + 1)
        ),
        key=lambda spec: -spec.dtype.itemsize,
    )
)
"""all arrays of a submission, in the order in which they are sent"""


def measure_columns(columns: Columns) -> list[int]:
    """The number of elements of each array."""
    return [len(columns[spec.column.name][spec.level]) for spec in ARRAYS]


def find_excess(sizes: Sequence[int], limits: SubmissionLimits) -> str:
    """Describe which array exceeds the limits; empty if none does."""
    num_rows = sizes[0]
    if any(size != num_rows for spec, size in zip(ARRAYS, sizes, strict=True) if spec.level == 0):
        return "columns of different lengths"
    if not 1 <= num_rows <= limits.max_rollouts:
        return f"{count_things(num_rows, 'rollout')}, allowed are 1 to {limits.max_rollouts}"
    for spec, size in zip(ARRAYS, sizes, strict=True):
        if size > (most := num_rows * spec.limit(limits)):
            rollouts = count_things(num_rows, "rollout")
            return f"{count_things(size, 'element')} of {spec.name}, allowed are {most} in {rollouts}"
    if (total := count_bytes(sizes)) > limits.decoded_bytes:
        return f"{total} bytes when decoded, allowed are {limits.decoded_bytes}"
    return ""


def count_bytes(sizes: Sequence[int]) -> int:
    """Total bytes of arrays of these sizes."""
    return sum(size * spec.dtype.itemsize for spec, size in zip(ARRAYS, sizes, strict=True))


def limit_bytes(limits: SubmissionLimits) -> int:
    """Maximum total bytes of all arrays."""
    return min(count_bytes([limits.max_rollouts * spec.limit(limits) for spec in ARRAYS]), limits.decoded_bytes)


def limit_file(limits: SubmissionLimits) -> int:
    """The largest honest file: all arrays full and incompressible, and what Parquet adds.

    It adds levels of lists, at most two bits per element and none of fewer than 32; page headers and offsets, with one
    page per MiB at most; and frames of zstd, which add less than 1 / 256 to what they cannot compress.
    """
    full = count_bytes([limits.max_rollouts * spec.limit(limits) for spec in ARRAYS])
    return full + full // 8 + MAX_FOOTER_BYTES + len(COLUMNS) * PAGE_BYTES


def dump_columns(columns: Columns) -> list[bytes]:
    """The bytes of each array, in order."""
    return [columns[spec.column.name][spec.level].astype(spec.dtype, copy=False).tobytes() for spec in ARRAYS]


def view_columns(buffer: bytearray, sizes: Sequence[int]) -> Columns:
    """View the bytes as columns, without a copy."""
    assert len(buffer) == count_bytes(sizes), "the buffer has the announced length"
    arrays, start = {}, 0
    for spec, size in zip(ARRAYS, sizes, strict=True):
        arrays[spec.column.name, spec.level] = np.frombuffer(buffer, spec.dtype, size, start)
        start += size * spec.dtype.itemsize
    return {
        column.name: tuple(arrays[column.name, level] for level in range(len(column.lengths) + 1)) for column in COLUMNS
    }


def split_rows(kind: pa.DataType, arrays: Arrays) -> list[Any]:
    """Split arrays into one value per row: a number, a text, an array of numbers or a tuple of bytes.

    The lengths must add up.
    """
    if len(arrays) == 1:
        return list(arrays[0].tolist())
    ends = np.cumsum(arrays[0], dtype=np.int64).tolist()
    values: Any
    if pa.types.is_string(kind):
        values = arrays[1].tobytes().decode("ascii")
    elif pa.types.is_binary(kind):
        values = arrays[1].tobytes()
    elif is_bytes(kind.value_type):
        values = tuple(split_rows(kind.value_type, arrays[1:]))
    else:
        values = arrays[1].astype(kind.value_type.to_pandas_dtype(), copy=False)
    return [values[start:end] for start, end in pairwise([0, *ends])]


# Columns as a file


def encode_file(values: Mapping[str, Sequence[Any]]) -> bytes:
    """Encode a file from the values of each column, one per row."""
    table = pa.Table.from_arrays([_build_array(column.kind, values[column.name]) for column in COLUMNS], schema=SCHEMA)
    table.validate(full=True)
    buffer = io.BytesIO()
    pq.write_table(
        table,
        buffer,
        row_group_size=max(1, table.num_rows),
        version="2.6",
        data_page_version="1.0",
        compression="zstd",
        compression_level=3,
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
    )
    return buffer.getvalue()


@cache
def make_sample() -> bytes:
    """Build a small file for the self-test of a parser: two rows with at least one element in every list."""
    return encode_file({column.name: 2 * [_make_value(column.kind)] for column in COLUMNS})


def _make_value(kind: pa.DataType) -> Any:
    if is_bytes(kind):
        return "1" if pa.types.is_string(kind) else b"1"
    return [_make_value(kind.value_type)] if pa.types.is_list(kind) else 1


def _build_array(kind: pa.DataType, values: Sequence[Any] | np.ndarray) -> pa.Array:
    """Build an array from buffers. `pa.array` would import pandas if installed, which is very slow."""
    if not pa.types.is_list(kind) and not is_bytes(kind):
        data = pa.py_buffer(np.array(values, kind.to_pandas_dtype()))
        return pa.Array.from_buffers(kind, len(values), [None, data])
    if pa.types.is_string(kind):
        values = [text.encode("ascii") for text in values]
    ends = np.cumsum([0, *map(len, values)], dtype=np.int64)  # start of each list, and the end
    assert ends[-1] < 2**31, "too many values for one column"
    buffers = [None, pa.py_buffer(ends.astype(np.int32))]
    if is_bytes(kind):
        return pa.Array.from_buffers(kind, len(values), [*buffers, pa.py_buffer(b"".join(values))])
    elements = list(chain.from_iterable(values)) if is_bytes(kind.value_type) else np.concatenate(values)
    return pa.Array.from_buffers(kind, len(values), buffers, children=[_build_array(kind.value_type, elements)])
