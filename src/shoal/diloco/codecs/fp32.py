"""fp32: the vector as it is. 4 bytes per element, nothing lost."""

import numpy as np

from shoal.diloco.codecs.base import FLOAT, CodecError, check_length, check_vector


class Fp32Codec:
    """Little-endian fp32, one after the other."""

    name = "fp32"
    has_feedback = False

    def encode(self, values: np.ndarray) -> bytes:
        check_vector(values)
        return values.tobytes()

    def decode(self, payload: bytes, count: int) -> np.ndarray:
        check_length(self, payload, count)
        values = np.frombuffer(payload, dtype=FLOAT)
        if not np.isfinite(values).all():
            raise CodecError("a number that is not finite")
        return values

    def count_bytes(self, count: int) -> int:
        return 4 * count

    def bound_error(self, values: np.ndarray) -> np.ndarray:
        return np.zeros_like(values)
