"""fp32 and fp16: every element as a floating-point number.

    fp32    4 bytes per element        x' = x
    fp16    2 bytes per element        |x - x'| <= max(2^-11 |x|, 2^-25)        |x| <= 65504

OpenDiLoCo sends its pseudo-gradients in fp16 and sees no loss of quality (Jaghouar et al., arXiv 2407.07852).
"""

import numpy as np

from shoal.diloco.codecs.base import FLOAT, Codec, CodecError, ReadPiece, check_vector


class FloatCodec(Codec):
    """Little-endian numbers of one precision, one after the other."""

    has_feedback = False

    def __init__(self, name: str, precision: np.dtype) -> None:
        self.name, self._precision = name, precision

    def encode(self, values: np.ndarray) -> bytes:
        return encode_floats(values, self._precision)

    def count_bytes(self, count: int) -> int:
        return self._precision.itemsize * count

    def _read_payload(self, payload: bytes, count: int) -> ReadPiece:
        stored = np.frombuffer(payload, dtype=self._precision)
        return lambda piece: widen_floats(stored[piece])


def encode_floats(values: np.ndarray, precision: np.dtype) -> bytes:
    """Round a vector to a precision; `CodecError` for numbers that it cannot hold."""
    check_vector(values)
    limit = float(np.finfo(precision).max)
    if np.abs(values).max(initial=0.0) > limit:
        raise CodecError(f"an element above {limit:g}, beyond fp{8 * precision.itemsize}")
    return values.astype(precision, copy=False).tobytes()


def widen_floats(stored: np.ndarray) -> np.ndarray:
    """Numbers of a payload in fp32; `CodecError` if any of them is not finite."""
    values: np.ndarray = stored.astype(FLOAT, copy=False)
    check_vector(values)
    return values
