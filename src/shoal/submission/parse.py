"""A stranger's Parquet file to plain columns. Runs only in the jailed child (submission/child.py).

Invariants:
- the footer is looked at before anything is decoded: its length, then layout, rows, codecs, encodings, offsets and the
  number and size of values of each column. A file is of the one layout of submission/layout.py or of none;
- a footer may lie. What its pages then ask for, the limits of the process refuse: memory, CPU time, the deadline;
- whatever the bytes, the answer is columns within the bounds, `FormError`, or the end of the process.
"""

from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.submission.bounds import FINISH_BYTES, NO_ROOM, PROOF_BYTES, REASON_BYTES, TASK_BYTES, Bounds, FormError
from shoal.submission.frame import Columns, find_excess, measure_columns
from shoal.submission.layout import CODECS, COLUMNS, ENCODINGS, MAX_FOOTER_BYTES, SCHEMA, make_sample

_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_TAIL_BYTES = 8
"""length of the footer and magic"""
_CHUNK_SLACK = 1 << 16
"""for page headers"""
_THRIFT_LIMIT = 4096


def parse_submission(data: bytes, bounds: Bounds) -> Columns:
    """The columns of a file."""
    _check_tail(data)
    try:
        file = pq.ParquetFile(
            pa.BufferReader(data),
            pre_buffer=False,
            thrift_string_size_limit=_THRIFT_LIMIT,
            thrift_container_size_limit=_THRIFT_LIMIT,
        )
        _check_footer(file.metadata, len(data), bounds)
        table = file.read(use_threads=False)
        columns = _take_columns(table)
    except FormError:
        raise
    except MemoryError:
        raise FormError(NO_ROOM) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormError(f"not a readable Parquet file ({_quote_line(error)})") from None
    if excess := find_excess(measure_columns(columns), bounds):
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


def _check_footer(footer: pq.FileMetaData, file_bytes: int, bounds: Bounds) -> None:
    if footer.num_row_groups != 1:
        raise FormError(f"{footer.num_row_groups} row groups, allowed is 1")
    if not 1 <= footer.num_rows <= bounds.max_rollouts:
        raise FormError(f"{footer.num_rows} rollouts, allowed are 1 to {bounds.max_rollouts}")
    if footer.row_group(0).num_rows != footer.num_rows:
        raise FormError("a row group with another number of rows than the file")
    if footer.metadata is not None:
        raise FormError("metadata beside the columns")
    _check_schema(footer.schema)
    for place, name in enumerate(COLUMNS):
        _check_chunk(name, footer.row_group(0).column(place), footer.num_rows, file_bytes, bounds)


def _check_schema(schema: pq.ParquetSchema) -> None:
    if len(schema) != len(COLUMNS):
        raise FormError(f"{len(schema)} columns, a submission has {len(COLUMNS)}")
    for place, name in enumerate(COLUMNS):
        found = schema.column(place)
        if found.path.partition(".")[0] != name:
            raise FormError(f"column {place} is {found.path[:80]!r}, expected {name}")
    expected = _load_schema()
    for place, name in enumerate(COLUMNS):
        if not schema.column(place).equals(expected.column(place)):
            raise FormError(f"column {name}: not of the layout's type")
    if not schema.equals(expected):
        raise FormError("columns that are not nested as the layout's")


