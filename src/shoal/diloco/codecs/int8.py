"""int8: blocks of 256 elements with one fp16 scale each. 1.008 bytes per element.

    s = max |x| / 127, rounded up to fp16        q = round(x / s)        x' = q s
    |x - x'| <= s / 2

Block-wise 8-bit quantisation as in Dettmers et al., arXiv 2110.02861, with linear levels.
"""

import numpy as np

from shoal.diloco.codecs import base
from shoal.diloco.codecs.base import FLOAT, HALF
from shoal.diloco.pieces import run_pieces

LEVELS = 127


class Int8Codec(base.Decoder):
    """All scales, then one signed byte per element."""

    name = "int8"
    has_feedback = True

    def encode(self, values: np.ndarray) -> bytes:
        scales, levels = np.empty(base.count_blocks(values.size), dtype=HALF), np.empty(values.size, dtype=np.int8)

        def encode_piece(piece: slice) -> None:
            base.check_vector(values[piece])
            rows = base.pad_blocks(values[piece])
            found = scales[base.find_blocks(piece)] = base.pick_scales(rows, LEVELS)
            levels[piece] = base.quantize_rows(rows, found, LEVELS).reshape(-1)[: piece.stop - piece.start]

        run_pieces(values.size, encode_piece)
        return scales.tobytes() + levels.tobytes()

    def open_payload(self, payload: bytes, count: int) -> base.ReadPiece:
        base.check_length(self, payload, count)
        blocks = base.count_blocks(count)
        scales = np.frombuffer(payload, dtype=HALF, count=blocks)
        levels = np.frombuffer(payload, dtype=np.int8, offset=2 * blocks)

        def read_piece(piece: slice) -> np.ndarray:
            if (levels[piece] < -LEVELS).any():
                raise base.CodecError("a level that no encoder writes")
            values: np.ndarray = levels[piece].astype(FLOAT)
            values *= base.widen_scales(scales, piece)
            return values

        return read_piece

    def count_bytes(self, count: int) -> int:
        return 2 * base.count_blocks(count) + count

    def bound_error(self, values: np.ndarray) -> np.ndarray:
        return base.bound_blocks(values, LEVELS)
