"""int8 and int4 (default): blocks of 256 elements with one fp16 scale each, and a level per element.

    s = max |x| / L, rounded up to fp16        q = round(x / s) in -L .. L        x' = q s
    |x - x'| <= s / 2

    int8    L = 127    one element in a byte     1.008 bytes per element
    int4    L = 7      two elements in a byte    0.508 bytes per element

With error feedback the loss is added to the next round. Block-wise 8-bit quantisation as in Dettmers et al., arXiv
2110.02861, with linear levels. Four bits for outer gradients: Douillard et al., Streaming DiLoCo, arXiv 2501.18512;
error feedback in DiLoCo: Therien et al., MuLoCo, arXiv 2505.23725.
"""

from abc import abstractmethod

import numpy as np

from shoal.diloco.background import run_pieces
from shoal.diloco.codecs.base import FLOAT, HALF, Codec, CodecError, ReadPiece, check_vector

BLOCK = 256
"""Elements that share a scale. Changing breaks: every payload of the block codecs."""
MAX_HALF = 65504.0
_OFFSET = 8


class BlockCodec(Codec):
    """All scales, then all levels, packed into bytes."""

    has_feedback = True
    max_level: int
    """L"""
    per_byte: int
    """elements per byte"""

    @abstractmethod
    def _pack(self, levels: np.ndarray) -> np.ndarray:
        """Pack int8 levels into bytes."""

    @abstractmethod
    def _unpack(self, packed: np.ndarray, size: int) -> np.ndarray:
        """Unpack the int8 levels of `size` elements; `CodecError` for bytes that no encoder writes."""

    def encode(self, values: np.ndarray) -> bytes:
        scales = np.empty(count_blocks(values.size), dtype=HALF)
        packed = np.empty(self._count_packed(values.size), dtype=np.uint8)

        def encode_piece(piece: slice) -> None:
            check_vector(values[piece])
            rows = pad_blocks(values[piece])
            found = scales[find_blocks(piece)] = pick_scales(rows, self.max_level)
            levels = quantize_rows(rows, found, self.max_level).reshape(-1)
            packed[self._find_packed(piece)] = self._pack(levels)[: self._count_packed(piece.stop - piece.start)]

        run_pieces(values.size, encode_piece)
        return scales.tobytes() + packed.tobytes()

    def count_bytes(self, count: int) -> int:
        return HALF.itemsize * count_blocks(count) + self._count_packed(count)

    def _read_payload(self, payload: bytes, count: int) -> ReadPiece:
        blocks = count_blocks(count)
        scales = np.frombuffer(payload, dtype=HALF, count=blocks)
        packed = np.frombuffer(payload, dtype=np.uint8, offset=HALF.itemsize * blocks)

        def read_piece(piece: slice) -> np.ndarray:
            size = piece.stop - piece.start
            values: np.ndarray = self._unpack(packed[self._find_packed(piece)], size).astype(FLOAT)
            values *= widen_scales(scales[find_blocks(piece)], size)
            return values

        return read_piece

    def _count_packed(self, count: int) -> int:
        return -(-count // self.per_byte)

    def _find_packed(self, piece: slice) -> slice:
        """The bytes of a piece that begins at a byte boundary."""
        return slice(piece.start // self.per_byte, self._count_packed(piece.stop))


class Int8Codec(BlockCodec):
    """One signed byte per element. Level -128 is never written."""

    name, max_level, per_byte = "int8", 127, 1

    def _pack(self, levels: np.ndarray) -> np.ndarray:
        return levels.view(np.uint8)

    def _unpack(self, packed: np.ndarray, size: int) -> np.ndarray:
        levels = packed.view(np.int8)
        if (levels < -self.max_level).any():
            raise CodecError("a level that no encoder writes")
        return levels


class Int4Codec(BlockCodec):
    """Nibbles q + 8, the first of two in the low half. Nibble 0 is never written."""

    name, max_level, per_byte = "int4", 7, 2

    def _pack(self, levels: np.ndarray) -> np.ndarray:
        # Padding is level 0, so the last half byte of an odd number of elements is always 8.
        nibbles = (levels + _OFFSET).view(np.uint8)
        packed: np.ndarray = nibbles[0::2] | (nibbles[1::2] << 4)
        return packed

    def _unpack(self, packed: np.ndarray, size: int) -> np.ndarray:
        nibbles = np.empty(2 * packed.size, dtype=np.int8)
        nibbles[0::2], nibbles[1::2] = packed & 15, packed >> 4
        if not nibbles.all() or (size % 2 and nibbles[-1] != _OFFSET):
            raise CodecError("a level that no encoder writes")
        return nibbles[:size] - np.int8(_OFFSET)


def count_blocks(count: int) -> int:
    """Number of blocks for that many elements."""
    return -(-count // BLOCK)


def find_blocks(piece: slice) -> slice:
    """The blocks of a piece that begins at a block boundary."""
    return slice(piece.start // BLOCK, count_blocks(piece.stop))


def pad_blocks(values: np.ndarray) -> np.ndarray:
    """The vector as rows of `BLOCK`, the last padded with zeros."""
    rows = np.zeros((count_blocks(values.size), BLOCK), dtype=FLOAT)
    rows.reshape(-1)[: values.size] = values
    return rows


def pick_scales(rows: np.ndarray, max_level: int) -> np.ndarray:
    """One fp16 scale per block, rounded up, so that the largest element is at most `max_level` scales."""
    wanted = np.abs(rows).max(axis=1, initial=0.0).astype(np.float64) / max_level
    if wanted.size and wanted.max() > MAX_HALF:
        raise CodecError(f"an element above {MAX_HALF * max_level:g}, beyond fp16 scales")
    scales = wanted.astype(HALF)
    return np.where(scales < wanted, np.nextafter(scales, HALF.type(MAX_HALF)), scales).astype(HALF)


def quantize_rows(rows: np.ndarray, scales: np.ndarray, max_level: int) -> np.ndarray:
    """Nearest multiple of the block's scale, as int8 in -max_level .. max_level."""
    wide = scales.astype(FLOAT)[:, None]
    ratio = rows / np.where(wide > 0, wide, FLOAT.type(1.0))  # a block with scale 0 is all zeros
    np.rint(ratio, out=ratio)
    return np.clip(ratio, -max_level, max_level, out=ratio).astype(np.int8)


def widen_scales(scales: np.ndarray, size: int) -> np.ndarray:
    """The scale of each of `size` elements; `CodecError` unless all are finite and not negative."""
    if not np.isfinite(scales).all() or (scales < 0).any():
        raise CodecError("a scale that is not finite or below zero")
    wide: np.ndarray = np.repeat(scales.astype(FLOAT), BLOCK)[:size]
    return wide
