"""The program that parses an untrusted Parquet file into columns. Runs only in a sandbox.

    parse   read the file -> check tail and footer -> decode -> sizes, arrays; or {"error": sentence}
    trial   the same with a known good file while holding all the memory that a file may use -> {"done": true}

Invariants:
- the footer is checked before anything is decoded: its length, then schema, rows, codecs, encodings, offsets, and the
  number and size of values of each column. A file has exactly the schema of submission/columns.py;
- a footer may lie. If its pages then ask for too much, the limits of the process stop it: memory, CPU time, deadline;
- whatever the bytes, the result is columns within the limits, an error, or the end of the process;
- nothing that parsing does not need is imported here, least of all torch.
"""

import os
from functools import cache
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.sandbox.forkserver import FILE, Program, ProgramSet
from shoal.sandbox.frames import clean_sentence, send_bytes, send_frame
from shoal.sandbox.isolate import PARSE_FILE
from shoal.submission.columns import (
    COLUMNS,
    SCHEMA,
    Column,
    Columns,
    dump_columns,
    find_excess,
    is_bytes,
    make_sample,
    measure_columns,
)
from shoal.submission.limits import MAX_FOOTER_BYTES, NO_ROOM, FormError, SubmissionLimits
from shoal.util.units import count_things

_CODECS = frozenset({"ZSTD", "UNCOMPRESSED"})
_ENCODINGS = frozenset({"PLAIN", "RLE"})
"""RLE encodes the levels, which mark where a list begins"""
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_TAIL_BYTES = 8
"""length of the footer, and magic bytes"""
_CHUNK_SLACK = 1 << 16
"""for page headers"""
_THRIFT_LIMIT = 4096
_READ_BYTES = 1 << 20
_SAMPLE_LIMITS = SubmissionLimits(max_rollouts=2, group_size=2, max_tokens=64, vocab_size=100)
_TRIAL_ROOM_BYTES = 48 << 20
"""memory left for parsing the known good file"""


def run_parse(channel: int, job: Any) -> None:
    """Parse the file of a job."""
    limits = SubmissionLimits(**job)
    try:
        columns = parse_submission(_read_file(limits.file_bytes), limits)
    except FormError as error:
        send_frame(channel, {"error": clean_sentence(str(error))})
    except OSError:
        send_frame(channel, {"fault": "cannot read the file from disk"})
    else:
        send_frame(channel, {"sizes": measure_columns(columns)})
        for data in dump_columns(columns):
            send_bytes(channel, data)


def run_trial(channel: int, job: Any) -> None:
    """Parse a known good file while holding the memory of another; if this fails, the machine is short of memory."""
    block = bytes(job["memory_bytes"] - _TRIAL_ROOM_BYTES)  # reserved, never touched; a bytearray would be
    parse_submission(make_sample(), _SAMPLE_LIMITS)
    del block
    send_frame(channel, {"done": True})


def warm_up() -> None:
    """Load lazily imported modules now: a job cannot open files."""
    sample = make_sample()
    dump_columns(parse_submission(sample, _SAMPLE_LIMITS))
    for broken in (sample[:-1], sample[:40] + sample[60:]):
        try:
            parse_submission(broken, _SAMPLE_LIMITS)
        except FormError as error:
            clean_sentence(str(error))


def _read_file(most: int) -> bytes:
    pieces, total = [], 0
    while piece := os.pread(FILE, _READ_BYTES, total):
        total += len(piece)
        if total > most:
            raise FormError(f"more than {most} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def parse_submission(data: bytes, limits: SubmissionLimits) -> Columns:
    """Parse the columns of a file."""
    _check_tail(data)
    try:
        file = pq.ParquetFile(
            pa.BufferReader(data),
            pre_buffer=False,
            thrift_string_size_limit=_THRIFT_LIMIT,
            thrift_container_size_limit=_THRIFT_LIMIT,
        )
        _check_footer(file.metadata, len(data), limits)
        columns = _take_columns(file.read(use_threads=False))
    except FormError:
        raise
    except MemoryError:
        raise FormError(NO_ROOM) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0][:160]
        raise FormError(f"not a readable Parquet file ({reason})") from None
    if excess := find_excess(measure_columns(columns), limits):
        raise FormError(excess)
    return columns


def _check_tail(data: bytes) -> None:
    if len(data) < len(_MAGIC) + _TAIL_BYTES:
        raise FormError("not a Parquet file")
    ends = (data[: len(_MAGIC)], data[-len(_MAGIC) :])
    if _ENCRYPTED in ends:
        raise FormError("an encrypted Parquet file")
    if ends != (_MAGIC, _MAGIC):
        raise FormError("not a Parquet file, or not all of one")
    length = int.from_bytes(data[-_TAIL_BYTES : -len(_MAGIC)], "little")
    if length > MAX_FOOTER_BYTES:
        raise FormError(f"a footer of {length} bytes, allowed are {MAX_FOOTER_BYTES}")


