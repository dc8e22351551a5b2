"""fp32: the vector as it is. 4 bytes per element, nothing lost."""

import numpy as np

from shoal.diloco.codecs import base
from shoal.diloco.codecs.base import FLOAT


class Fp32Codec(base.Decoder):
    """Little-endian fp32, one after the other."""

    name = "fp32"
    has_feedback = False

    def encode(self, values: np.ndarray) -> bytes:
        base.check_vector(values)
        return values.tobytes()

    def open_payload(self, payload: bytes, count: int) -> base.ReadPiece:
        base.check_length(self, payload, count)
        values = np.frombuffer(payload, dtype=FLOAT)

        def read_piece(piece: slice) -> np.ndarray:
            base.check_vector(values[piece])
            return values[piece]

        return read_piece

    def count_bytes(self, count: int) -> int:
        return 4 * count

    def bound_error(self, values: np.ndarray) -> np.ndarray:
        return np.zeros_like(values)
