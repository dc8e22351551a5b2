"""int8: blocks of 256 elements with one fp16 scale each. 1.008 bytes per element.

    s = max |x| / 127, rounded up to fp16        q = round(x / s)        x' = q s
    |x - x'| <= s / 2

Block-wise 8-bit quantisation as in Dettmers et al., arXiv 2110.02861, with linear levels.
"""

import numpy as np

from shoal.diloco.codecs import base
from shoal.diloco.codecs.base import BLOCK, FLOAT, HALF

LEVELS = 127


class Int8Codec:
    """All scales, then one signed byte per element."""

    name = "int8"
    has_feedback = True

    def encode(self, values: np.ndarray) -> bytes:
        base.check_vector(values)
        rows = base.pad_blocks(values)
        scales = base.pick_scales(rows, LEVELS)
        levels = base.quantize_rows(rows, scales, LEVELS)
        return scales.tobytes() + levels.reshape(-1)[: values.size].tobytes()

    def decode(self, payload: bytes, count: int) -> np.ndarray:
        base.check_length(self, payload, count)
        blocks = base.count_blocks(count)
        scales = np.frombuffer(payload, dtype=HALF, count=blocks)
        base.check_scales(scales)
        levels = np.frombuffer(payload, dtype=np.int8, offset=2 * blocks)
        if (levels < -LEVELS).any():
            raise base.CodecError("a level that no encoder writes")
        values: np.ndarray = levels.astype(FLOAT) * np.repeat(scales.astype(FLOAT), BLOCK)[:count]
        return values

    def count_bytes(self, count: int) -> int:
        return 2 * base.count_blocks(count) + count

    def bound_error(self, values: np.ndarray) -> np.ndarray:
        return base.bound_blocks(values, LEVELS)
