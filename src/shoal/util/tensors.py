"""Where the tensors of a safetensors file are, from its header alone.

Invariants:
- the tensors of a file cover everything after its header, without gaps or overlaps; any other file has none;
- memory is bounded: a header of more than MAX_HEAD_BYTES is not read.
"""

import json
import math
import os
from dataclasses import dataclass
from typing import Any, TypeGuard

MAX_HEAD_BYTES = 8 << 20
"""Maximum length of a safetensors header that is parsed: about 80,000 tensors."""
LENGTH_BYTES = 8
"""Length of the number with which a file begins: the length of its header."""
_WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor's place in its file: absolute offset and length in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def width(self) -> int:
        """Bytes of an element; 1 if elements are not 1, 2, 4 or 8 whole bytes."""
        width, odd = divmod(self.size, max(1, math.prod(self.shape)))
        return width if width in _WIDTHS and not odd else 1


def read_tensors(descriptor: int) -> list[TensorPlace] | None:
    """The tensors of a safetensors file in order of offset; None for any other file."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    start = LENGTH_BYTES + length
    if size < LENGTH_BYTES or length > MAX_HEAD_BYTES or start > size:
        return None
    try:
        head = json.loads(os.pread(descriptor, length, LENGTH_BYTES))
    except (ValueError, RecursionError):
        return None
    if not isinstance(head, dict):
        return None
    head.pop("__metadata__", None)
    found = [_read_tensor(name, fields, start) for name, fields in head.items()]
    tensors = [tensor for tensor in found if tensor is not None]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size))
    complete = len(tensors) == len(found) and _are_adjacent(tensors, start, size)
    return tensors if complete else None


def _read_tensor(name: str, fields: Any, start: int) -> TensorPlace | None:
    if not isinstance(fields, dict) or not isinstance(fields.get("dtype"), str):
        return None
    shape, offsets = fields.get("shape"), fields.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return None
    return TensorPlace(name, fields["dtype"], tuple(shape), start + offsets[0], offsets[1] - offsets[0])


def _are_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _are_adjacent(tensors: list[TensorPlace], start: int, size: int) -> bool:
    for tensor in tensors:
        if tensor.offset != start:
            return False
        start += tensor.size
    return start == size
