"""The Parquet file of a submission: one row per rollout, in order of group, then sample.

The format is narrower than Parquet: one row group, no nulls, no dictionaries, no key-value metadata, plain encoding,
zstd or nothing around the pages. What is not needed cannot be used against the reader. Written twice with the same
library, the same rollouts give the same bytes.

Changing breaks: workers and validators of different age.
"""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.submission.frame import Columns

CODECS = frozenset({"ZSTD", "UNCOMPRESSED"})
ENCODINGS = frozenset({"PLAIN", "RLE"})
"""RLE is that of the levels, which say where a list begins"""
MAX_FOOTER_BYTES = 1 << 14
"""an honest one has 2 KB"""


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


SCHEMA = pa.schema(
    [
        pa.field(name, kind, nullable=False)
        for name, kind in (
            ("group", pa.int64()),
            ("sample", pa.int32()),
            ("task_id", pa.string()),
            ("prompt_ids", _list_of(pa.int32())),
            ("token_ids", _list_of(pa.int32())),
            ("logprobs", _list_of(pa.float32())),
            ("finish", pa.string()),
            ("version", pa.int64()),
            ("temperature", pa.float64()),
            ("seed", pa.uint64()),
            ("reward", pa.float64()),
            ("reason", pa.string()),
            ("proofs", _list_of(pa.binary())),
        )
    ]
)
COLUMNS = tuple(SCHEMA.names)


def encode_file(columns: Columns) -> bytes:
    """The bytes of a file with these rows."""
    table = _build_table(columns)
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


def make_sample() -> bytes:
    """A small honest file with which a reader tries itself."""
    ones, text = np.ones(2), np.frombuffer(b"stopstop", np.uint8)
    columns = Columns(
        group=5 * ones,
        version=ones,
        seed=ones,
        temperature=ones,
        reward=ones,
        sample=np.arange(2),
        prompt_lengths=2 * ones,
        token_lengths=ones,
        logprob_lengths=ones,
        proof_lengths=np.arange(2),
        task_lengths=ones,
        finish_lengths=4 * ones,
        reason_lengths=ones,
        prompt_ids=np.arange(4),
        token_ids=ones,
        logprobs=-ones,
        proof_sizes=ones[:1],
        task_bytes=text[:2],
        finish_bytes=text,
        reason_bytes=text[:2],
        proof_bytes=text[:1],
    )
    return encode_file(columns)


def _build_table(columns: Columns) -> pa.Table:
    """From buffers, past `pa.array`, which imports pandas where there is one: that takes longer than all the rest."""
    proofs = _wrap_bytes(columns.proof_sizes, columns.proof_bytes, pa.binary())
    arrays = {
        "task_id": _wrap_bytes(columns.task_lengths, columns.task_bytes, pa.string()),
        "prompt_ids": _wrap_list(columns.prompt_lengths, _wrap_values(columns.prompt_ids, pa.int32())),
        "token_ids": _wrap_list(columns.token_lengths, _wrap_values(columns.token_ids, pa.int32())),
        "logprobs": _wrap_list(columns.logprob_lengths, _wrap_values(columns.logprobs, pa.float32())),
        "finish": _wrap_bytes(columns.finish_lengths, columns.finish_bytes, pa.string()),
        "reason": _wrap_bytes(columns.reason_lengths, columns.reason_bytes, pa.string()),
        "proofs": _wrap_list(columns.proof_lengths, proofs),
    }
    for field in SCHEMA:
        if field.name not in arrays:
            arrays[field.name] = _wrap_values(getattr(columns, field.name), field.type)
    return pa.Table.from_arrays([arrays[name] for name in COLUMNS], schema=SCHEMA)


def _wrap_values(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    own = values.astype(kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(own), [None, pa.py_buffer(own)])


def _wrap_bytes(lengths: np.ndarray, data: np.ndarray, kind: pa.DataType) -> pa.Array:
    own = data.astype(np.uint8)
    return pa.Array.from_buffers(kind, len(lengths), [None, pa.py_buffer(_find_offsets(lengths)), pa.py_buffer(own)])


def _wrap_list(lengths: np.ndarray, values: pa.Array) -> pa.Array:
    kind, offsets = _list_of(values.type), pa.py_buffer(_find_offsets(lengths))
    return pa.Array.from_buffers(kind, len(lengths), [None, offsets], children=[values])


def _find_offsets(lengths: np.ndarray) -> np.ndarray:
    """Where each row begins, and the end."""
    ends = np.cumsum(lengths, dtype=np.int64)
    assert not len(ends) or ends[-1] < 2**31, "more than a column can hold"
    return np.concatenate([[0], ends]).astype(np.int32)
