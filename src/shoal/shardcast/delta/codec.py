"""One block of a checkpoint as the difference to the same block of its parent, and back.

A block is up to 2^21 elements of 1, 2, 4 or 8 bytes, treated as unsigned integers whatever they mean, so every bit
pattern survives: NaN payloads, negative zeros, denormals. Differences are taken modulo 2^bits and folded so that small
ones of both signs are small numbers (0, -1, 1, -2 ... -> 0, 1, 2, 3 ...). After a training step most elements are
equal, and most of the others moved by one unit in the last place.

    same     nothing: the parent's block
    sparse   count, shift, gap planes, difference planes; then the gaps between changed elements (shift low bits as
             packed planes of bits, the rest as planes of bytes) and their folded differences minus one
    dense    the folded differences of all elements as planes of bytes
    fresh    the block itself as planes of bytes; the only form that needs no parent

Invariants:
- decoding what was encoded against the same base gives the block back, bit for bit;
- decoding anything else gives a block or a `DeltaError`, in memory bounded by the block's size.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.shardcast.delta.stream import Bytes, Parts, PayloadReader, count_bytes, read_stream, write_stream
from shoal.shardcast.errors import DeltaError

BLOCK_ELEMENTS = 1 << 21
"""Maximum elements of a block. Changing breaks: reading deltas of others."""
BLOCK_BYTES = 1 << 22
"""Maximum bytes of a block. Changing breaks: reading deltas of others."""
MAX_PAYLOAD_BYTES = BLOCK_BYTES + 4096
"""Maximum bytes of an encoded block: an incompressible one is stored, with a few bytes for each plane."""
WIDTHS = (1, 2, 4, 8)

_SPARSE_HEAD = struct.Struct("<IBBB")
_MAX_GAP_PLANES = 3
_MAX_SHIFT = 16
_MAX_SPARSE = 0.4
"""Share of changed elements up to which gaps are smaller than differences of all elements (measured: 0.4 to 0.5)."""
_SEARCH_SHARE = 0.1
"""Share of changed elements up to which they are found faster by first searching for groups of eight with a change."""
_POOR_SHARE = 0.8
"""A block encoded to more than this share of its size is also tried without its parent."""
_GAP_SAMPLES = 256
_MIN_SHIFTED = 1024
"""Number of gaps below which planes of bits save less than their headers take."""
_GAP_BITS = 4
"""Bits of the median gap that are left to the entropy coder; those below are close to random."""

Elements = NDArray[Any]
"""Unsigned integers, one for each element."""


class BlockEncoding(IntEnum):
    """The encoding of a block. Changing breaks: reading deltas of others."""

    SAME = 0
    SPARSE = 1
    DENSE = 2
    FRESH = 3


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """An encoded block."""

    form: BlockEncoding
    parts: Parts
    """its payload"""
    num_changed: int


def block_elements(width: int) -> int:
    """Elements of a full block."""
    return min(BLOCK_ELEMENTS, BLOCK_BYTES // width)


def sum_block(padded: NDArray[np.uint8]) -> int:
    """A checksum of a block of a multiple of 8 bytes: cheap, and not secure against a forger."""
    return int(np.add.reduce(padded.view(np.uint64)))


def encode_block(base: Elements, block: Elements, changed: NDArray[np.bool_]) -> EncodedBlock:
    """Encode a block against its base, which is overwritten.

    `changed` is scratch space: as many entries as elements, rounded up to a multiple of 8.
    """
    changed[len(block) :] = False
    np.not_equal(base, block, out=changed[: len(block)])
    count = int(np.count_nonzero(changed))
    if count == 0:
        return EncodedBlock(BlockEncoding.SAME, [], 0)
    if count <= _MAX_SPARSE * len(block):
        form, parts = BlockEncoding.SPARSE, _encode_sparse(base, block, _find_changed(changed, count))
    else:
        form, parts = BlockEncoding.DENSE, _encode_planes(_fold(np.subtract(block, base, out=base)))
    if count_bytes(parts) > _POOR_SHARE * block.nbytes:
        fresh = encode_fresh(block)
        if count_bytes(fresh.parts) < count_bytes(parts):
            form, parts = fresh.form, fresh.parts
    return EncodedBlock(form, parts, count)


def encode_fresh(block: Elements) -> EncodedBlock:
    """Encode a block that has no base."""
    return EncodedBlock(BlockEncoding.FRESH, _encode_planes(block), len(block))


def decode_block(form: int, payload: bytes, block: Elements) -> None:
    """Turn the base in `block` into the encoded block, in place. A fresh block ignores the previous contents."""
    reader = PayloadReader(payload)
    if form == BlockEncoding.SPARSE:
        _decode_sparse(reader, block)
    elif form == BlockEncoding.DENSE:
        difference = np.empty_like(block)
        _decode_planes(reader, difference)
        block += _unfold(difference)
    elif form == BlockEncoding.FRESH:
        _decode_planes(reader, block)
    elif form != BlockEncoding.SAME:
        raise DeltaError("the delta is damaged: unknown block encoding")
    reader.check_end()


def _find_changed(changed: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
    if count > _SEARCH_SHARE * len(changed):
        return np.flatnonzero(changed)
    eights = changed.view(np.uint64)
    hits = np.flatnonzero(eights != 0)
    inner = np.flatnonzero(eights[hits].view(np.bool_))
    found = hits[inner >> 3]
    found <<= 3
    found += inner & 7
    return found


def _encode_sparse(base: Elements, block: Elements, places: NDArray[np.int64]) -> Parts:
    gaps = places.astype(np.uint32)
    gaps[1:] -= gaps[:-1].copy()
    gaps[1:] -= 1
    folded = _fold(block[places] - base[places])
    folded -= 1
    shift = _choose_shift(gaps)
    rest = gaps >> shift
    planes = _count_planes(rest), _count_planes(folded)
    parts: Parts = [_SPARSE_HEAD.pack(len(places), shift, *planes)]
    for bit in range(shift):
        write_stream(np.packbits((gaps >> bit).astype(np.uint8) & 1), parts)
    _write_planes(rest, planes[0], parts)
    _write_planes(folded, planes[1], parts)
    return parts


def _decode_sparse(reader: PayloadReader, block: Elements) -> None:
    count, shift, *planes = reader.take_fields(_SPARSE_HEAD)
    fits = 1 <= count <= _MAX_SPARSE * len(block) and shift <= _MAX_SHIFT
    if not fits or not 1 <= planes[0] <= _MAX_GAP_PLANES or not 1 <= planes[1] <= block.itemsize:
        raise DeltaError("the delta is damaged: impossible counts in a block")
    low = [read_stream(reader, (count + 7) // 8) for _ in range(shift)]
    gaps = _read_planes(reader, np.empty(count, dtype=np.uint32), planes[0])
    places = _place_changes(gaps, low, len(block))
    folded = _read_planes(reader, np.empty(count, dtype=block.dtype), planes[1])
    folded += 1
    np.add.at(block, places, _unfold(folded))  # no place occurs twice; one pass instead of the two of `+=`


def _place_changes(gaps: NDArray[np.uint32], low: list[Bytes], size: int) -> NDArray[np.int64]:
    """Indices of the changed elements from the gaps between them; `low` are the packed low bits that were split off."""
    shift = len(low)
    if len(gaps) + (int(gaps.sum(dtype=np.uint64)) << shift) > size:  # otherwise the following could overflow
        raise DeltaError("the delta is damaged: a change lies outside its block")
    for first in reversed(range(0, shift, 8)):
        planes = low[first : first + 8]
        gaps <<= len(planes)
        gaps |= _join_bits(planes, len(gaps))
    gaps += 1
    gaps[0] -= 1
    # 32 bits are faster, and wide enough unless the encoder split off more bits than there are.
    wide = (len(gaps) << shift) + size >= 1 << 32
    places = np.cumsum(gaps, dtype=np.int64 if wide else np.uint32).astype(np.int64, copy=False)
    if int(places[-1]) >= size:
        raise DeltaError("the delta is damaged: a change lies outside its block")
    return places


def _join_bits(planes: list[Bytes], count: int) -> Bytes:
    """Up to eight packed planes of bits as numbers, the lowest bit first."""
    bits = np.unpackbits(planes[-1], count=count)
    for plane in reversed(planes[:-1]):
        bits <<= 1
        bits |= np.unpackbits(plane, count=count)
    return bits


def _choose_shift(gaps: NDArray[np.uint32]) -> int:
    """Number of low bits of gaps that are not worth coding: those far below the median gap."""
    if len(gaps) < _MIN_SHIFTED:
        return 0
    sample = np.sort(gaps[:: max(1, len(gaps) // _GAP_SAMPLES)])
    return min(_MAX_SHIFT, max(0, int(sample[len(sample) // 2]).bit_length() - _GAP_BITS))


def _fold(difference: Elements) -> Elements:
    """0, -1, 1, -2 ... modulo 2^bits -> 0, 1, 2, 3 ..."""
    signs = difference >> (8 * difference.itemsize - 1)
    np.negative(signs, out=signs)
    difference <<= 1
    difference ^= signs
    return difference


def _unfold(folded: Elements) -> Elements:
    signs = folded & 1
    np.negative(signs, out=signs)
    folded >>= 1
    folded ^= signs
    return folded


def _encode_planes(values: Elements) -> Parts:
    planes = _count_planes(values)
    parts: Parts = [bytes([planes])]
    _write_planes(values, planes, parts)
    return parts


def _decode_planes(reader: PayloadReader, values: Elements) -> None:
    (planes,) = reader.take_bytes(1)
    if planes > values.itemsize:
        raise DeltaError("the delta is damaged: an element has too many bytes")
    _read_planes(reader, values, planes)


def _count_planes(values: Elements) -> int:
    """Bytes that the largest value takes, at least one."""
    return max(1, (int(values.max()).bit_length() + 7) // 8)


def _write_planes(values: Elements, planes: int, parts: Parts) -> None:
    columns = values.view(np.uint8).reshape(len(values), -1)
    for plane in range(planes):
        write_stream(np.ascontiguousarray(columns[:, plane]), parts)


def _read_planes(reader: PayloadReader, values: Elements, planes: int) -> Elements:
    """Fill values from their planes of bytes, the lowest first; with zeros if there are no planes."""
    values[:] = read_stream(reader, len(values)) if planes else 0
    for plane in range(1, planes):
        high = read_stream(reader, len(values))
        if high.any():  # mostly a few large differences, or none in this block
            values |= high.astype(values.dtype) << 8 * plane
    return values
