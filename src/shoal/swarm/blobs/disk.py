"""Blobs in a folder: `ab/abcdef...` by the first two characters of their name, and `incoming/` for what is arriving.

Invariants:
- an arriving blob has a random name of our own in `incoming/`; it gets its real one when its bytes are on disk and
  have its hash. A kill leaves a file in `incoming/` at most, which the next start removes;
- room is reserved for the announced size before the first byte is written, so that uploads side by side never pass the
  quota together, and is given back however an upload ends;
- one process has the folder, by a lock that dies with it; nobody else on the machine can read it;
- the loop never waits for the disk: files are touched by the store's own threads alone. An upload's bytes are written
  by one thread at a time, and its file is closed by the last of them, also when the upload is given up in between.

Two uploads of one blob at a time write two files; the one that ends later is dropped, and both are told that the blob
is there.
"""

import asyncio
import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, TypeVar

from pydantic import Field

from shoal.config import Settings
from shoal.errors import ConfigError
from shoal.files import sync_dir
from shoal.swarm.blobs.base import CHUNK_BYTES, FullError, MissingBlobError, WrongBlobError, check_name
from shoal.swarm.faults import reach
from shoal.units import format_bytes

_THREADS = 4
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_TEXT = "the store has no room for this blob now; try again later"

T = TypeVar("T")


class DiskLimits(Settings):
    """What a folder of blobs may hold."""

    max_blob_bytes: Annotated[int, Field(ge=1)] = 64 * 1024 * 1024
    """of one blob"""
    max_bytes: Annotated[int, Field(ge=1)] = 64 * 1024**3
    """of all blobs, those arriving included"""
    max_blobs: Annotated[int, Field(ge=1)] = 1_000_000
    """files, those arriving included"""
    max_uploads: Annotated[int, Field(ge=1, le=4096)] = 64
    """blobs that arrive at a time"""
    min_free_bytes: Annotated[int, Field(ge=0)] = 256 * 1024 * 1024
    """of the disk, which no blob may take: the ledger needs room too"""


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
        self.num_blobs, self.num_bytes = _count_blobs(folder)
        """what is there or reserved"""
        self.num_uploads = 0
        self._threads = ThreadPoolExecutor(_THREADS, "blobs")

    async def put(self, name: str, size: int, chunks: AsyncIterator[bytes]) -> None:
        """As `BlobStore.put`."""
        check_name(name)
        if not 0 < size <= self._limits.max_blob_bytes:
            limit = format_bytes(self._limits.max_blob_bytes)
            raise WrongBlobError(f"a blob has from 1 byte to {limit}, and not {size} bytes")
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
            raise MissingBlobError("there is no such blob") from None
        return DiskReader(descriptor, self._threads)

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
        """As `BlobStore.close`; uploads have ended before."""
        await asyncio.to_thread(self._threads.shutdown)
        os.close(self._lock)

    async def _receive_blob(self, name: str, size: int, chunks: AsyncIterator[bytes]) -> None:
        """Write a blob for which there is room, and keep it."""
        upload = _Upload(self._incoming / os.urandom(16).hex())
        try:
            await self._write_chunks(upload, size, chunks)
            if upload.num_bytes != size or upload.digest != name:
                raise WrongBlobError("the bytes are not those of the blob that was announced")
            await self._run(partial(upload.keep_file, self._find_path(name)))
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise FullError(_FULL_TEXT) from error
            raise
        finally:
            # A thread may still be at work for an upload that was given up; this comes after it, and the room is
            # counted then, whoever still waits.
            ended = self._run(upload.discard_file)
            ended.add_done_callback(lambda _: self._release_room(upload, size))
            await asyncio.shield(ended)

    async def _write_chunks(self, upload: "_Upload", size: int, chunks: AsyncIterator[bytes]) -> None:
        """In pieces worth a thread's while; more than was announced is refused at its first byte."""
        pieces: list[bytes] = []
        waiting = total = 0
        async for chunk in chunks:
            total += len(chunk)
            if total > size:
                raise WrongBlobError(f"more than the {size} bytes that were announced")
            pieces.append(chunk)
            waiting += len(chunk)
            if waiting >= CHUNK_BYTES:
                data, pieces, waiting = b"".join(pieces), [], 0
                await self._run(partial(upload.write_data, data))
        await self._run(partial(upload.write_data, b"".join(pieces)))

    async def _reserve_room(self, size: int) -> None:
        limits = self._limits
        free = await self._run(partial(_count_free, self._folder))
        # From here to the end nothing waits, so what is compared is what is counted.
        if self.num_uploads >= limits.max_uploads:
            raise FullError("too many blobs are being uploaded now; try again soon")
        if (
            self.num_bytes + size > limits.max_bytes
            or self.num_blobs >= limits.max_blobs
            or free - size < limits.min_free_bytes
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


class DiskReader:
    """A blob while it is read."""

    def __init__(self, descriptor: int, threads: ThreadPoolExecutor) -> None:
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._threads = threads
        self._lock = threading.Lock()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        offset = 0
        while data := await loop.run_in_executor(self._threads, self._read_piece, offset):
            offset += len(data)
            yield data

    async def __aenter__(self) -> "DiskReader":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, self._close_file))

    def _read_piece(self, offset: int) -> bytes:
        with self._lock:
            return os.pread(self._descriptor, CHUNK_BYTES, offset)

    def _close_file(self) -> None:
        with self._lock:  # a read that was given up may still go on in its thread
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
                return  # given up while this waited for a thread
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._hash.update(data)
            self.num_bytes += len(data)
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]

    def keep_file(self, target: Path) -> None:
        """Make it durable under its real name, unless another upload of the same blob did so before."""
        with self._lock:
            if self._descriptor is None:
                return  # given up while this waited for a thread
            reach("blob", 1)
            os.fsync(self._descriptor)
            reach("blob", 2)
            if not target.parent.is_dir():
                target.parent.mkdir(mode=0o700, exist_ok=True)
                sync_dir(target.parent.parent)
            # Unlike a rename a link tells which of two was first, so that each blob is counted once.
            with suppress(FileExistsError):
                target.hardlink_to(self._path)
                self.is_kept = True
            reach("blob", 3)
            sync_dir(target.parent)
            reach("blob", 4)

    def discard_file(self) -> None:
        """Close it and remove its temporary name; whatever was kept stays."""
        with self._lock:
            self._is_over = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
                self._path.unlink()


async def _check_copy(name: str, size: int, chunks: AsyncIterator[bytes]) -> None:
    """Read a blob that is there already: its sender must have it too."""
    found, total = hashlib.sha256(), 0
    async for chunk in chunks:
        total += len(chunk)
        if total > size:
            raise WrongBlobError(f"more than the {size} bytes that were announced")
        found.update(chunk)
    if total != size or found.hexdigest() != name:
        raise WrongBlobError("the bytes are not those of the blob that was announced")


def _lock_folder(folder: Path) -> int:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used for blobs ({error.strerror})") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{folder}: another process has these blobs open") from None
    return descriptor


def _count_blobs(folder: Path) -> tuple[int, int]:
    sizes = [entry.stat().st_size for shelf in folder.glob("[0-9a-f][0-9a-f]") for entry in os.scandir(shelf)]
    return len(sizes), sum(sizes)


def _count_free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _remove_file(path: Path) -> int:
    size = path.stat().st_size
    path.unlink()
    sync_dir(path.parent)
    return size
