"""Blobs in an S3 bucket: `PREFIX/ab/abcdef...`, and below `PREFIX/incoming/` what nodes upload past us.

    presign -> a node puts incoming/NAME.SIZE -> copied to checking/RANDOM -> read and hashed -> copied to its name

Invariants:
- what went past us is not believed: it becomes a blob when this process has read all of it and found size and hash
  right. It is read from a copy under a name that nobody else was ever given: its uploader cannot change it meanwhile;
- a URL that lets somebody write never names a blob, so no blob can be overwritten by who handed it in;
- what goes through us is written to a local file and compared before the bucket sees a byte: no wrong blob, and no half
  upload, is left there by a peer;
- URLs end by time; nothing here lists the bucket for others. Credentials come from where the AWS tools take them (the
  environment, a role), never from the URL, and are in no text of ours.

A URL cannot bound the size of what is put: somebody may fill `incoming/` until it is swept, a day later. A life-cycle
rule of the bucket for `incoming/` and `checking/`, and for multipart uploads that were never ended, does it sooner.
"""

import asyncio
import errno
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import obstore
from obstore.store import S3Store

from shoal.swarm.blobs.base import CHUNK_BYTES, BlobError, FullError, MissingBlobError, WrongBlobError, check_name
from shoal.swarm.blobs.bucket import FAULTS, open_bucket
from shoal.swarm.blobs.direct import MAX_URL_S, place_blob, place_incoming
from shoal.swarm.blobs.disk import DiskLimits
from shoal.units import format_bytes

SWEEP_EVERY_S = 3600.0
SWEEP_AGE = timedelta(days=1)
"""more than any URL holds, so nothing is swept that may still come"""
PART_BYTES = 8 * 2**20
"""larger blobs are uploaded in parts of this size"""
_MEMORY_BYTES = 1 << 20
_WRONG_TEXT = "the bytes are not those of the blob that was announced"
_AWAY_TEXT = "the store of blobs does not answer"

T = TypeVar("T")


