"""What a codec is: a flat fp32 vector to bytes and back, with a bound on what is lost.

Invariants:
- the length of a payload follows from the number of elements alone, so a decoder knows it before it looks;
- encoding is deterministic, and decoding the same bytes gives the same bits on every machine: elementwise IEEE
  arithmetic only, little-endian;
- whatever bytes a stranger sends, `decode` returns finite numbers or raises `CodecError`; no length, index or scale in
  the payload decides how much is allocated.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from shoal.diloco.pieces import run_pieces

BLOCK = 256
"""Elements that share a scale. Changing breaks: every payload of the block codecs."""
FLOAT = np.dtype("<f4")
HALF = np.dtype("<f2")
MAX_HALF = 65504.0


ReadPiece = Callable[[slice], np.ndarray]
"""the fp32 elements of a piece (`pieces.run_pieces`); raises `CodecError` where they are none"""


class CodecError(ValueError):
    """Bytes that are no payload of this codec for this number of elements, or numbers that cannot be encoded."""


class Codec(Protocol):
    """One way to write a vector."""

    name: str
    has_feedback: bool
    """whether what is lost in a round is added to the next one's vector (error feedback)"""

    def encode(self, values: np.ndarray) -> bytes:
        """The payload of a finite fp32 vector."""

    def decode(self, payload: bytes, count: int) -> np.ndarray:
        """The fp32 vector of `count` elements in a payload."""

    def open_payload(self, payload: bytes, count: int) -> ReadPiece:
        """The same piece by piece, so that many vectors need not be in memory at once. Checks the length at once."""

    def count_bytes(self, count: int) -> int:
        """Length of the payload of `count` elements."""

    def bound_error(self, values: np.ndarray) -> np.ndarray:
        """The most by which each element may be off after one way through the codec."""


class Decoder:
    """Decoding whole, for codecs that decode by pieces."""

    def open_payload(self, payload: bytes, count: int) -> ReadPiece:
        raise NotImplementedError

    def decode(self, payload: bytes, count: int) -> np.ndarray:
        read, values = self.open_payload(payload, count), np.empty(count, dtype=FLOAT)

        def decode_piece(piece: slice) -> None:
            values[piece] = read(piece)

        run_pieces(count, decode_piece)
        return values


def encode_feedback(codec: Codec, values: np.ndarray, residual: np.ndarray | None) -> tuple[bytes, np.ndarray | None]:
    """The payload, and what it lost, to be handed in again with the next vector.

    Error feedback: e is what was lost so far, sent is C(x + e), and e' = x + e - C(x + e). Summed over rounds, what
    was sent differs from what was meant by the last e only (Seide et al. 2014; Karimireddy et al., arXiv 1901.09847).
    """
    if not codec.has_feedback:
        return codec.encode(values), None
    meant = values if residual is None else values + residual
    payload = codec.encode(meant)
    lost = codec.decode(payload, meant.size)
    return payload, np.subtract(meant, lost, out=lost)


def check_vector(values: np.ndarray) -> None:
    """Refuse to encode what no decoder would accept."""
    assert values.dtype == FLOAT and values.ndim == 1, "a flat fp32 vector"
    if not np.isfinite(values).all():
        raise CodecError("a number that is not finite")


def check_length(codec: Codec, payload: bytes, count: int) -> None:
    """Refuse a payload that is not exactly as long as that many elements make it."""
    if len(payload) != codec.count_bytes(count):
        raise CodecError(f"{len(payload)} bytes, but {count} elements in {codec.name} are {codec.count_bytes(count)}")


def check_scales(scales: np.ndarray) -> None:
    """Refuse scales that would make anything but finite numbers of ordinary sign."""
    if not np.isfinite(scales).all() or (scales < 0).any():
        raise CodecError("a scale that is not finite or below zero")


def pad_blocks(values: np.ndarray) -> np.ndarray:
    """The vector as rows of `BLOCK`, the last filled up with zeros."""
    rows = np.zeros((count_blocks(values.size), BLOCK), dtype=FLOAT)
    rows.reshape(-1)[: values.size] = values
    return rows


def count_blocks(count: int) -> int:
    """Blocks of that many elements."""
    return -(-count // BLOCK)


def find_blocks(piece: slice) -> slice:
    """The blocks of a piece that begins with one."""
    return slice(piece.start // BLOCK, -(-piece.stop // BLOCK))


def widen_scales(scales: np.ndarray, piece: slice) -> np.ndarray:
    """The scale of every element of a piece, if they make finite numbers of ordinary sign."""
    part = scales[find_blocks(piece)]
    check_scales(part)
    wide: np.ndarray = np.repeat(part.astype(FLOAT), BLOCK)[: piece.stop - piece.start]
    return wide


def pick_scales(rows: np.ndarray, levels: int) -> np.ndarray:
    """One fp16 scale per block, rounded up, so that the largest element is at most `levels` scales."""
    wanted = np.abs(rows).max(axis=1, initial=0.0).astype(np.float64) / levels
    if wanted.size and wanted.max() > MAX_HALF:
        raise CodecError(f"an element above {MAX_HALF * levels:g}, beyond fp16 scales")
    scales = wanted.astype(HALF)
    return np.where(scales < wanted, np.nextafter(scales, HALF.type(MAX_HALF)), scales).astype(HALF)


def quantize_rows(rows: np.ndarray, scales: np.ndarray, levels: int) -> np.ndarray:
    """Nearest multiple of the block's scale, as int8 in -levels .. levels."""
    wide = scales.astype(FLOAT)[:, None]
    ratio = rows / np.where(wide > 0, wide, FLOAT.type(1.0))  # a block without a scale is zeros
    np.rint(ratio, out=ratio)
    return np.clip(ratio, -levels, levels, out=ratio).astype(np.int8)


def bound_blocks(values: np.ndarray, levels: int) -> np.ndarray:
    """Half a scale of each element's block; the fp32 division before rounding may add its last bit."""
    scales = pick_scales(pad_blocks(values), levels).astype(FLOAT)
    half: np.ndarray = np.repeat(scales * FLOAT.type(0.5 * (1 + levels * 2.0**-22)), BLOCK)[: values.size]
    return half
