"""top-k: the largest 1/32 of the elements, as index and fp16 value. 0.19 bytes per element.

    k = ceil(n / 32)        x'_i = fp16(x_i) for the k largest |x_i|, 0 for the others
    |x_i - x'_i| <= |x|_(k) for the others, the k-th largest; as in fp16 for those kept

Needs error feedback, and many rounds until every element has been sent (Lin et al., Deep Gradient Compression, arXiv
1712.01887; Sarfi et al., SparseLoCo, arXiv 2508.15706). With tens of rounds it loses badly, see docs/diloco.md.
"""

import numpy as np

from shoal.diloco.codecs.base import FLOAT, HALF, Codec, CodecError, ReadPiece, check_vector
from shoal.diloco.codecs.floats import encode_floats, widen_floats

SHARE = 32
"""One of this many elements is sent. Changing breaks: every payload of this codec."""
_INDEX = np.dtype("<u4")


class TopKCodec(Codec):
    """All indices in ascending order, then their values."""

    name = "topk"
    has_feedback = True

    def encode(self, values: np.ndarray) -> bytes:
        check_vector(values)
        indices = np.sort(_pick_largest(values))
        return indices.astype(_INDEX).tobytes() + encode_floats(values[indices], HALF)

    def count_bytes(self, count: int) -> int:
        return (_INDEX.itemsize + HALF.itemsize) * _count_kept(count)

    def _read_payload(self, payload: bytes, count: int) -> ReadPiece:
        kept = _count_kept(count)
        indices = np.frombuffer(payload, dtype=_INDEX, count=kept)
        if kept and (indices[-1] >= count or (indices[1:] <= indices[:-1]).any()):
            raise CodecError("indices that do not rise or lie outside")
        halves = np.frombuffer(payload, dtype=HALF, offset=_INDEX.itemsize * kept)

        def read_piece(piece: slice) -> np.ndarray:
            first, last = np.searchsorted(indices, (piece.start, piece.stop))
            values = np.zeros(piece.stop - piece.start, dtype=FLOAT)
            values[indices[first:last].astype(np.int64) - piece.start] = widen_floats(halves[first:last])
            return values

        return read_piece


def _count_kept(count: int) -> int:
    return -(-count // SHARE)


def _pick_largest(values: np.ndarray) -> np.ndarray:
    """Indices of the largest magnitudes; among equal ones the first, so that everyone picks the same."""
    order: np.ndarray = np.argsort(-np.abs(values), kind="stable")[: _count_kept(values.size)]
    return order
