"""A submission's columns as plain arrays, and the frame in which the reading child hands them to its parent.

    frame = length of the head (u32), head (JSON), arrays back to back

The head is {"sizes": [number of elements of each array]} or {"error": "sentence"}. Names, order and types of the arrays
are fixed here, integers and floats little-endian, wide types first so that all are aligned.

Invariants:
- the parent knows from the head alone, before it takes anything else, how much is to come, and that it is in bounds;
- a frame is numbers and bytes: nothing in it names a type, a module or a length that is not checked.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from shoal.submission.bounds import FINISH_BYTES, PROOF_BYTES, REASON_BYTES, TASK_BYTES, Bounds

LENGTH_BYTES = 4
MAX_HEAD_BYTES = 2048
MAX_ERROR_CHARS = 300


class FrameError(Exception):
    """A child that does not keep to the format: it has crashed, or is no longer ours."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """All rollouts of a file in order of rows. `_lengths` cut the values of lists and texts into rows."""

    group: np.ndarray
    version: np.ndarray
    seed: np.ndarray
    temperature: np.ndarray
    reward: np.ndarray
    sample: np.ndarray
    prompt_lengths: np.ndarray
    token_lengths: np.ndarray
    logprob_lengths: np.ndarray
    proof_lengths: np.ndarray
    """proofs of each rollout"""
    task_lengths: np.ndarray
    finish_lengths: np.ndarray
    reason_lengths: np.ndarray
    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    proof_sizes: np.ndarray
    """bytes of each proof"""
    task_bytes: np.ndarray
    finish_bytes: np.ndarray
    reason_bytes: np.ndarray
    proof_bytes: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.group)


NAMES = tuple(field.name for field in fields(Columns))
_SPECIAL = {"seed": "<u8", "temperature": "<f8", "reward": "<f8", "logprobs": "<f4"}
_WIDE, _BYTES = NAMES[: NAMES.index("sample")], NAMES[NAMES.index("task_bytes") :]
DTYPES = tuple(
    np.dtype(_SPECIAL.get(name, "<i8" if name in _WIDE else "u1" if name in _BYTES else "<i4")) for name in NAMES
)
_NUM_PER_ROW = NAMES.index("prompt_ids")
"""the arrays before it have one element per row"""


def find_excess(sizes: Sequence[int], bounds: Bounds) -> str:
    """What of arrays of these sizes is out of bounds, in words; empty if nothing is."""
    num_rows = sizes[0]
    if any(size != num_rows for size in sizes[:_NUM_PER_ROW]):
        return "columns of different lengths"
    if not 1 <= num_rows <= bounds.max_rollouts:
        return f"{num_rows} rollouts, allowed are 1 to {bounds.max_rollouts}"
    for name, size, most in zip(NAMES[_NUM_PER_ROW:], sizes[_NUM_PER_ROW:], list_limits(bounds), strict=True):
        if size > num_rows * most:
            return f"{size} elements of {name}, {num_rows} rollouts have at most {num_rows * most}"
    if (total := count_bytes(sizes)) > bounds.decoded_bytes:
        return f"{total} bytes when decoded, allowed are {bounds.decoded_bytes}"
    return ""


def list_limits(bounds: Bounds) -> tuple[int, ...]:
    """The most elements per row of each array that has not just one."""
    num_proofs = bounds.max_proofs
    texts = (TASK_BYTES, FINISH_BYTES, REASON_BYTES)
    return (
        bounds.max_prompt_tokens,
        bounds.max_tokens,
        bounds.max_tokens,
        num_proofs,
        *texts,
        num_proofs * PROOF_BYTES,
    )


def count_bytes(sizes: Sequence[int]) -> int:
    """Bytes of arrays of these sizes."""
    return sum(size * dtype.itemsize for size, dtype in zip(sizes, DTYPES, strict=True))


def limit_bytes(bounds: Bounds) -> int:
    """The most bytes of all arrays together."""
    sizes = [bounds.max_rollouts] * _NUM_PER_ROW + [bounds.max_rollouts * most for most in list_limits(bounds)]
    return min(count_bytes(sizes), bounds.decoded_bytes)


def measure_columns(columns: Columns) -> list[int]:
    """The number of elements of each array."""
    return [len(getattr(columns, name)) for name in NAMES]


def encode_columns(columns: Columns) -> list[bytes]:
    """The pieces of a frame."""
    arrays = [getattr(columns, name).astype(dtype, copy=False) for name, dtype in zip(NAMES, DTYPES, strict=True)]
    return [_encode_head({"sizes": measure_columns(columns)}), *(array.tobytes() for array in arrays)]


def encode_error(text: str) -> list[bytes]:
    """The frame of a refusal."""
    return [_encode_head({"error": clean_text(text)})]


def read_head(data: bytes, bounds: Bounds) -> list[int] | str:
    """The sizes that a head announces, all of them in bounds, or the sentence of a refusal."""
    try:
        head = json.loads(data)
    except (ValueError, RecursionError):
        raise FrameError("a head that is not JSON") from None
    match head:
        case {"error": str(text)}:
            return clean_text(text)
        case {"sizes": list(sizes)}:
            if len(sizes) != len(NAMES) or not all(type(size) is int and size >= 0 for size in sizes):
                raise FrameError("a head without one size per array")
            if excess := find_excess(sizes, bounds):
                raise FrameError(excess)
            return sizes
    raise FrameError("a head of another kind")


def read_body(buffer: bytearray, sizes: Sequence[int]) -> Columns:
    """Views into the bytes that followed a head."""
    assert len(buffer) == count_bytes(sizes), "received as long as announced"
    arrays, start = {}, 0
    for name, dtype, size in zip(NAMES, DTYPES, sizes, strict=True):
        arrays[name] = np.frombuffer(buffer, dtype=dtype, count=size, offset=start)
        start += size * dtype.itemsize
    return Columns(**arrays)


def clean_text(text: str) -> str:
    """A sentence in printable ASCII of bounded length: parts of it may be a stranger's."""
    shown = text if text.isascii() and text.isprintable() else ascii(text[: MAX_ERROR_CHARS + 1])[1:-1]
    return shown if len(shown) <= MAX_ERROR_CHARS else shown[:MAX_ERROR_CHARS] + "..."


def _encode_head(head: dict[str, object]) -> bytes:
    data = json.dumps(head).encode()
    assert len(data) <= MAX_HEAD_BYTES, "heads are short"
    return len(data).to_bytes(LENGTH_BYTES, "little") + data
