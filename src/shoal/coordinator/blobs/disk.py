"""Blobs in a folder: `ab/abcdef...` by the first two characters of their name, and `incoming/` for uploads in progress.

Invariants:
- an arriving blob has a random name of our own in `incoming/`; it gets its real name once its bytes are on disk and
  match its hash. A kill leaves at most a file in `incoming/`, which the next start deletes;
- space is reserved for the announced size before the first byte is written, so that concurrent uploads together never
  exceed the quota; it is released however an upload ends;
- one process owns the folder, by a lock that ends with the process; other users of the machine cannot read it;
- the event loop never waits for the disk: only the store's own threads access files. One thread at a time writes an
  upload's bytes, and the last of them closes its file, even if the upload is cancelled in between.

Two concurrent uploads of one blob write two files; the later one is dropped, and both callers get a success.
"""

import asyncio
import errno
import hashlib
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from shoal.config.run import Settings
from shoal.coordinator.blobs.base import (
    CHUNK_BYTES,
    BlobReader,
    FullError,
    MissingBlobError,
    WrongBlobError,
    check_name,
    gather_pieces,
)
from shoal.errors import ConfigError, UnavailableError
from shoal.ledger.ledger import reach
from shoal.util.files import open_lock, sync_path, try_lock
from shoal.util.units import format_bytes

_THREADS = 4
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_TEXT = "the blob store has no space for this blob now; try again later"

T = TypeVar("T")


class DiskLimits(Settings):
    """Limits of a blob folder."""

    max_blob_bytes: Annotated[int, Field(ge=1)] = 64 * 1024 * 1024
    """of one blob"""
    max_bytes: Annotated[int, Field(ge=1)] = 64 * 1024**3
    """of all blobs, including arriving ones"""
    max_blobs: Annotated[int, Field(ge=1)] = 1_000_000
    """number of files, including arriving ones"""
    max_uploads: Annotated[int, Field(ge=1, le=4096)] = 64
    """concurrent uploads"""
    min_free_bytes: Annotated[int, Field(ge=0)] = 256 * 1024 * 1024
    """disk space that blobs must leave free: the ledger needs space too"""


class DiskStore:
    """Blobs in a folder that one process has open."""

    def __init__(self, folder: Path, limits: DiskLimits | None = None) -> None:
        self._folder = folder
        self._limits = limits or DiskLimits()
        self._lock = _lock_folder(folder)
        self._incoming = folder / "incoming"
        self._incoming.mkdir(mode=0o700, exist_ok=True)
        for path in self._incoming.iterdir():
            path.unlink()
        sizes = [
            entry.stat().st_size for subfolder in folder.glob("[0-9a-f][0-9a-f]") for entry in os.scandir(subfolder)
        ]
        self.num_blobs, self.num_bytes = len(sizes), sum(sizes)
        """stored or reserved"""
        self.num_uploads = 0
        self._threads = ThreadPoolExecutor(_THREADS, "blobs")

    async def put(self, name: str, size: int, chunks: AsyncIterator[bytes]) -> None:
        """As `BlobStore.put`."""
        check_name(name)
        if not 0 < size <= self._limits.max_blob_bytes:
            limit = format_bytes(self._limits.max_blob_bytes)
            raise WrongBlobError(f"invalid blob size {size}: must be 1 to {limit} bytes")
        if await self.has(name):
            await _check_copy(name, size, chunks)
            return
        await self._reserve_room(size)
        await self._receive_blob(name, size, chunks)

    async def has(self, name: str) -> bool:
        """As `BlobStore.has`."""
        return await self._run(self._find_path(name).is_file)

    async def open(self, name: str) -> "DiskReader":
        """As `BlobStore.open`."""
        path = self._find_path(name)
        try:
            descriptor = await self._run(partial(os.open, path, os.O_RDONLY | os.O_NOFOLLOW))
        except FileNotFoundError:
            raise MissingBlobError("no such blob") from None
        return DiskReader(name, descriptor, self._threads)

    async def remove(self, name: str) -> None:
        """As `BlobStore.remove`."""
        path = self._find_path(name)
        try:
            size = await self._run(partial(_remove_file, path))
        except FileNotFoundError:
            return
        self.num_bytes -= size
        self.num_blobs -= 1

    async def close(self) -> None:
        """Like `BlobStore.close`; all uploads must have ended."""
        await asyncio.to_thread(self._threads.shutdown)
        os.close(self._lock)

    async def _receive_blob(self, name: str, size: int, chunks: AsyncIterator[bytes]) -> None:
        """Write and keep a blob for which space is reserved."""
        upload = _Upload(self._incoming / os.urandom(16).hex())
        try:
            async for piece in gather_pieces(chunks, size):
                await self._run(partial(upload.write_data, piece))
            if upload.num_bytes != size or upload.digest != name:
                raise WrongBlobError("the bytes do not match the announced blob")
            await self._run(partial(upload.keep_file, self._find_path(name)))
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise FullError(_FULL_TEXT) from error
            raise
        finally:
            # A thread may still be working for a cancelled upload; this runs after it, and releases the space even if
            # nobody waits for it.
            ended = self._run(upload.discard_file)
            ended.add_done_callback(lambda _: self._release_room(upload, size))
            await asyncio.shield(ended)

    async def _reserve_room(self, size: int) -> None:
        limits = self._limits
        status = await self._run(partial(os.statvfs, self._folder))
        # No await from here to the end, so the compared values are the counted ones.
        if self.num_uploads >= limits.max_uploads:
            raise FullError("too many concurrent uploads; try again soon")
        if (
            self.num_bytes + size > limits.max_bytes
            or self.num_blobs >= limits.max_blobs
            or status.f_bavail * status.f_frsize - size < limits.min_free_bytes
        ):
            raise FullError(_FULL_TEXT)
        self.num_uploads += 1
        self.num_bytes += size
        self.num_blobs += 1

    def _release_room(self, upload: "_Upload", size: int) -> None:
        self.num_uploads -= 1
        if not upload.is_kept:
            self.num_bytes -= size
            self.num_blobs -= 1

    def _find_path(self, name: str) -> Path:
        return self._folder / check_name(name)[:2] / name

    def _run(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._threads, work)


