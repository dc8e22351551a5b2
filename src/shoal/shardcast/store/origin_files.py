"""Files that an origin serves from where the trainer wrote them, without a copy.

Nothing prevents the trainer from modifying them, so each file is identified by its size, time and inode as they were
when it was published. If one differs when it is opened for sending, its version is dropped. Clients would reject the
bytes anyway; this saves everyone the attempt.
"""

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.errors import ConfigError
from shoal.shardcast.errors import ShardError
from shoal.shardcast.format.layout import check_name
from shoal.shardcast.format.manifest import FULL
from shoal.shardcast.store.blob import Blob

if TYPE_CHECKING:
    from shoal.shardcast.store.store import StoredVersion, VersionStore


class FileFingerprint(NamedTuple):
    """Metadata of a file that changes with its content."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def from_status(cls, status: os.stat_result) -> "FileFingerprint":
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class PublishedFiles:
    """A published folder or file."""

    path: Path
    """absolute, links resolved"""
    single: bool
    """whether the path is a file"""
    fingerprints: dict[str, FileFingerprint]
    """by name, sorted"""

    @property
    def folder(self) -> Path:
        """The folder that contains the files."""
        return self.path.parent if self.single else self.path

    def to_bytes(self) -> bytes:
        """The encoded record, stored next to the manifest."""
        fields = {"path": os.fspath(self.path), "single": self.single, "files": self.fingerprints}
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "PublishedFiles":
        """Parse what `to_bytes` wrote; ValueError for anything else, which a power cut may leave."""
        try:
            fields: Any = json.loads(data)
            fingerprints = {str(name): FileFingerprint(*map(int, values)) for name, values in fields["files"].items()}
            return cls(Path(fields["path"]), bool(fields["single"]), fingerprints)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("invalid record of a source") from error

    def is_unchanged(self) -> bool:
        """Whether all files are unchanged since publishing, and no other file was added."""
        try:
            return scan_source(self.path) == self
        except ConfigError:
            return False


class PublishedBlob(Blob):
    """A full blob whose files are elsewhere and complete from the start."""

    def __init__(self, entry: "StoredVersion", store: "VersionStore", source: PublishedFiles) -> None:
        super().__init__(FULL, entry, store)
        self.source = source
        self.settled = self._prepared = True
        self._verified.count_all()
        # The files of an earlier version may have been at the same paths, and still be open.
        self.open_files.forget(source.folder)

    @property
    def folder(self) -> Path:
        return self.source.folder

    @contextlib.contextmanager
    def locate(self, index: int) -> Iterator[tuple[int, int, int]]:
        shard = self.layout.shards[index]
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(self.open_files.lease(self.path_of(shard.file)))
                changed = FileFingerprint.from_status(os.fstat(descriptor)) != self.source.fingerprints[shard.file]
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                changed = True
            if changed:
                self._store.drop_changed(self.entry)
                raise ShardError(f"{shard.file}: changed since it was published")
            yield descriptor, shard.offset, shard.size

    async def restore(self) -> None:
        """Nothing to restore: the files are where they are."""


def scan_source(path: Path) -> PublishedFiles:
    """Scan the files to publish; ConfigError with the reason if they cannot be published."""
    try:
        path = path.resolve(strict=True)
        if path.is_file():
            return PublishedFiles(
                path, True, {_check_file(path, path.parent): FileFingerprint.from_status(path.stat())}
            )
        if not path.is_dir():
            raise ConfigError(f"{path}: neither a folder nor a file")
        paths = sorted(path.iterdir(), key=lambda entry: entry.name)
        fingerprints = {_check_file(entry, path): FileFingerprint.from_status(entry.stat()) for entry in paths}
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        reason = error.strerror if isinstance(error, OSError) else "a loop of links"
        raise ConfigError(f"{path}: cannot be published ({reason})") from None
    if not fingerprints:
        raise ConfigError(f"{path}: empty folder, nothing to publish")
    return PublishedFiles(path, False, fingerprints)


def _check_file(path: Path, folder: Path) -> str:
    """The name of a file that may be published."""
    if path.is_symlink() and path.resolve(strict=True).parent != folder:
        raise ConfigError(f"{path}: link to a path outside its folder; publish the files themselves")
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{path}: subfolders cannot be published, only files directly in the folder")
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path}: not a regular file")
    try:
        return check_name(path.name)
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be published under this name ({error})") from None