def _check_chunk(name: str, chunk: pq.ColumnChunkMetaData, num_rows: int, file_bytes: int, bounds: Bounds) -> None:
    if chunk.file_path:
        raise FormError(f"column {name}: in another file")
    if chunk.compression not in CODECS:
        raise FormError(f"column {name}: compressed by {chunk.compression}, allowed are {' and '.join(sorted(CODECS))}")
    if not set(chunk.encodings) <= ENCODINGS or chunk.has_dictionary_page:
        raise FormError(f"column {name}: encoded by {', '.join(chunk.encodings)}, allowed is PLAIN")
    per_row, value_bytes = _limit_column(name, bounds)
    if not 0 <= chunk.num_values <= num_rows * per_row or (per_row == 1 and chunk.num_values != num_rows):
        raise FormError(f"column {name}: {chunk.num_values} values, {num_rows} rollouts have {num_rows * per_row}")
    # An empty list counts as one value, and levels take up to a byte per value.
    most = min(num_rows * (per_row + 1) * (value_bytes + 1) + _CHUNK_SLACK, bounds.decoded_bytes)
    if not 0 <= chunk.total_uncompressed_size <= most:
        raise FormError(f"column {name}: {chunk.total_uncompressed_size} bytes uncompressed, allowed are {most}")
    if not 0 <= chunk.total_compressed_size <= file_bytes - max(0, chunk.data_page_offset):
        raise FormError(f"column {name}: lies outside of the file")


def _limit_column(name: str, bounds: Bounds) -> tuple[int, int]:
    """The most values of a column per row, and the most bytes of each."""
    text_bytes = {"task_id": TASK_BYTES, "finish": FINISH_BYTES, "reason": REASON_BYTES}
    lists = {
        "prompt_ids": (bounds.max_prompt_tokens, 4),
        "token_ids": (bounds.max_tokens, 4),
        "logprobs": (bounds.max_tokens, 4),
        "proofs": (bounds.max_proofs, PROOF_BYTES + 4),
    }
    return lists.get(name, (1, text_bytes.get(name, 4) + 4))


def _take_columns(table: pa.Table) -> Columns:
    if not table.schema.equals(SCHEMA):
        raise FormError("columns of another type than the layout's")
    table.validate(full=True)
    found = {name: _join_chunks(table.column(name)) for name in COLUMNS}
    if any(column.null_count for column in found.values()):
        raise FormError("values that are missing")
    scalars = ("group", "version", "seed", "temperature", "reward", "sample")
    arrays = {name: _view_values(found[name]) for name in scalars}
    for name, short in (("prompt_ids", "prompt"), ("token_ids", "token"), ("logprobs", "logprob")):
        arrays[f"{short}_lengths"], values = _split_list(found[name])
        arrays[name] = _view_values(values)
    for name, short in (("task_id", "task"), ("finish", "finish"), ("reason", "reason")):
        arrays[f"{short}_lengths"], arrays[f"{short}_bytes"] = _split_bytes(found[name])
    arrays["proof_lengths"], proofs = _split_list(found["proofs"])
    arrays["proof_sizes"], arrays["proof_bytes"] = _split_bytes(proofs)
    return Columns(**arrays)


def _join_chunks(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _split_list(column: pa.ListArray) -> tuple[np.ndarray, pa.Array]:
    """Lengths of the lists, and what is in them."""
    values = column.flatten()
    if values.null_count:
        raise FormError("values that are missing")
    return np.diff(_view_buffer(column, 1, np.dtype(np.int32), 1)), values


def _split_bytes(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of the strings, and their bytes."""
    offsets = _view_buffer(column, 1, np.dtype(np.int32), 1)
    data = column.buffers()[2]
    raw = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, dtype=np.uint8)
    return np.diff(offsets), raw[offsets[0] : offsets[-1]]


def _view_values(column: pa.Array) -> np.ndarray:
    """Numbers without a copy, and without `to_numpy`, which imports pandas where there is one."""
    return _view_buffer(column, 1, np.dtype(column.type.to_pandas_dtype()), 0)


def _view_buffer(column: pa.Array, place: int, dtype: np.dtype, extra: int) -> np.ndarray:
    """The elements of one of a column's buffers that belong to it, `extra` more than it has rows."""
    if not len(column):
        return np.zeros(extra, dtype)
    return np.frombuffer(column.buffers()[place], dtype=dtype)[column.offset :][: len(column) + extra]


def _quote_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:160]


@cache
def _load_schema() -> pq.ParquetSchema:
    """The layout as Parquet has it."""
    return pq.ParquetFile(pa.BufferReader(make_sample())).schema
