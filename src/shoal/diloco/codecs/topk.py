"""top-k: the 1/32 of the elements that are largest, as index and fp16 value. 0.19 bytes per element.

    k = ceil(n / 32)        x'_i = fp16(x_i) for the k largest |x_i|, 0 for the others
    |x_i - x'_i| <= |x|_(k) for the others, the k-th largest; as in fp16 for those kept

Needs error feedback, and many rounds to bring every element through (Lin et al., Deep Gradient Compression, arXiv
1712.01887; Sarfi et al., SparseLoCo, arXiv 2508.15706): with tens of rounds it loses badly, see docs/diloco.md.
"""

import numpy as np

from shoal.diloco.codecs import base
from shoal.diloco.codecs.base import FLOAT, HALF, MAX_HALF, CodecError

SHARE = 32
"""One of so many elements is sent. Changing breaks: every payload of this codec."""
_INDEX = np.dtype("<u4")


class TopKCodec(base.Decoder):
    """All indices, rising, then their values."""

    name = "topk"
    has_feedback = True

    def encode(self, values: np.ndarray) -> bytes:
        base.check_vector(values)
        if values.size and np.abs(values).max() > MAX_HALF:
            raise CodecError(f"an element above {MAX_HALF:g}, beyond fp16")
        indices = np.sort(_pick_largest(values))
        return indices.astype(_INDEX).tobytes() + values[indices].astype(HALF).tobytes()

    def open_payload(self, payload: bytes, count: int) -> base.ReadPiece:
        base.check_length(self, payload, count)
        kept = _count_kept(count)
        indices = np.frombuffer(payload, dtype=_INDEX, count=kept)
        if kept and (indices[-1] >= count or (indices[1:] <= indices[:-1]).any()):
            raise CodecError("indices that do not rise or lie outside")
        halves = np.frombuffer(payload, dtype=HALF, offset=_INDEX.itemsize * kept)

        def read_piece(piece: slice) -> np.ndarray:
            first, last = np.searchsorted(indices, (piece.start, piece.stop))
            picked = halves[first:last].astype(FLOAT)
            base.check_vector(picked)
            values = np.zeros(piece.stop - piece.start, dtype=FLOAT)
            values[indices[first:last].astype(np.int64) - piece.start] = picked
            return values

        return read_piece

    def count_bytes(self, count: int) -> int:
        return (_INDEX.itemsize + HALF.itemsize) * _count_kept(count)

    def bound_error(self, values: np.ndarray) -> np.ndarray:
        kept = _pick_largest(values)
        bound = np.full_like(values, np.abs(values[kept]).min(initial=np.inf))
        bound[kept] = np.maximum(np.abs(values[kept]) * FLOAT.type(2.0**-11), FLOAT.type(2.0**-25))
        return bound


def _count_kept(count: int) -> int:
    return -(-count // SHARE)


def _pick_largest(values: np.ndarray) -> np.ndarray:
    """Indices of the largest magnitudes; of equals the first, so that everyone picks the same."""
    order: np.ndarray = np.argsort(-np.abs(values), kind="stable")[: _count_kept(values.size)]
    return order
