"""fp16: every element rounded to half precision. 2 bytes per element.

    |x - x'| <= max(2^-11 |x|, 2^-25)        |x| <= 65504

OpenDiLoCo sends its pseudo-gradients this way and sees no loss of quality (Jaghouar et al., arXiv 2407.07852).
"""

import numpy as np

from shoal.diloco.codecs import base
from shoal.diloco.codecs.base import FLOAT, HALF, MAX_HALF, CodecError


class Fp16Codec(base.Decoder):
    """Little-endian fp16, one after the other."""

    name = "fp16"
    has_feedback = False

    def encode(self, values: np.ndarray) -> bytes:
        base.check_vector(values)
        if values.size and np.abs(values).max() > MAX_HALF:
            raise CodecError(f"an element above {MAX_HALF:g}, beyond fp16")
        return values.astype(HALF).tobytes()

    def open_payload(self, payload: bytes, count: int) -> base.ReadPiece:
        base.check_length(self, payload, count)
        halves = np.frombuffer(payload, dtype=HALF)

        def read_piece(piece: slice) -> np.ndarray:
            values: np.ndarray = halves[piece].astype(FLOAT)
            base.check_vector(values)
            return values

        return read_piece

    def count_bytes(self, count: int) -> int:
        return 2 * count

    def bound_error(self, values: np.ndarray) -> np.ndarray:
        return np.maximum(np.abs(values) * FLOAT.type(2.0**-11), FLOAT.type(2.0**-25))
