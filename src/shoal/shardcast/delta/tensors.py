"""Where the elements of a checkpoint file are, and where their parents are in the previous file.

A file is cut into spans: runs of elements of one width that are contiguous in the new file and, if they have a parent,
in the old one. A tensor's parent is the one of the same name, type and shape, wherever that is. Headers and files that
are not safetensors are runs of bytes, and have a parent if it has the same length.

Invariants:
- the spans of a file cover it without gaps or overlaps, in order;
- a file that is not exactly a safetensors file is treated as bytes, never as an error;
- memory is bounded: a header of more than MAX_HEAD_BYTES is not read.
"""

import json
import math
import os
from dataclasses import dataclass
from typing import Any, TypeGuard

from shoal.shardcast.delta.codec import WIDTHS

MAX_HEAD_BYTES = 8 << 20
"""Maximum length of a safetensors header that is parsed: about 80,000 tensors."""
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class ElementSpan:
    """`count` elements of `width` bytes each, and the byte of the parent file at which their parents begin."""

    width: int
    count: int
    base: int | None = None

    @property
    def size(self) -> int:
        return self.width * self.count


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
        return width if width in WIDTHS and not odd else 1


def read_tensors(descriptor: int) -> list[TensorPlace] | None:
    """The tensors of a safetensors file in order of offset; None for any other file."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    start = _LENGTH_BYTES + length
    if size < _LENGTH_BYTES or length > MAX_HEAD_BYTES or start > size:
        return None
    try:
        head = json.loads(os.pread(descriptor, length, _LENGTH_BYTES))
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


def plan_spans(old: int | None, new: int) -> list[ElementSpan]:
    """The spans of an open file relative to its parent, if it has one."""
    size = os.fstat(new).st_size
    tensors = read_tensors(new)
    if tensors is None:
        same_size = old is not None and os.fstat(old).st_size == size
        return [ElementSpan(1, size, 0 if same_size else None)] if size else []
    parents, head, base = None, _head_bytes(tensors, size), None
    if old is not None and (parents := read_tensors(old)) is not None:
        base = 0 if _head_bytes(parents, os.fstat(old).st_size) == head else None
    spans = [ElementSpan(1, head, base)]
    places = {(tensor.name, tensor.dtype, tensor.shape): tensor.offset for tensor in parents or ()}
    for tensor in tensors:
        if tensor.size:
            base = places.get((tensor.name, tensor.dtype, tensor.shape))
            _add_span(spans, ElementSpan(tensor.width, tensor.size // tensor.width, base))
    return spans


def _head_bytes(tensors: list[TensorPlace], size: int) -> int:
    return tensors[0].offset if tensors else size


def _add_span(spans: list[ElementSpan], span: ElementSpan) -> None:
    last = spans[-1]
    follows = last.base is None if span.base is None else last.base is not None and last.base + last.size == span.base
    if follows and last.width == span.width:
        spans[-1] = ElementSpan(last.width, last.count + span.count, last.base)
    else:
        spans.append(span)


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
