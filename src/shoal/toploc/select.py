"""The values a proof commits to: the k largest magnitudes of each chunk of hidden states.

- Hidden states are read as bfloat16 patterns; float32 and float16 are rounded to nearest, ties to even.
- Order: larger magnitude first, equal magnitudes by lower flat index (token * width + channel). The choice is exact, so
  it depends neither on threads nor on what else is in the batch.
- NaN counts as larger than infinity, and every NaN as the one pattern 0x7FC0: which sign and payload a NaN carries is
  an accident of the machine, and patterns from 0xFFD9 on are not elements of the field. -0.0 and 0.0 tie.
"""

from collections.abc import Iterator, Sequence
from math import gcd, isqrt

import numpy as np
import torch
from numpy.typing import NDArray

Bits = NDArray[np.int16]
"""bfloat16 patterns"""
States = torch.Tensor | NDArray[np.float32] | NDArray[np.float16]
"""hidden states (tokens, width): bfloat16, float16 or float32"""

MAGNITUDE, INFINITY, NAN = np.int16(0x7FFF), np.int16(0x7F80), np.int16(0x7FC0)
TILE_BYTES = 1 << 20
"""Magnitudes under work at a time: they and the states they come from should stay in a core's cache."""
SMALL_VALUES = 1 << 13
"""Values of the longest chunk for which ranking all beats searching for candidates; an index has 16 bits there."""
MAX_TOPK = 512
"""Values of one proof: few enough that one of the first moduli keeps their places apart (chance 0.13 each)."""
MAX_VALUES = 1 << 31
"""Values of one chunk; an index has 31 bits in a sort key."""
_LOW = 0xFFFF
_SMALL_PRIMES = 2 * 3 * 5 * 7 * 11 * 13


def check_sizes(chunk_size: int, topk: int) -> None:
    """Refuse sizes that no proof can have."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, expected at least 1")
    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk is {topk}, expected 1 to {MAX_TOPK}")


def read_bits(hidden: States) -> Bits:
    """bfloat16 patterns (tokens, width) of hidden states; a view where these are contiguous bfloat16 on the CPU."""
    if isinstance(hidden, np.ndarray):
        if hidden.dtype not in (np.float32, np.float16):
            raise ValueError(f"hidden states are {hidden.dtype}, expected float32 or float16 (or a torch tensor)")
        hidden = torch.from_numpy(np.require(hidden, requirements=("C", "W")))
    elif hidden.dtype not in (torch.bfloat16, torch.float32, torch.float16):
        raise ValueError(f"hidden states are {hidden.dtype}, expected bfloat16, float32 or float16")
    if hidden.ndim != 2 or not hidden.shape[1]:
        raise ValueError(f"hidden states have shape {tuple(hidden.shape)}, expected (tokens, width)")
    return hidden.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()


def split_chunks(hidden: States, chunk_size: int) -> list[Bits]:
    """Flat patterns of every `chunk_size` tokens, the last chunk shorter; no tokens, no chunks."""
    bits = read_bits(hidden)
    return [bits[start : start + chunk_size].reshape(-1) for start in range(0, len(bits), chunk_size)]


def group_chunks(chunks: Sequence[Bits], topk: int) -> dict[int, list[int]]:
    """Which chunks commit to how many values: `topk`, or all where a chunk has fewer."""
    groups: dict[int, list[int]] = {}
    for position, chunk in enumerate(chunks):
        groups.setdefault(min(topk, len(chunk)), []).append(position)
    return groups


def select_top(chunks: Sequence[Bits], k: int) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """Flat indices and patterns (B, k) of the k largest magnitudes of each chunk, none of which has fewer values."""
    lengths = [len(chunk) for chunk in chunks]
    longest = max(lengths, default=0)
    assert k <= min(lengths, default=k) and longest < MAX_VALUES
    # one buffer for all tiles, and chunks of like length side by side in a tile
    order = sorted(range(len(chunks)), key=lambda position: -lengths[position])
    buffer = np.empty(max(TILE_BYTES // 2, 2 * longest), dtype=np.int16)
    indices = np.empty((len(chunks), k), dtype=np.int64)
    values = np.empty((len(chunks), k), dtype=np.int16)
    for tile in _cut_tiles(order, chunks, k):
        members = [chunks[position] for position in tile]
        small = len(members[0]) <= SMALL_VALUES
        indices[tile], values[tile] = _rank_small(members, k) if small else _rank_large(members, k, buffer)
    return indices, merge_nans(values).view(np.uint16)


def merge_nans(bits: Bits) -> Bits:
    """The patterns with every NaN as `NAN`."""
    return np.where((bits & MAGNITUDE) > INFINITY, NAN, bits)


def _cut_tiles(order: Sequence[int], chunks: Sequence[Bits], k: int) -> Iterator[Sequence[int]]:
    """Runs of `order` that fill a tile; each has at least one chunk."""
    start = 0
    while start < len(order):
        longest = len(chunks[order[start]])
        if longest <= SMALL_VALUES:
            size = max(1, TILE_BYTES // 8 // longest)  # a key and what it is made of are 8 bytes
        else:
            columns, depth = _lay_blocks(longest, k)
            size = max(1, TILE_BYTES // 2 // (columns * depth))
        yield order[start : start + size]
        start += size


def _rank_small(chunks: Sequence[Bits], k: int) -> tuple[NDArray[np.int64], Bits]:
    """Indices and patterns (B, k) of each chunk's top magnitudes, in order: every value is made a key and ranked."""
    joined = _join_chunks(chunks)
    length = joined.shape[1]
    keys = _cap_nans(joined & MAGNITUDE).astype(np.uint32)
    keys <<= 16
    keys |= np.arange(_LOW, _LOW - length, -1, dtype=np.uint32)  # of equal magnitudes the first is largest
    keys.partition(length - k, axis=1)
    top = keys[:, length - k :]
    top.sort(axis=1)
    indices = _LOW - (top[:, ::-1] & _LOW).astype(np.int64)
    return indices, np.take_along_axis(joined, indices, axis=1)


