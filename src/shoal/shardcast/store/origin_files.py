"""Files that an origin serves from where the trainer wrote them, without a copy.

Nothing prevents the trainer from modifying them, so each file is identified by its size, time and inode as they were
when it was published. If one differs when it is opened for sending, its version is dropped. Clients would reject the
bytes anyway; this saves everyone the attempt.

A folder may be published while it is written (`growing.py`): then files arrive one after the other, and what has not
arrived is not sent.
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
from shoal.shardcast.growing import has_file, read_plan
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

    @property
    def is_awaited(self) -> bool:
        """Whether the file is not written yet, and only its size is known."""
        return self.inode == 0


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

    @property
    def awaited(self) -> list[str]:
        """Files of a growing folder that have not arrived."""
        return [name for name, stamp in self.fingerprints.items() if stamp.is_awaited]

    def look_for(self, name: str) -> bool:
        """Whether an awaited file has arrived; ConfigError if it never will, or is not as announced. Blocking."""
        if not has_file(self.path, name):
            return False
        found = FileFingerprint.from_status((self.path / name).stat())
        if found.size != self.fingerprints[name].size:
            raise ConfigError(f"{self.path / name}: has {found.size} bytes, its writer announced another number")
        self.fingerprints[name] = found
        return True

    def is_unchanged(self) -> bool:
        """Whether all files are unchanged since publishing, and no other file was added."""
        try:
            return scan_source(self.path) == self
        except ConfigError:
            return False


class PublishedBlob(Blob):
    """A full blob whose files are elsewhere; those that have arrived are complete."""

    def __init__(self, entry: "StoredVersion", store: "VersionStore", source: PublishedFiles) -> None:
        super().__init__(FULL, entry, store)
        self.source = source
        self.settled = self._prepared = True
        awaited = set(source.awaited)
        for shard in self.layout.shards if awaited else ():
            if shard.file not in awaited:
                self._verified.count(shard)
        if not awaited:
            self._verified.count_all()
        # The files of an earlier version may have been at the same paths, and still be open.
        self.open_files.forget(source.folder)

    @property
    def folder(self) -> Path:
        return self.source.folder

    def admit_file(self, name: str) -> None:
        """Send the shards of a file from now on: it has arrived."""
        for shard in self.layout.shards:
            if shard.file == name:
                self._verified.count(shard)
                self.claims.notify(shard.index)

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
        if (plan := read_plan(path)) is not None:
            return PublishedFiles(path, False, _await_files(plan))
        paths = sorted(path.iterdir(), key=lambda entry: entry.name)
        fingerprints = {_check_file(entry, path): FileFingerprint.from_status(entry.stat()) for entry in paths}
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        reason = error.strerror if isinstance(error, OSError) else "a loop of links"
        raise ConfigError(f"{path}: cannot be read ({reason})") from None
    if not fingerprints:
        raise ConfigError(f"{path}: empty folder, nothing to publish")
    return PublishedFiles(path, False, fingerprints)


def _await_files(plan: dict[str, int]) -> dict[str, FileFingerprint]:
    """All files of a growing folder, as if none had arrived."""
    try:
        return {check_name(name): FileFingerprint(plan[name], 0, 0) for name in sorted(plan)}
    except ValueError as error:
        raise ConfigError(f"cannot be published under this name ({error})") from None


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
