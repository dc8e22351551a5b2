"""Where the elements of a checkpoint file are, and where their parents are in the previous file.

A file is cut into spans: runs of elements of one width that are contiguous in the new file and, if they have a parent,
in the old one. A tensor's parent is the one of the same name, type and shape, wherever that is. Headers and files that
are not safetensors are runs of bytes, and have a parent if it has the same length.

Invariants:
- the spans of a file cover it without gaps or overlaps, in order;
- a file that is not exactly a safetensors file is treated as bytes, never as an error.
"""

import os
from dataclasses import dataclass

from shoal.util.tensors import TensorPlace, read_tensors


@dataclass(frozen=True, slots=True)
class ElementSpan:
    """`count` elements of `width` bytes each, and the byte of the parent file at which their parents begin."""

    width: int
    count: int
    base: int | None = None

    @property
    def size(self) -> int:
        return self.width * self.count


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