def _join_chunks(chunks: Sequence[Bits]) -> Bits:
    """Chunks as one array (B, values), the longest first. Zeros fill the end, see `_fill_blocks`."""
    longest = len(chunks[0])
    if len(chunks[-1]) == longest:
        return np.concatenate(chunks).reshape(len(chunks), longest)
    joined = np.zeros((len(chunks), longest), dtype=np.int16)
    for row, chunk in enumerate(chunks):
        joined[row, : len(chunk)] = chunk
    return joined


def _cap_nans(magnitudes: Bits) -> Bits:
    """Every NaN as `NAN`, in place."""
    if magnitudes.max() > INFINITY:
        magnitudes[magnitudes > INFINITY] = NAN
    return magnitudes


def _rank_large(chunks: Sequence[Bits], k: int, buffer: Bits) -> tuple[NDArray[np.int64], Bits]:
    """Indices and patterns (B, k) of each chunk's top magnitudes, in order; only a few values are ranked."""
    indices = _find_keys(chunks, k, buffer)
    values = np.empty(indices.shape, dtype=np.int16)
    for row, chunk in enumerate(chunks):
        np.take(chunk, indices[row], out=values[row], mode="clip")  # without a buffer; all are inside
    return indices, values


def _find_keys(chunks: Sequence[Bits], k: int, buffer: Bits) -> NDArray[np.int64]:
    """Indices (B, k) of each chunk's top magnitudes, in order.

    A block is every value of a chunk at one place modulo `columns`. k blocks have a maximum of at least the k-th
    largest maximum, so k values are at least that large: only these, a few more than k, are looked at and sorted.
    """
    columns, depth = _lay_blocks(len(chunks[0]), k)
    blocks = _fill_blocks(chunks, buffer[: len(chunks) * depth * columns].reshape(len(chunks), -1))
    blocks = blocks.reshape(len(chunks), depth, columns)
    maxima = blocks.max(axis=1)
    if maxima.max() > INFINITY:
        blocks[blocks > INFINITY] = NAN
        maxima[maxima > INFINITY] = NAN
    bound = np.partition(maxima, columns - k, axis=1)[:, columns - k]
    row, column = np.divmod(np.flatnonzero(maxima >= bound[:, None]), columns)
    found = blocks[row, :, column]  # (blocks that reach the bound, depth)
    flat = np.flatnonzero(found >= bound[row, None])
    block, level = np.divmod(flat, depth)
    keys = _build_keys(row[block], found.reshape(-1)[flat], level * columns + column[block])
    keys.sort()
    starts = np.searchsorted(keys, np.arange(len(chunks)) << 46)
    return keys[starts[:, None] + np.arange(k)] & (MAX_VALUES - 1)


def _build_keys(row: NDArray[np.int64], magnitude: Bits, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """Integers that sort by chunk, then by falling magnitude, then by index."""
    return (row << 46) | ((MAGNITUDE - magnitude).astype(np.int64) << 31) | index


def _fill_blocks(chunks: Sequence[Bits], buffer: Bits) -> Bits:
    """Magnitudes of each chunk in its row. Zeros fill the end: on a tie the lower index wins, so none is chosen."""
    for row, chunk in enumerate(chunks):
        np.bitwise_and(chunk, MAGNITUDE, out=buffer[row, : len(chunk)])
        buffer[row, len(chunk) :] = 0
    return buffer


def _lay_blocks(values: int, k: int) -> tuple[int, int]:
    """Columns and depth that balance the work on maxima and inside blocks.

    Few channels hold most of the top values in real models. Their indices lie a multiple of the width apart, and as
    columns / 32 has no small prime factor they fall into different blocks.
    """
    lanes = isqrt(k * values) // 32 + 1
    while gcd(lanes, _SMALL_PRIMES) > 1:
        lanes += 1
    columns = min(values, 32 * lanes)
    return columns, -(-values // columns)
