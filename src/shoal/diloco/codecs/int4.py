"""int4 (default): blocks of 256 elements with one fp16 scale each, two elements in a byte. 0.508 bytes per element.

    s = max |x| / 7, rounded up to fp16        q = round(x / s) in -7 .. 7        x' = q s
    |x - x'| <= s / 2

With error feedback what is lost comes back in the next round. Four bits for outer gradients: Douillard et al.,
Streaming DiLoCo, arXiv 2501.18512; error feedback in DiLoCo: Therien et al., MuLoCo, arXiv 2505.23725.
"""

import numpy as np

from shoal.diloco.codecs import base
from shoal.diloco.codecs.base import BLOCK, FLOAT, HALF

LEVELS = 7
_OFFSET = 8


class Int4Codec:
    """All scales, then the nibbles q + 8, the first of two in the low half. Nibble 0 is written by nobody."""

    name = "int4"
    has_feedback = True

    def encode(self, values: np.ndarray) -> bytes:
        base.check_vector(values)
        rows = base.pad_blocks(values)
        scales = base.pick_scales(rows, LEVELS)
        nibbles = (base.quantize_rows(rows, scales, LEVELS) + _OFFSET).astype(np.uint8).reshape(-1)
        kept = nibbles[: values.size + values.size % 2]  # padding is level 0, so the last half byte is always 8
        return scales.tobytes() + (kept[0::2] | (kept[1::2] << 4)).tobytes()

    def decode(self, payload: bytes, count: int) -> np.ndarray:
        base.check_length(self, payload, count)
        blocks = base.count_blocks(count)
        scales = np.frombuffer(payload, dtype=HALF, count=blocks)
        base.check_scales(scales)
        packed = np.frombuffer(payload, dtype=np.uint8, offset=2 * blocks)
        nibbles = np.empty(2 * packed.size, dtype=np.uint8)
        nibbles[0::2], nibbles[1::2] = packed & 15, packed >> 4
        if (nibbles == 0).any() or (count % 2 and nibbles[-1] != _OFFSET):
            raise base.CodecError("a level that no encoder writes")
        levels = nibbles[:count].astype(FLOAT) - _OFFSET
        values: np.ndarray = levels * np.repeat(scales.astype(FLOAT), BLOCK)[:count]
        return values

    def count_bytes(self, count: int) -> int:
        return 2 * base.count_blocks(count) + -(-count // 2)

    def bound_error(self, values: np.ndarray) -> np.ndarray:
        return base.bound_blocks(values, LEVELS)
