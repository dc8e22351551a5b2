"""Codecs: an fp32 vector to bytes and back, with a bound on the loss.

Invariants:

- the length of a payload follows from the number of elements alone, so a decoder knows it in advance;
- encoding is deterministic, and decoding the same bytes gives the same bits on every machine: elementwise IEEE
  arithmetic only, little-endian;
- whatever bytes an untrusted peer sends, `decode` returns finite numbers or raises `CodecError`. No length, index or
  scale in the payload decides how much is allocated.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from shoal.diloco.background import run_pieces

FLOAT = np.dtype("<f4")
HALF = np.dtype("<f2")


ReadPiece = Callable[[slice], np.ndarray]
"""returns the fp32 elements of a piece (`background.run_pieces`); raises `CodecError` if they are invalid"""


class CodecError(ValueError):
    """The bytes are not a payload of this codec for this number of elements, or the numbers cannot be encoded."""


class Codec(ABC):
    """An encoding of vectors."""

    name: str
    has_feedback: bool
    """whether the loss of one round is added to the next round's vector (error feedback)"""

    @abstractmethod
    def encode(self, values: np.ndarray) -> bytes:
        """Encode a finite fp32 vector."""

    @abstractmethod
    def count_bytes(self, count: int) -> int:
        """Length of the payload of `count` elements."""

    @abstractmethod
    def _read_payload(self, payload: bytes, count: int) -> ReadPiece:
        """Like `open_payload`, for a payload that has the right length."""

    def open_payload(self, payload: bytes, count: int) -> ReadPiece:
        """Like `decode`, but piece by piece, so that many vectors need not be in memory. Checks the length first."""
        expected = self.count_bytes(count)
        if len(payload) != expected:
            raise CodecError(f"{len(payload)} bytes, but {count} elements in {self.name} are {expected}")
        return self._read_payload(payload, count)

    def decode(self, payload: bytes, count: int) -> np.ndarray:
        """Decode the fp32 vector of `count` elements."""
        read, values = self.open_payload(payload, count), np.empty(count, dtype=FLOAT)

        def decode_piece(piece: slice) -> None:
            values[piece] = read(piece)

        run_pieces(count, decode_piece)
        return values


def encode_feedback(codec: Codec, values: np.ndarray, residual: np.ndarray | None) -> tuple[bytes, np.ndarray | None]:
    """The payload, and what it lost, to be added to the next vector.

    Error feedback: e is the loss so far, C(x + e) is sent, and e' = x + e - C(x + e). Summed over rounds, the sent
    vectors differ from the true ones only by the last e (Seide et al. 2014; Karimireddy et al., arXiv 1901.09847).
    """
    if not codec.has_feedback:
        return codec.encode(values), None
    meant = values if residual is None else values + residual
    payload = codec.encode(meant)
    lost = codec.decode(payload, meant.size)
    return payload, np.subtract(meant, lost, out=lost)


def check_vector(values: np.ndarray) -> None:
    """Refuse to encode what no decoder would accept."""
    assert values.dtype == FLOAT and values.ndim == 1, "expected a flat fp32 vector"
    if not np.isfinite(values).all():
        raise CodecError("a number that is not finite")