def _check_footer(footer: pq.FileMetaData, file_bytes: int, limits: SubmissionLimits) -> None:
    if footer.num_row_groups != 1:
        raise FormError(f"{footer.num_row_groups} row groups, allowed is 1")
    if not 1 <= footer.num_rows <= limits.max_rollouts:
        raise FormError(f"{count_things(footer.num_rows, 'rollout')}, allowed are 1 to {limits.max_rollouts}")
    if footer.row_group(0).num_rows != footer.num_rows:
        raise FormError("a row group with another number of rows than the file")
    if footer.metadata is not None:
        raise FormError("metadata besides the columns")
    _check_schema(footer.schema)
    for place, column in enumerate(COLUMNS):
        _check_chunk(column, footer.row_group(0).column(place), footer.num_rows, file_bytes, limits)


def _check_schema(schema: pq.ParquetSchema) -> None:
    if len(schema) != len(COLUMNS):
        raise FormError(f"{len(schema)} columns, a submission has {len(COLUMNS)}")
    expected = _load_schema()
    for place, column in enumerate(COLUMNS):
        found = schema.column(place)
        if found.path.partition(".")[0] != column.name:
            raise FormError(f"column {place} is {found.path[:80]!r}, expected {column.name}")
        if not found.equals(expected.column(place)):
            raise FormError(f"column {column.name}: not of the format's type")
    if not schema.equals(expected):
        raise FormError("columns that are not nested as the format's")


def _check_chunk(
    column: Column, chunk: pq.ColumnChunkMetaData, num_rows: int, file_bytes: int, limits: SubmissionLimits
) -> None:
    name = column.name
    if chunk.file_path:
        raise FormError(f"column {name}: in another file")
    if chunk.compression not in _CODECS:
        raise FormError(
            f"column {name}: compressed by {chunk.compression}, allowed are {' and '.join(sorted(_CODECS))}"
        )
    if not set(chunk.encodings) <= _ENCODINGS or chunk.has_dictionary_page:
        raise FormError(f"column {name}: encoded by {', '.join(chunk.encodings)}, allowed is PLAIN")
    per_row, value_bytes = _limit_column(column, limits)
    if not 0 <= chunk.num_values <= num_rows * per_row or (per_row == 1 and chunk.num_values != num_rows):
        values, rollouts = count_things(chunk.num_values, "value"), count_things(num_rows, "rollout")
        raise FormError(f"column {name}: {values}, allowed are {num_rows * per_row} in {rollouts}")
    # An empty list counts as one value, and levels take up to one byte per value.
    most = min(num_rows * (per_row + 1) * (value_bytes + 1) + _CHUNK_SLACK, limits.decoded_bytes)
    if not 0 <= chunk.total_uncompressed_size <= most:
        raise FormError(f"column {name}: {chunk.total_uncompressed_size} bytes uncompressed, allowed are {most}")
    if not 0 <= chunk.total_compressed_size <= file_bytes - max(0, chunk.data_page_offset):
        raise FormError(f"column {name}: lies outside of the file")


def _limit_column(column: Column, limits: SubmissionLimits) -> tuple[int, int]:
    """The maximum number of values per row, and the maximum bytes of each."""
    mosts = [length.most(limits) for length in column.lengths]
    if column.dtype == np.uint8:  # texts and binaries are one value plus its length
        return prod(mosts[:-1]), mosts[-1] + 4
    return prod(mosts), column.dtype.itemsize


def _take_columns(table: pa.Table) -> Columns:
    if not table.schema.equals(SCHEMA):
        raise FormError("columns whose types differ from the format")
    table.validate(full=True)
    parts = {column.name: table.column(column.name).chunks for column in COLUMNS}
    joined = {name: chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks) for name, chunks in parts.items()}
    return {name: tuple(_split_arrays(column)) for name, column in joined.items()}


def _split_arrays(column: pa.Array) -> list[np.ndarray]:
    """Lengths of each level, and the innermost values. Not with `to_numpy`, which imports pandas if installed."""
    if column.null_count:
        raise FormError("values that are missing")
    if pa.types.is_list(column.type):
        return [np.diff(_view_buffer(column, np.dtype(np.int32), 1)), *_split_arrays(column.flatten())]
    if not is_bytes(column.type):
        return [_view_buffer(column, np.dtype(column.type.to_pandas_dtype()), 0)]
    offsets, data = _view_buffer(column, np.dtype(np.int32), 1), column.buffers()[2]
    raw = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, dtype=np.uint8)
    return [np.diff(offsets), raw[offsets[0] : offsets[-1]]]


def _view_buffer(column: pa.Array, dtype: np.dtype, extra: int) -> np.ndarray:
    """The elements of a column's first buffer that belong to it, `extra` more than it has rows."""
    if not len(column):
        return np.zeros(extra, dtype)
    return np.frombuffer(column.buffers()[1], dtype=dtype)[column.offset :][: len(column) + extra]


@cache
def _load_schema() -> pq.ParquetSchema:
    """The format's schema in Parquet's terms."""
    return pq.ParquetFile(pa.BufferReader(make_sample())).schema


PROGRAMS = ProgramSet(
    programs={"parse": Program(run_parse), "trial": Program(run_trial)}, profile=PARSE_FILE, warm_up=warm_up
)
