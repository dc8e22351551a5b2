"""The values that a proof commits to: the k largest magnitudes of each chunk of hidden states.

- Hidden states are read as bfloat16 patterns; float32 and float16 are rounded to nearest, ties to even.
- Order: larger magnitude first, equal magnitudes by lower flat index (token * width + channel). The selection is exact,
  so it depends neither on threads nor on the rest of the batch.
- NaN counts as larger than infinity, and every NaN as the one pattern 0x7FC0: the sign and payload of a NaN depend on
  the machine, and patterns from 0xFFD9 on are not elements of the field. -0.0 and 0.0 tie.
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
"""Magnitudes processed at a time: they and the states they come from should stay in a core's cache."""
SMALL_VALUES = 1 << 13
"""Largest chunk for which ranking all values beats searching for candidates; an index has 16 bits there."""
MAX_TOPK = 512
"""Most values of one proof: few enough that one of the first moduli keeps their places distinct (chance 0.13 each)."""
MAX_VALUES = 1 << 31
"""Most values of one chunk; an index has 31 bits in a sort key."""
_LOW = 0xFFFF
_SMALL_PRIMES = 2 * 3 * 5 * 7 * 11 * 13


def check_sizes(chunk_size: int, topk: int) -> None:
    """Raise for sizes that no proof can have."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, expected at least 1")
    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk is {topk}, expected 1 to {MAX_TOPK}")


def read_bits(hidden: States) -> Bits:
    """bfloat16 patterns (tokens, width) of hidden states; a view if these are contiguous bfloat16 on the CPU."""
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
    """Chunk indices by the number of values committed to: `topk`, or all values of a smaller chunk."""
    groups: dict[int, list[int]] = {}
    for position, chunk in enumerate(chunks):
        groups.setdefault(min(topk, len(chunk)), []).append(position)
    return groups


def select_top(chunks: Sequence[Bits], k: int) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """Flat indices and patterns (B, k) of the k largest magnitudes of each chunk; every chunk has at least k values."""
    lengths = [len(chunk) for chunk in chunks]
    longest = max(lengths, default=0)
    assert k <= min(lengths, default=k) and longest < MAX_VALUES
    # One buffer for all tiles; chunks of similar length share a tile.
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
    """Runs of `order` that fill a tile, each with at least one chunk."""
    start = 0
    while start < len(order):
        longest = len(chunks[order[start]])
        if longest <= SMALL_VALUES:
            size = max(1, TILE_BYTES // 8 // longest)  # a key and its inputs take 8 bytes
        else:
            columns, depth = _lay_blocks(longest, k)
            size = max(1, TILE_BYTES // 2 // (columns * depth))
        yield order[start : start + size]
        start += size


def _rank_small(chunks: Sequence[Bits], k: int) -> tuple[NDArray[np.int64], Bits]:
    """Indices and patterns (B, k) of each chunk's top magnitudes, in order: every value becomes a key and is ranked."""
    joined = _join_chunks(chunks)
    length = joined.shape[1]
    magnitudes = joined & MAGNITUDE
    if magnitudes.max() > INFINITY:
        magnitudes[magnitudes > INFINITY] = NAN
    keys = magnitudes.astype(np.uint32)
    keys <<= 16
    keys |= np.arange(_LOW, _LOW - length, -1, dtype=np.uint32)  # of equal magnitudes the first is largest
    keys.partition(length - k, axis=1)
    top = keys[:, length - k :]
    top.sort(axis=1)
    indices = _LOW - (top[:, ::-1] & _LOW).astype(np.int64)
    return indices, np.take_along_axis(joined, indices, axis=1)


def _join_chunks(chunks: Sequence[Bits]) -> Bits:
    """Chunks as one array (B, values), the longest first, padded with zeros as in `_find_keys`."""
    longest = len(chunks[0])
    if len(chunks[-1]) == longest:
        return np.concatenate(chunks).reshape(len(chunks), longest)
    joined = np.zeros((len(chunks), longest), dtype=np.int16)
    for row, chunk in enumerate(chunks):
        joined[row, : len(chunk)] = chunk
    return joined


def _rank_large(chunks: Sequence[Bits], k: int, buffer: Bits) -> tuple[NDArray[np.int64], Bits]:
    """Indices and patterns (B, k) of each chunk's top magnitudes, in order; only a few values are ranked."""
    indices = _find_keys(chunks, k, buffer)
    values = np.empty(indices.shape, dtype=np.int16)
    for row, chunk in enumerate(chunks):
        np.take(chunk, indices[row], out=values[row], mode="clip")  # "clip" avoids a buffer; all indices are valid
    return indices, values


def _find_keys(chunks: Sequence[Bits], k: int, buffer: Bits) -> NDArray[np.int64]:
    """Indices (B, k) of each chunk's top magnitudes, in order.

    A block is every value of a chunk at one place modulo `columns`. k blocks have a maximum of at least the k-th
    largest maximum, so k values are at least that large: only these, a few more than k, are examined and sorted.
    """
    columns, depth = _lay_blocks(len(chunks[0]), k)
    rows = buffer[: len(chunks) * depth * columns].reshape(len(chunks), -1)
    for place, chunk in enumerate(chunks):  # padded with zeros: on a tie the lower index wins, so none is chosen
        np.bitwise_and(chunk, MAGNITUDE, out=rows[place, : len(chunk)])
        rows[place, len(chunk) :] = 0
    blocks = rows.reshape(len(chunks), depth, columns)
    maxima = blocks.max(axis=1)
    if maxima.max() > INFINITY:
        blocks[blocks > INFINITY] = NAN
        maxima[maxima > INFINITY] = NAN
    bound = np.partition(maxima, columns - k, axis=1)[:, columns - k]
    row, column = np.divmod(np.flatnonzero(maxima >= bound[:, None]), columns)
    found = blocks[row, :, column]  # (blocks that reach the bound, depth)
    flat = np.flatnonzero(found >= bound[row, None])
    block, level = np.divmod(flat, depth)
    # Integers that sort by chunk, then by falling magnitude, then by index.
    falling = (MAGNITUDE - found.reshape(-1)[flat]).astype(np.int64)
    keys = (row[block] << 46) | (falling << 31) | (level * columns + column[block])
    keys.sort()
    starts = np.searchsorted(keys, np.arange(len(chunks)) << 46)
    return keys[starts[:, None] + np.arange(k)] & (MAX_VALUES - 1)


def _lay_blocks(values: int, k: int) -> tuple[int, int]:
    """Columns and depth that balance the work on maxima and inside blocks.

    In real models few channels hold most of the top values. Their indices are multiples of the width apart, and because
    columns / 32 has no small prime factor they fall into different blocks.
    """
    lanes = isqrt(k * values) // 32 + 1
    while gcd(lanes, _SMALL_PRIMES) > 1:
        lanes += 1
    columns = min(values, 32 * lanes)
    return columns, -(-values // columns)
