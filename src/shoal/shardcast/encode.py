"""The delta of a version that is being published, made while its shards are being hashed.

Whether there is one is settled here: a delta that saves next to nothing, a parent that changed or cannot be compared, a
disk without room for it give a `NoDelta` with the reason (which is published, so it names nothing of this machine).
Nothing that goes wrong with a delta keeps its version from being published, or leaves a file behind.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from shoal.shardcast.delta import PoorError, encode_delta
from shoal.shardcast.entry import Entry
from shoal.shardcast.errors import DeltaError
from shoal.shardcast.hashing import hash_shards
from shoal.shardcast.layout import File, Layout, is_single_pair
from shoal.shardcast.manifest import DELTA
from shoal.shardcast.pool import run_blocking
from shoal.shardcast.records import Delta, NoDelta

THREADS = 2
"""Threads that encode, beside those that hash."""
MAX_SHARE = 0.9
"""A delta of a larger share of its version is not worth the time that it takes to make, wait for and apply."""
POOR = "not smaller than the full version"
FULL = "no room for it"
LINE_BYTES = 1 << 16
HASH_BYTES = 80
"""Room on the disk that is left to the manifest: for its lines, and for each of its hashes."""


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
    """Encode into the entry's folder and hash it. Without a delta there is no file."""
    return await run_blocking(None, _make_file, job)


class _RefusedError(Exception):
    """The delta is not going to be used; the text says why."""


class _BoundedFile:
    """What `encode_delta` writes to: refuses to outgrow its use, or to take the room that the manifest needs."""

    def __init__(self, file: BinaryIO, job: DeltaJob) -> None:
        full = job.entry.log.full
        self._file = file
        self._job = job
        self._left = MAX_SHARE * full.total
        self._reserve = LINE_BYTES + HASH_BYTES * len(full.shards)

    def write(self, data: bytes | memoryview) -> int:
        size = memoryview(data).nbytes
        self._left -= size
        if self._job.stopped:
            raise _RefusedError("not published")
        if self._left <= 0:
            raise _RefusedError(POOR)
        status = os.fstatvfs(self._file.fileno())
        if status.f_bavail * status.f_frsize < size + self._reserve:
            raise _RefusedError(FULL)
        with _refuse_errors(FULL):
            self._file.write(data)
        return size


def _make_file(job: DeltaJob) -> Delta | NoDelta:
    try:
        return _encode_file(job)
    except _RefusedError as error:
        job.path.unlink(missing_ok=True)
        return NoDelta(str(error))


def _encode_file(job: DeltaJob) -> Delta:
    log, parent = job.entry.log, job.parent
    parent_root = parent.log.root
    assert parent_root is not None, "a parent is complete"
    roots = _choose_roots(parent, job.entry)
    with _refuse_errors(FULL), job.path.open("wb") as file:
        bounded = cast(BinaryIO, _BoundedFile(file, job))
        try:
            encode_delta(*roots, bounded, threads=THREADS, max_share=MAX_SHARE)
        except PoorError:
            raise _RefusedError(POOR) from None
        except (DeltaError, OSError):
            raise _RefusedError("cannot be compared with its parent") from None
    if parent.source is not None and not parent.source.is_unchanged():
        raise _RefusedError("the parent changed")
    size = job.path.stat().st_size
    layout = Layout([File(DELTA, size)], log.head.shard_size)
    with _refuse_errors("cannot be read"):
        hashes = tuple(hash_shards(job.path, layout.shards))
    return Delta(size, bytes.fromhex(parent_root), hashes)


@contextmanager
def _refuse_errors(reason: str) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise _RefusedError(reason) from None


def _choose_roots(parent: Entry, entry: Entry) -> tuple[Path, Path]:
    """What to compare with what: two files, or two folders that hold nothing else than what was published."""
    if is_single_pair(parent.log.full, entry.log.full):
        old, new = (each.full.path_of(each.log.full.files[0].name) for each in (parent, entry))
        return old, new
    if any(each.source is not None and each.source.single for each in (parent, entry)):
        raise _RefusedError("one is a folder and one a file")
    return parent.full.folder, entry.full.folder
