"""Which shards of a blob are verified, in memory and in a file of one byte each."""

import os
from collections.abc import Iterator
from pathlib import Path

from shoal.shardcast.handles import Handles
from shoal.shardcast.layout import Layout, Shard
from shoal.shardcast.parts import write_at


class Marks:
    """One byte per shard. In memory it is what holds now; the file is what the next process is told to look at."""

    def __init__(self, path: Path, layout: Layout, handles: Handles) -> None:
        self._path = path
        self._layout = layout
        self._handles = handles
        self._have = bytearray(len(layout.shards))
        self.num_missing = len(layout.shards)
        self.have_bytes = 0

    def __getitem__(self, index: int) -> bool:
        return bool(self._have[index])

    @property
    def untouched(self) -> bool:
        """Whether there is nothing to lose yet."""
        return self.num_missing == len(self._have)

    def missing(self, start: int = 0) -> Iterator[int]:
        """Numbers of the shards that are not marked, as it goes along."""
        index = self._have.find(0, start)
        while index >= 0:
            yield index
            index = self._have.find(0, index + 1)

    def mark(self, shard: Shard) -> None:
        """Mark a shard in the file, then here."""
        with self._handles.lease(self._path, os.O_RDWR | os.O_NOFOLLOW) as descriptor:
            os.pwrite(descriptor, b"\1", shard.index)
        self.count(shard)

    def count(self, shard: Shard) -> None:
        """Mark a shard here, the file having it already."""
        if not self._have[shard.index]:
            self._have[shard.index] = 1
            self.num_missing -= 1
            self.have_bytes += shard.size

    def count_all(self) -> None:
        """Mark every shard here."""
        self._have[:] = b"\1" * len(self._have)
        self.num_missing, self.have_bytes = 0, self._layout.total

    def reset(self) -> None:
        """Forget everything, in the file first."""
        self._have[:] = bytes(len(self._have))
        self.num_missing, self.have_bytes = len(self._have), 0
        self.write()

    def write(self) -> None:
        """Make the file say what is marked here; in place, so that a kill in the middle loses no mark."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            write_at(descriptor, memoryview(self._have), 0)
            os.ftruncate(descriptor, len(self._have))
        finally:
            os.close(descriptor)

    def read(self) -> list[int] | None:
        """The shards marked in the file, None without one. Whatever else it holds is not looked at."""
        try:
            with self._path.open("rb") as file:
                marks = file.read(len(self._have))
        except FileNotFoundError:
            return None
        return [index for index, mark in enumerate(marks) if mark == 1]

    def remove(self) -> None:
        """Remove the file, if there is one."""
        self._handles.forget(self._path)
        self._path.unlink(missing_ok=True)
