"""The delta of a version that is being published, made while its shards are being hashed.

Whether there is one is settled here: a delta as large as the version, or a parent that changed or cannot be compared,
gives a `NoDelta` with the reason (which is published, so it names nothing of this machine). Only a disk that refuses is
an error.
"""

from pathlib import Path
from typing import BinaryIO, cast

from shoal.shardcast.delta import encode_delta
from shoal.shardcast.entry import Entry
from shoal.shardcast.errors import DeltaError
from shoal.shardcast.hashing import hash_shards
from shoal.shardcast.layout import File, Layout, is_single_pair
from shoal.shardcast.manifest import DELTA
from shoal.shardcast.pool import run_blocking
from shoal.shardcast.records import Delta, NoDelta

THREADS = 2
"""Threads that encode, beside those that hash."""


class DeltaJob:
    """From which version to which, where to, and the way to stop it."""

    def __init__(self, parent: Entry, entry: Entry) -> None:
        self.parent = parent
        self.entry = entry
        self.path = entry.folder / f"{DELTA}.part"
        self.stopped = False

    def stop(self) -> None:
        """Make the encoding end at its next write."""
        self.stopped = True


async def make_delta(job: DeltaJob) -> Delta | NoDelta:
    """Encode into the entry's folder and hash it. Without a delta, what is in the file is for the caller to remove."""
    return await run_blocking(None, _encode_file, job)


class _RefusedError(Exception):
    """The delta is not going to be used; the text says why."""


class _BoundedFile:
    """What `encode_delta` writes to: refuses to become as large as the version itself."""

    def __init__(self, file: BinaryIO, job: DeltaJob) -> None:
        self._file = file
        self._job = job
        self.left = job.entry.log.full.total

    def write(self, data: bytes | memoryview) -> int:
        size = memoryview(data).nbytes
        self.left -= size
        if self._job.stopped:
            raise _RefusedError("not published")
        if self.left <= 0:
            raise _RefusedError("not smaller than the full version")
        self._file.write(data)
        return size


def _encode_file(job: DeltaJob) -> Delta | NoDelta:
    log, parent = job.entry.log, job.parent
    parent_root = parent.log.root
    assert parent_root is not None, "a parent is complete"
    roots = _choose_roots(parent, job.entry)
    if roots is None:
        return NoDelta("one is a folder and one a file")
    try:
        with job.path.open("wb") as file:
            encode_delta(*roots, cast(BinaryIO, _BoundedFile(file, job)), threads=THREADS)
            size = file.tell()
    except _RefusedError as error:
        return NoDelta(str(error))
    except (DeltaError, FileNotFoundError):
        return NoDelta("cannot be compared with its parent")
    if parent.source is not None and not parent.source.is_unchanged():
        return NoDelta("the parent changed")
    layout = Layout([File(DELTA, size)], log.head.shard_size)
    return Delta(size, bytes.fromhex(parent_root), tuple(hash_shards(job.path, layout.shards)))


def _choose_roots(parent: Entry, entry: Entry) -> tuple[Path, Path] | None:
    """What to compare with what: two files, or two folders that hold nothing else than what was published."""
    if is_single_pair(parent.log.full, entry.log.full):
        old, new = (each.full.path_of(each.log.full.files[0].name) for each in (parent, entry))
        return old, new
    if any(each.source is not None and each.source.single for each in (parent, entry)):
        return None
    return parent.full.folder, entry.full.folder
