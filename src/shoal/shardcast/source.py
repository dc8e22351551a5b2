"""Files that an origin serves from where the trainer wrote them, without a copy.

Nobody can keep the trainer from touching them, so each file is known by its size, time and inode as they were when it
was published. Whenever one is opened for sending and is not that any more, its version is dropped. Clients would refuse
the bytes anyway; this saves everyone the attempt.
"""

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.shardcast.blob import Blob
from shoal.shardcast.errors import ShardError
from shoal.shardcast.names import check_name


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file looks like from outside; another content shows here."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def from_status(cls, status: os.stat_result) -> "Stamp":
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class Source:
    """A published folder or file."""

    path: Path
    """absolute, links resolved"""
    single: bool
    """whether the path is that of a file"""
    stamps: dict[str, Stamp]
    """by name, in the order of names"""

    @property
    def folder(self) -> Path:
        """Where the files are by their names."""
        return self.path.parent if self.single else self.path

    def to_bytes(self) -> bytes:
        """As kept beside the manifest."""
        files = {name: [stamp.size, stamp.mtime_ns, stamp.inode] for name, stamp in self.stamps.items()}
        return json.dumps({"path": os.fspath(self.path), "single": self.single, "files": files}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Source":
        """What `to_bytes` wrote; ValueError for anything else, which a power cut may leave."""
        try:
            fields: Any = json.loads(data)
            stamps = {str(name): Stamp(*map(int, values)) for name, values in fields["files"].items()}
            return cls(Path(fields["path"]), bool(fields["single"]), stamps)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("not the record of a source") from error

    def is_unchanged(self) -> bool:
        """Whether all files are still those that were published, and no other is there."""
        try:
            return scan_source(self.path) == self
        except ConfigError:
            return False


class SourceBlob(Blob):
    """A full blob that lies elsewhere and is there from the start."""

    source: Source
    on_change: Callable[[], None]

    def point_to(self, source: Source, on_change: Callable[[], None]) -> None:
        """Say where the files are, and whom to tell when they are not those any more."""
        self.source = source
        self.on_change = on_change
        self.settled = True
        self._prepared = True
        self._marks.count_all()

    @property
    def folder(self) -> Path:
        return self.source.folder

    @contextlib.contextmanager
    def locate(self, index: int) -> Iterator[tuple[int, int, int]]:
        shard = self.layout.shards[index]
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(self.handles.lease(self.path_of(shard.file)))
                changed = Stamp.from_status(os.fstat(descriptor)) != self.source.stamps[shard.file]
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                changed = True
            if changed:
                self.on_change()
                raise ShardError(f"{shard.file}: changed since it was published")
            yield descriptor, shard.offset, shard.size

    async def restore(self) -> None:
        """Nothing to take back: the files are where they are."""


def scan_source(path: Path) -> Source:
    """What is to be published; ConfigError with the reason why it cannot be."""
    try:
        path = path.resolve(strict=True)
        if path.is_file():
            return Source(path, True, {_check_file(path, path.parent): Stamp.from_status(path.stat())})
        if not path.is_dir():
            raise ConfigError(f"{path}: neither a folder nor a file")
        paths = sorted(path.iterdir(), key=lambda entry: entry.name)
        stamps = {_check_file(entry, path): Stamp.from_status(entry.stat()) for entry in paths}
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        reason = error.strerror if isinstance(error, OSError) else "a loop of links"
        raise ConfigError(f"{path}: cannot be published ({reason})") from None
    if not stamps:
        raise ConfigError(f"{path}: an empty folder, there is nothing to publish")
    return Source(path, False, stamps)


def _check_file(path: Path, folder: Path) -> str:
    """The name of a file that may be published."""
    if path.is_symlink() and path.resolve(strict=True).parent != folder:
        raise ConfigError(f"{path}: a link that points outside of its folder; publish the files themselves")
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{path}: a folder inside of the one to publish; only files right in it can be")
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path}: not a regular file")
    try:
        return check_name(path.name)
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be published under this name ({error})") from None
