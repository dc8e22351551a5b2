"""The lines of a manifest, left in its file and found there by their places.

Those of a version with 2^20 shards are 70 MB, and only who reads the manifest from us wants them. The first line, which
is announced all the time, stays in memory; so do all of them for as long as there is no file.

Invariant: the file begins with these lines, each with its newline. Whoever appends has written the line there before.

Reading is from the page cache in all but rare cases, and short: it is done where it is asked for.
"""

import errno
import os
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import overload


class Lines(Sequence[bytes]):
    """Lines without their newlines."""

    def __init__(self) -> None:
        self._ends = array("Q")
        self._first = b""
        self._held = bytearray()
        self._path: Path | None = None

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)} lines, no line {index}")
        return self._read_bytes(self._find_start(number), self._ends[number] - 1) if number else self._first

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_bytes(self) -> int:
        """Bytes of all lines with their newlines: where the next one begins."""
        return self._ends[-1] if self._ends else 0

    def append(self, line: bytes) -> None:
        """Take the next line, which the file has already if there is one."""
        if not self._ends:
            self._first = line
        if self._path is None:
            self._held += line + b"\n"
        self._ends.append(self.num_bytes + len(line) + 1)

    def keep_in(self, path: Path) -> None:
        """Read from this file from now on; it has all lines there are."""
        self._path = path
        self._held = bytearray()

    def read_batch(self, first: int, num_bytes: int) -> tuple[bytes, int]:
        """Lines from `first` on as they are sent, about so many bytes but at least one line; the number of the next."""
        if first >= len(self):
            return b"", first
        start = self._find_start(first)
        following = max(first + 1, bisect_right(self._ends, start + num_bytes))
        return self._read_bytes(start, self._ends[following - 1]), following

    def _find_start(self, number: int) -> int:
        return self._ends[number - 1] if number else 0

    def _read_bytes(self, start: int, end: int) -> bytes:
        if self._path is None:
            return bytes(self._held[start:end])
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            data = os.pread(descriptor, end - start, start)
        finally:
            os.close(descriptor)
        if len(data) < end - start:
            raise OSError(errno.EIO, "shorter than it was written", os.fspath(self._path))
        return data