class S3Blobs:
    """Blobs in a bucket, as a `BlobStore` and a `DirectStore`."""

    def __init__(self, url: str, folder: Path, limits: DiskLimits | None = None) -> None:
        """`folder` is for what passes through; of the limits those on one blob and on uploads at a time hold here."""
        self._limits = limits or DiskLimits()
        self._folder = folder
        self._store = open_bucket(url)
        self.address = _find_address(self._store)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._checks: dict[str, asyncio.Task[bool]] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self.num_uploads = 0

    async def put(self, name: str, size: int, chunks: AsyncIterator[bytes]) -> None:
        """As `BlobStore.put`."""
        key = _place_blob(name)
        if not 0 < size <= self._limits.max_blob_bytes:
            limit = format_bytes(self._limits.max_blob_bytes)
            raise WrongBlobError(f"a blob has from 1 byte to {limit}, and not {size} bytes")
        with self._count_upload(), tempfile.SpooledTemporaryFile(_MEMORY_BYTES, dir=str(self._folder)) as file:
            await _spool_chunks(file, name, size, chunks)
            if await self._find_size(key) != size:
                file.seek(0)
                await _reach(obstore.put_async(self._store, key, file, chunk_size=PART_BYTES, max_concurrency=2))

    async def has(self, name: str) -> bool:
        """As `BlobStore.has`; what was uploaded past us is looked at now. `WrongBlobError` if it is something else."""
        if await self._find_size(_place_blob(name)) is not None:
            return True
        # Who gives up waiting and asks again must find the same check, not start it anew.
        check = self._checks.get(name)
        if check is None:
            check = self._checks[name] = asyncio.create_task(self._take_incoming(name))
            check.add_done_callback(lambda done: self._end_check(name, done))
        return await asyncio.shield(check)

    async def open(self, name: str) -> "S3Reader":
        """As `BlobStore.open`."""
        key = _place_blob(name)
        size = await self._find_size(key)
        if size is None:
            raise MissingBlobError("there is no such blob")
        return S3Reader(self._store, key, size)

    async def remove(self, name: str) -> None:
        """As `BlobStore.remove`."""
        await _reach(obstore.delete_async(self._store, _place_blob(name)))

    async def sign_upload(self, name: str, size: int, expires_s: int) -> str:
        """As `DirectStore.sign_upload`."""
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep_often())
        return await _sign_url(self._store, "PUT", place_incoming(check_name(name), size), expires_s)

    async def close(self) -> None:
        """As `BlobStore.close`."""
        tasks = [*self._checks.values(), *([] if self._sweeping is None else [self._sweeping])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def sweep(self, older: timedelta = SWEEP_AGE) -> int:
        """Remove what was uploaded past us and never asked for; how many there were."""
        limit, num_removed = datetime.now(UTC) - older, 0
        for prefix in ("incoming/", "checking/"):
            async for page in obstore.list(self._store, prefix):
                old = [item["path"] for item in page if item["last_modified"] <= limit]
                if old:
                    await obstore.delete_async(self._store, old)
                num_removed += len(old)
        return num_removed

    async def _sweep_often(self) -> None:
        while True:
            with suppress(*FAULTS):  # nothing depends on it now; the next turn finds the same and more
                await self.sweep()
            await asyncio.sleep(SWEEP_EVERY_S)

    async def _take_incoming(self, name: str) -> bool:
        """Whether something was uploaded for a blob and is the blob; `WrongBlobError` if none of it is."""
        found = await _reach(_list_keys(self._store, f"incoming/{name}."))
        for key, size in found:
            if key == place_incoming(name, size) and size <= self._limits.max_blob_bytes:
                with self._count_upload():
                    if await self._take_copy(name, key, size):
                        return True
            await _reach(obstore.delete_async(self._store, key))
        if found:
            raise WrongBlobError(_WRONG_TEXT)
        return False

    async def _take_copy(self, name: str, key: str, size: int) -> bool:
        copy = f"checking/{os.urandom(16).hex()}"
        await _reach(obstore.copy_async(self._store, key, copy))
        try:
            is_right = await self._hash_object(copy, size) == name
            if is_right:
                await _reach(obstore.copy_async(self._store, copy, _place_blob(name)))
                await _reach(obstore.delete_async(self._store, key))
        finally:
            await _reach(obstore.delete_async(self._store, copy))
        return is_right

    async def _hash_object(self, key: str, size: int) -> str:
        """The SHA-256 of an object of that size, and an empty text for one of another size."""
        found, total = hashlib.sha256(), 0
        async for piece in S3Reader(self._store, key, size):
            total += len(piece)
            if total > size:
                return ""
            await asyncio.to_thread(found.update, piece)
        return found.hexdigest() if total == size else ""

    async def _find_size(self, key: str) -> int | None:
        try:
            return int((await obstore.head_async(self._store, key))["size"])
        except FileNotFoundError:
            return None
        except FAULTS as error:
            raise BlobError(_AWAY_TEXT) from error

    def _end_check(self, name: str, task: "asyncio.Task[bool]") -> None:
        del self._checks[name]
        if not task.cancelled():
            task.exception()  # told to those who wait; it is no bug if nobody does any more

    @contextmanager
    def _count_upload(self) -> Iterator[None]:
        if self.num_uploads >= self._limits.max_uploads:
            raise FullError("too many blobs are being uploaded now; try again soon")
        self.num_uploads += 1
        try:
            yield
        finally:
            self.num_uploads -= 1


class S3Reader:
    """A blob while it is read, as a `BlobReader` and a `DirectReader`."""

    def __init__(self, store: S3Store, key: str, size: int) -> None:
        self.size = size
        self._store, self._key = store, key

    async def __aiter__(self) -> AsyncIterator[bytes]:
        got = await _reach(obstore.get_async(self._store, self._key))
        try:
            async for piece in got.stream(CHUNK_BYTES):
                yield bytes(piece)
        except FAULTS as error:
            raise BlobError(_AWAY_TEXT) from error

    async def __aenter__(self) -> "S3Reader":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def sign_download(self, expires_s: int) -> str:
        """As `DirectReader.sign_download`."""
        return await _sign_url(self._store, "GET", self._key, expires_s)


def _place_blob(name: str) -> str:
    return place_blob(check_name(name))


def _find_address(store: S3Store) -> str:
    """As `DirectStore.address`: taken from a URL of the library's, whose form depends on the bucket and its options."""
    probe = "address"
    return obstore.sign(store, "GET", probe, timedelta(seconds=1)).partition("?")[0].removesuffix(probe)


async def _sign_url(store: S3Store, method: Any, key: str, expires_s: int) -> str:
    assert 0 < expires_s <= MAX_URL_S, "a URL ends before what it names is swept"
    return await _reach(obstore.sign_async(store, method, key, timedelta(seconds=expires_s)))


async def _reach(work: Awaitable[T]) -> T:
    """What the bucket answers; that it does not is no fault of the caller."""
    try:
        return await work
    except FileNotFoundError:
        raise MissingBlobError("there is no such blob") from None
    except FAULTS as error:
        raise BlobError(_AWAY_TEXT) from error


async def _list_keys(store: S3Store, start: str) -> list[tuple[str, int]]:
    """Keys that begin so, with the sizes of what lies there."""
    # For the library a prefix ends at a slash, so what comes after it is looked for by its order.
    folder = start.rpartition("/")[0]
    found: list[tuple[str, int]] = []
    async for page in obstore.list(store, folder, offset=start):
        for item in page:
            if not item["path"].startswith(start):
                return found
            found.append((item["path"], int(item["size"])))
    return found


async def _spool_chunks(file: Any, name: str, size: int, chunks: AsyncIterator[bytes]) -> None:
    """Write a blob to a local file; it is the one that was announced when this returns."""
    found, total = hashlib.sha256(), 0
    pieces: list[bytes] = []
    waiting = 0
    async for chunk in chunks:
        total += len(chunk)
        if total > size:
            raise WrongBlobError(f"more than the {size} bytes that were announced")
        pieces.append(chunk)
        waiting += len(chunk)
        if waiting >= CHUNK_BYTES:
            data, pieces, waiting = b"".join(pieces), [], 0
            await asyncio.to_thread(_write_piece, file, found, data)
    await asyncio.to_thread(_write_piece, file, found, b"".join(pieces))
    if total != size or found.hexdigest() != name:
        raise WrongBlobError(_WRONG_TEXT)


def _write_piece(file: Any, found: Any, data: bytes) -> None:
    found.update(data)
    try:
        file.write(data)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullError("the store has no room for this blob now; try again later") from error
        raise
