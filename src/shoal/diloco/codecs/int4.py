"""int4 (default): blocks of 256 elements with one fp16 scale each, two elements in a byte. 0.508 bytes per element.

    s = max |x| / 7, rounded up to fp16        q = round(x / s) in -7 .. 7        x' = q s
    |x - x'| <= s / 2

With error feedback what is lost comes back in the next round. Four bits for outer gradients: Douillard et al.,
Streaming DiLoCo, arXiv 2501.18512; error feedback in DiLoCo: Therien et al., MuLoCo, arXiv 2505.23725.
"""

import numpy as np

from shoal.diloco.codecs import base
from shoal.diloco.codecs.base import FLOAT, HALF
from shoal.diloco.pieces import run_pieces

LEVELS = 7
_OFFSET = 8


class Int4Codec(base.Decoder):
    """All scales, then the nibbles q + 8, the first of two in the low half. Nibble 0 is written by nobody."""

    name = "int4"
    has_feedback = True

    def encode(self, values: np.ndarray) -> bytes:
        scales = np.empty(base.count_blocks(values.size), dtype=HALF)
        packed = np.empty(-(-values.size // 2), dtype=np.uint8)

        def encode_piece(piece: slice) -> None:
            base.check_vector(values[piece])
            rows = base.pad_blocks(values[piece])
            found = scales[base.find_blocks(piece)] = base.pick_scales(rows, LEVELS)
            nibbles = (base.quantize_rows(rows, found, LEVELS) + _OFFSET).view(np.uint8).reshape(-1)
            # Padding is level 0, so the last half byte of an odd number of elements is always 8.
            packed[_find_bytes(piece)] = (nibbles[0::2] | (nibbles[1::2] << 4))[: -(-(piece.stop - piece.start) // 2)]

        run_pieces(values.size, encode_piece)
        return scales.tobytes() + packed.tobytes()

    def open_payload(self, payload: bytes, count: int) -> base.ReadPiece:
        base.check_length(self, payload, count)
        blocks = base.count_blocks(count)
        scales = np.frombuffer(payload, dtype=HALF, count=blocks)
        packed = np.frombuffer(payload, dtype=np.uint8, offset=2 * blocks)

        def read_piece(piece: slice) -> np.ndarray:
            part, size = packed[_find_bytes(piece)], piece.stop - piece.start
            nibbles = np.empty(2 * part.size, dtype=np.uint8)
            nibbles[0::2], nibbles[1::2] = part & 15, part >> 4
            if not nibbles.all() or (size % 2 and nibbles[-1] != _OFFSET):
                raise base.CodecError("a level that no encoder writes")
            values: np.ndarray = nibbles[:size].astype(FLOAT) - FLOAT.type(_OFFSET)
            values *= base.widen_scales(scales, piece)
            return values

        return read_piece

    def count_bytes(self, count: int) -> int:
        return 2 * base.count_blocks(count) + -(-count // 2)

    def bound_error(self, values: np.ndarray) -> np.ndarray:
        return base.bound_blocks(values, LEVELS)


def _find_bytes(piece: slice) -> slice:
    return slice(piece.start // 2, -(-piece.stop // 2))
