"""Planes of bytes in the smallest of three forms, and back from untrusted bytes.

    stored    the bytes
    zstd      one zstd frame
    nibbles   two values per byte, zstd-compressed; 15 stands for the next of the values above 14, which follow

Most planes of a delta hold small numbers (differences of one or two units in the last place). zstd's fast level
searches for repetitions in them, which does not pay off. Packed in pairs they are left to its entropy coder, which
takes a fifth less.

Invariants:
- a reader knows the length of a plane in advance: a stream never decides how much memory it takes;
- whatever the bytes are, reading them gives a plane of that length or a `DeltaError`.
"""

import struct
from enum import IntEnum
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shoal.shardcast.errors import DeltaError

Bytes = NDArray[np.uint8]
Parts = list[Any]
"""what is written one after the other: objects with the buffer interface"""

ZSTD_LEVEL = 1
"""Higher levels save 2 % of a delta and take three times as long."""
_HEAD = struct.Struct("<BI")
_ESCAPE = 15
_MAX_ESCAPED = 16
"""Nibbles are tried if fewer than one value in this many needs an escape."""
_MIN_NIBBLES = 64
_CODEC = pa.Codec("zstd", compression_level=ZSTD_LEVEL)


class Method(IntEnum):
    """The encoding of a plane. Changing breaks: reading deltas of others."""

    STORED = 0
    ZSTD = 1
    NIBBLES = 2


class PayloadReader:
    """Reads fields from the front of a payload."""

    def __init__(self, payload: bytes) -> None:
        self._view = memoryview(payload)

    def take_bytes(self, size: int) -> memoryview:
        if size > len(self._view):
            raise DeltaError("the delta is damaged: a block ends too early")
        taken, self._view = self._view[:size], self._view[size:]
        return taken

    def take_fields(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take_bytes(layout.size))

    def check_end(self) -> None:
        """Raise if bytes are left."""
        if len(self._view):
            raise DeltaError("the delta is damaged: a block is longer than its content")


def write_stream(plane: Bytes, parts: Parts) -> None:
    """Append a plane of at least one byte."""
    if len(plane) >= _MIN_NIBBLES:
        escaped = plane >= _ESCAPE
        count = int(np.count_nonzero(escaped))
        if count * _MAX_ESCAPED < len(plane):
            parts.append(_HEAD.pack(Method.NIBBLES, count))
            _write_simple(_pair_nibbles(plane), parts)
            if count:
                _write_simple(plane[escaped], parts)
            return
    _write_simple(plane, parts)


def read_stream(reader: PayloadReader, size: int) -> Bytes:
    """Read the next plane of `size` bytes, at least one; it may be read-only."""
    method, length = reader.take_fields(_HEAD)
    if method != Method.NIBBLES:
        return _read_simple(reader, size, method, length)
    pairs = _read_simple(reader, (size + 1) // 2, *reader.take_fields(_HEAD))
    plane = _split_nibbles(pairs, size)
    places = np.flatnonzero(plane == _ESCAPE)
    if len(places) != length:
        raise DeltaError("the delta is damaged: an escape without a value")
    if length:
        plane[places] = _read_simple(reader, length, *reader.take_fields(_HEAD))
    return plane


def count_bytes(parts: Parts) -> int:
    """Bytes that parts take together."""
    return sum(memoryview(part).nbytes for part in parts)


def _write_simple(plane: Bytes, parts: Parts) -> None:
    packed = _CODEC.compress(plane)
    if packed.size < len(plane):
        parts += [_HEAD.pack(Method.ZSTD, packed.size), packed]
    else:
        parts += [_HEAD.pack(Method.STORED, len(plane)), plane.tobytes()]


def _read_simple(reader: PayloadReader, size: int, method: int, length: int) -> Bytes:
    packed = reader.take_bytes(length)
    if method == Method.STORED and length == size:
        return np.frombuffer(packed, dtype=np.uint8)
    if method != Method.ZSTD:
        raise DeltaError("the delta is damaged: unknown plane encoding")
    try:
        plane = _CODEC.decompress(packed, decompressed_size=size)
    except OSError as error:  # raised by pyarrow for a frame that is damaged or has a different size
        raise DeltaError(f"the delta is damaged: {error}") from error
    return np.frombuffer(plane, dtype=np.uint8)


def _pair_nibbles(plane: Bytes) -> Bytes:
    """Pack two nibbles per byte, the first in the low half. Works on words: byte steps take three times as long."""
    words = np.zeros((len(plane) + 1) // 2, dtype="<u2")
    np.minimum(plane, _ESCAPE, out=words.view(np.uint8)[: len(plane)])
    words |= words >> 4
    return words.astype(np.uint8)


def _split_nibbles(pairs: Bytes, size: int) -> Bytes:
    words = pairs.astype("<u2")
    words |= words << 4
    words &= 0x0F0F
    return words.view(np.uint8)[:size]
