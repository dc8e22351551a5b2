"""Bytes that arrive in chunks, in any order and over several connections, into a place of known length.

Invariants:
- the length is the receiver's own knowledge; what a sender says about it only decides whether it may send at all;
- a chunk is written only after its own digest, which its sender signed, was found right;
- nothing is handed out before the digest of the whole was found right.
"""

import hashlib

from shoal.diloco.http.messages import CHUNK_BYTES, count_chunks


class Parcel:
    """A payload on its way."""

    def __init__(self, size: int, digest: str) -> None:
        self.size, self.digest = size, digest
        self._data = bytearray(size)
        self._missing = set(range(count_chunks(size)))

    @property
    def is_whole(self) -> bool:
        """Whether all chunks are here."""
        return not self._missing

    @property
    def num_missing(self) -> int:
        """Chunks that are not here yet."""
        return len(self._missing)

    def measure_chunk(self, index: int) -> int:
        """The length that a chunk must have; 0 if there is no such chunk."""
        return max(0, min(CHUNK_BYTES, self.size - index * CHUNK_BYTES))

    def put_chunk(self, index: int, data: bytes) -> None:
        """Take a chunk whose digest was checked."""
        assert len(data) == self.measure_chunk(index) > 0, "checked before it was read"
        self._data[index * CHUNK_BYTES : index * CHUNK_BYTES + len(data)] = data
        self._missing.discard(index)

    def list_missing(self) -> tuple[tuple[int, int], ...]:
        """Runs of missing chunks: first, and one after the last."""
        runs: list[tuple[int, int]] = []
        for index in sorted(self._missing):
            if runs and runs[-1][1] == index:
                runs[-1] = (runs[-1][0], index + 1)
            else:
                runs.append((index, index + 1))
        return tuple(runs)

    def open(self) -> bytes | None:
        """The whole, or None if it is not what was announced: then all of it is missing again."""
        assert self.is_whole, "opened when it has arrived"
        data = bytes(self._data)  # its sender may write a chunk again while this one is hashed
        if hashlib.sha256(data).hexdigest() == self.digest:
            return data
        self._missing = set(range(count_chunks(self.size)))
        return None
