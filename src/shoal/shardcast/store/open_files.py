"""Open files of a store: those in use and a bounded number of others, instead of one descriptor per file.

Invariant: a descriptor is closed only when no lease on it is left, so its number cannot be reused for another file
while bytes are sent from it or written to it.
"""

import contextlib
import errno
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEFAULT_LIMIT = 256


@dataclass(slots=True, eq=False)
class _Handle:
    descriptor: int
    num_users: int = 0
    forgotten: bool = False


class OpenFileCache:
    """A cache of descriptors with least-recently-used eviction."""

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self._limit = limit
        self._open: OrderedDict[tuple[str, int], _Handle] = OrderedDict()

    @contextlib.contextmanager
    def lease(self, path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
        """A descriptor of the file, valid until the block ends."""
        key = (os.fspath(path), flags)
        handle = self._open.get(key)
        if handle is None:
            self._shrink(self._limit - 1)
            handle = self._open[key] = _Handle(self._open_file(path, flags))
        self._open.move_to_end(key)
        handle.num_users += 1
        try:
            yield handle.descriptor
        finally:
            handle.num_users -= 1
            if handle.forgotten and not handle.num_users:
                os.close(handle.descriptor)
            self._shrink(self._limit)

    def forget(self, root: Path) -> None:
        """Close descriptors at or below `root`, now or when the last lease ends: paths there change or vanish."""
        text = os.fspath(root)
        for key in [key for key in self._open if key[0] == text or key[0].startswith(f"{text}/")]:
            self._drop(key)

    def close(self) -> None:
        """Close everything, now or when the last lease ends."""
        for key in list(self._open):
            self._drop(key)

    def _open_file(self, path: Path, flags: int) -> int:
        flags |= os.O_CLOEXEC
        try:
            return os.open(path, flags)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        self._shrink(0)
        return os.open(path, flags)

    def _shrink(self, limit: int) -> None:
        if len(self._open) <= limit:
            return
        for key in [key for key, handle in self._open.items() if not handle.num_users][: len(self._open) - limit]:
            self._drop(key)

    def _drop(self, key: tuple[str, int]) -> None:
        handle = self._open.pop(key)
        handle.forgotten = True
        if not handle.num_users:
            os.close(handle.descriptor)