class DiskReader(BlobReader):
    """A blob that is open for reading."""

    def __init__(self, name: str, descriptor: int, threads: ThreadPoolExecutor) -> None:
        self.name, self.size = name, os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._threads = threads
        self._lock = threading.Lock()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        offset = 0
        while data := await loop.run_in_executor(self._threads, self._read_piece, offset):
            offset += len(data)
            yield data

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, self._close_file))

    def _read_piece(self, offset: int) -> bytes:
        with self._lock:
            return os.pread(self._descriptor, CHUNK_BYTES, offset)

    def _close_file(self) -> None:
        with self._lock:  # a cancelled read may still be running in its thread
            os.close(self._descriptor)


class _Upload:
    """The file of an arriving blob; its methods run in threads, one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._is_over = False
        self._hash = hashlib.sha256()
        self.num_bytes = 0
        self.is_kept = False

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def write_data(self, data: bytes) -> None:
        with self._lock:
            if self._is_over:
                return  # cancelled while this waited for a thread
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._hash.update(data)
            self.num_bytes += len(data)
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]

    def keep_file(self, target: Path) -> None:
        """Make the file durable under its real name, unless another upload of the same blob already did."""
        with self._lock:
            if self._descriptor is None:
                return  # cancelled while this waited for a thread
            reach("blob", 1)
            os.fsync(self._descriptor)
            reach("blob", 2)
            if not target.parent.is_dir():
                target.parent.mkdir(mode=0o700, exist_ok=True)
                sync_path(target.parent.parent)
            # Unlike a rename, a link shows which of two was first, so that each blob is counted once.
            with suppress(FileExistsError):
                target.hardlink_to(self._path)
                self.is_kept = True
            reach("blob", 3)
            sync_path(target.parent)
            reach("blob", 4)

    def discard_file(self) -> None:
        """Close the file and remove its temporary name; a kept blob remains."""
        with self._lock:
            self._is_over = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
                self._path.unlink()


async def _check_copy(name: str, size: int, chunks: AsyncIterator[bytes]) -> None:
    """Read the upload of a blob that already exists: its sender must have it too."""
    found, total = hashlib.sha256(), 0
    async for piece in gather_pieces(chunks, size):
        total += len(piece)
        found.update(piece)
    if total != size or found.hexdigest() != name:
        raise WrongBlobError("the bytes do not match the announced blob")


def _lock_folder(folder: Path) -> int:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = open_lock(folder / "lock", 0o600)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot use this folder for blobs ({error.strerror})") from None
    if not try_lock(descriptor):
        os.close(descriptor)
        raise UnavailableError(f"{folder}: another process is using this blob folder")
    return descriptor


def _remove_file(path: Path) -> int:
    size = path.stat().st_size
    path.unlink()
    sync_path(path.parent)
    return size
