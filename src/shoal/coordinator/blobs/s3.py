"""Blobs in an S3 bucket: `PREFIX/ab/abcdef...`, and `PREFIX/incoming/` for direct uploads by nodes.

    presign -> a node puts incoming/NAME.SIZE -> copied to checking/RANDOM -> read and hashed -> copied to its name

Invariants:
- direct uploads are not trusted: one becomes a blob when this process has read all of it and verified size and hash. It
  is read from a copy under a name that nobody else ever got: its uploader cannot change it meanwhile;
- a URL for writing never names a blob, so a sender cannot overwrite a blob;
- uploads through the coordinator are written to a local file and verified before the bucket gets a byte: a peer can
  leave neither a wrong blob nor a partial upload there;
- URLs expire; nothing here lists the bucket for others. Credentials come from the sources that the AWS tools use, never
  from the URL, and appear in no message.

A presigned URL cannot limit the size of an upload. So the coordinator gives one only to owners with accepted work, an
upload whose size differs from the announced one is deleted within `SWEEP_EVERY_S`, and the others with their submission
or after a day. A life-cycle rule of the bucket for incomplete multipart uploads does the rest.

A bucket is given by its URL, `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`, and is tested before it is used.

Sources of credentials: the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN), a web identity,
or the machine's role.
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
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from shoal.coordinator.blobs import base
from shoal.coordinator.blobs.disk import DiskLimits
from shoal.errors import ConfigError, UnavailableError
from shoal.protocol.descriptor import blob_path, incoming_path
from shoal.util.units import format_bytes

FAULTS = (BaseError, OSError)
"""exceptions of the library: its own, and those of the standard library where they fit"""
_CONNECT_S, _REQUEST_S, _RETRY_S = 5, 120, 20
_OPTIONS = {"endpoint", "region"}


def open_bucket(url: str) -> S3Store:
    """Open the bucket of a URL and test writing, reading and deleting.

    `ConfigError` if the URL or the credentials are wrong, `UnavailableError` if nothing answers.
    """
    store = _find_bucket(url)
    _try_bucket(url, store)
    return store


def _find_bucket(url: str) -> S3Store:
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.scheme != "s3" or not parts.hostname or parts.fragment or options.keys() - _OPTIONS:
        raise ConfigError(f"{_hide_user(url)!r}: expected s3://BUCKET/PREFIX?endpoint=URL&region=NAME")
    if parts.username is not None or parts.port is not None:
        raise ConfigError("credentials for S3 come from the environment (AWS_ACCESS_KEY_ID ...), not from the URL")
    endpoint, region = options.get("endpoint"), options.get("region")
    more: dict[str, Any] = {} if region is None else {"region": region}
    if endpoint is not None:
        more |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
        more.setdefault("region", "us-east-1")
    try:
        return S3Store(
            parts.hostname,
            prefix=parts.path.strip("/") or None,
            client_options={
                "allow_http": endpoint is not None and endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=_CONNECT_S),
                "timeout": timedelta(seconds=_REQUEST_S),
            },
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=_RETRY_S)},
            **more,
        )
    except (*FAULTS, ValueError) as error:
        raise ConfigError(f"{url}: cannot open the bucket ({_phrase(error)})") from None


def _try_bucket(url: str, store: S3Store) -> None:
    """Write, read and delete an object, so that bucket problems are reported at startup."""
    key, data = f"checking/{os.urandom(16).hex()}", b"shoal"
    try:
        obstore.put(store, key, data)
        found = bytes(obstore.get(store, key).bytes())
        obstore.delete(store, key)
    except FileNotFoundError:
        raise ConfigError(f"{url}: no such bucket; create it first") from None
    except (PermissionError, PermissionDeniedError, UnauthenticatedError) as error:
        text = "credentials are missing or wrong, or do not permit writing, reading and deleting"
        raise ConfigError(f"{url}: {text} ({_phrase(error)})") from None
    except FAULTS as error:
        if "builder error" in (reason := _phrase(error)):
            raise ConfigError(f"{url}: {reason}; an http:// endpoint belongs in ?endpoint=") from None
        raise UnavailableError(
            f"{url}: cannot use the bucket; check that it exists and that credentials are set ({reason})"
        ) from None
    if found != data:
        raise ConfigError(f"{url}: the bucket returned different bytes than were written")


def _phrase(error: BaseException) -> str:
    """The beginning of a library error, which may be pages long and contain the server's XML."""
    first = (str(error).splitlines() or [""])[0].partition("<")[0].strip(" :")
    return first[:300] or type(error).__name__


def _hide_user(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"s3://...@{tail}" if at and head else url


SWEEP_EVERY_S = 60.0
SWEEP_AGE = timedelta(days=1)
"""longer than any URL is valid, so nothing is swept that may still be completed"""
PART_BYTES = 8 * 2**20
"""larger blobs are uploaded in parts of this size"""
_MEMORY_BYTES = 1 << 20
_WRONG_TEXT = "the bytes do not match the announced blob"
_AWAY_TEXT = "the blob store does not respond"

T = TypeVar("T")


class S3Blobs:
    """Blobs in a bucket, as a `BlobStore` and a `DirectStore`."""

    def __init__(self, url: str, folder: Path, limits: DiskLimits | None = None) -> None:
        """`folder` is for temporary files; of the limits, those on one blob and on concurrent uploads apply."""
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
            raise base.WrongBlobError(f"invalid blob size {size}: must be 1 to {limit} bytes")
        with self._count_upload(), tempfile.SpooledTemporaryFile(_MEMORY_BYTES, dir=str(self._folder)) as file:
            await _spool_chunks(file, name, size, chunks)
            if await self._find_size(key) != size:
                file.seek(0)
                await _reach(obstore.put_async(self._store, key, file, chunk_size=PART_BYTES, max_concurrency=2))

    async def has(self, name: str) -> bool:
        """Like `BlobStore.has`; checks direct uploads now, and raises `WrongBlobError` if one does not match."""
        if await self._find_size(_place_blob(name)) is not None:
            return True
        # A caller that gives up and asks again must find the same check, not start another one.
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
            raise base.MissingBlobError("no such blob")
        return S3Reader(self._store, key, size)

    async def remove(self, name: str) -> None:
        """As `BlobStore.remove`; direct uploads of the blob are deleted too."""
        await _reach(obstore.delete_async(self._store, _place_blob(name)))
        for key, _ in await _reach(_list_keys(self._store, f"incoming/{name}.")):
            await _reach(obstore.delete_async(self._store, key))

    async def sign_upload(self, name: str, size: int, expires_s: int) -> str:
        """As `DirectStore.sign_upload`."""
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep_often())
        return await _sign_url(self._store, "PUT", incoming_path(base.check_name(name), size), expires_s)

    async def close(self) -> None:
        """As `BlobStore.close`."""
        tasks = [*self._checks.values(), *([] if self._sweeping is None else [self._sweeping])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def sweep(self, older: timedelta = SWEEP_AGE) -> int:
        """Delete direct uploads that were never claimed or differ from the announced size; return their number."""
        limit, num_removed = datetime.now(UTC) - older, 0
        for prefix in ("incoming/", "checking/"):
            async for page in obstore.list(self._store, prefix):
                old = [
                    item["path"]
                    for item in page
                    if item["last_modified"] <= limit or not _is_announced(item["path"], int(item["size"]))
                ]
                if old:
                    await obstore.delete_async(self._store, old)
                num_removed += len(old)
        return num_removed

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)  # first: an upload of a wrong size should be refused, not just vanish
            with suppress(*FAULTS):  # nothing depends on it now; the next sweep finds the same files
                await self.sweep()

    async def _take_incoming(self, name: str) -> bool:
        """Whether a direct upload exists for a blob and matches it; `WrongBlobError` if no upload matches."""
        found = await _reach(_list_keys(self._store, f"incoming/{name}."))
        for key, size in found:
            if key == incoming_path(name, size) and size <= self._limits.max_blob_bytes:
                with self._count_upload():
                    if await self._take_copy(name, key, size):
                        return True
            await _reach(obstore.delete_async(self._store, key))
        if found:
            raise base.WrongBlobError(_WRONG_TEXT)
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
        """The SHA-256 of an object of this size; empty for an object of a different size."""
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
            raise base.BlobError(_AWAY_TEXT) from error

    def _end_check(self, name: str, task: "asyncio.Task[bool]") -> None:
        del self._checks[name]
        if not task.cancelled():
            task.exception()  # raised in the waiting callers; not a bug if none is left

    @contextmanager
    def _count_upload(self) -> Iterator[None]:
        if self.num_uploads >= self._limits.max_uploads:
            raise base.FullError("too many concurrent uploads; try again soon")
        self.num_uploads += 1
        try:
            yield
        finally:
            self.num_uploads -= 1


class S3Reader(base.BlobReader):
    """A blob that is open for reading, as a `BlobReader` and a `DirectReader`."""

    def __init__(self, store: S3Store, key: str, size: int) -> None:
        self.name, self.size = key.rpartition("/")[2], size
        self._store, self._key = store, key

    async def __aiter__(self) -> AsyncIterator[bytes]:
        got = await _reach(obstore.get_async(self._store, self._key))
        try:
            async for piece in got.stream(base.CHUNK_BYTES):
                yield bytes(piece)
        except FAULTS as error:
            raise base.BlobError(_AWAY_TEXT) from error

    async def __aexit__(self, *_: object) -> None: ...

    async def sign_download(self, expires_s: int) -> str:
        """As `DirectReader.sign_download`."""
        return await _sign_url(self._store, "GET", self._key, expires_s)


def _is_announced(key: str, size: int) -> bool:
    """Whether an object has the size in its key, `incoming/NAME.SIZE`; objects elsewhere have none."""
    return not key.startswith("incoming/") or key.rpartition(".")[2] == str(size)


def _place_blob(name: str) -> str:
    return blob_path(base.check_name(name))


def _find_address(store: S3Store) -> str:
    """As `DirectStore.address`: derived from a URL of the library, whose form depends on the bucket and its options."""
    probe = "address"
    return obstore.sign(store, "GET", probe, timedelta(seconds=1)).partition("?")[0].removesuffix(probe)


async def _sign_url(store: S3Store, method: Any, key: str, expires_s: int) -> str:
    assert 0 < expires_s <= base.MAX_URL_S, "a URL must expire before its object is swept"
    return await _reach(obstore.sign_async(store, method, key, timedelta(seconds=expires_s)))


async def _reach(work: Awaitable[T]) -> T:
    """Wait for the bucket's answer; convert its failures to `BlobError`, because they are not the caller's fault."""
    try:
        return await work
    except FileNotFoundError:
        raise base.MissingBlobError("no such blob") from None
    except FAULTS as error:
        raise base.BlobError(_AWAY_TEXT) from error


async def _list_keys(store: S3Store, start: str) -> list[tuple[str, int]]:
    """Keys with this prefix, and the sizes of their objects."""
    # The library's prefixes end at a slash, so the rest of the prefix is found by sort order.
    folder = start.rpartition("/")[0]
    found: list[tuple[str, int]] = []
    async for page in obstore.list(store, folder, offset=start):
        for item in page:
            if not item["path"].startswith(start):
                return found
            found.append((item["path"], int(item["size"])))
    return found


async def _spool_chunks(file: Any, name: str, size: int, chunks: AsyncIterator[bytes]) -> None:
    """Write a blob to a local file; verified when this returns."""
    found, total = hashlib.sha256(), 0
    async for piece in base.gather_pieces(chunks, size):
        total += len(piece)
        await asyncio.to_thread(_write_piece, file, found, piece)
    if total != size or found.hexdigest() != name:
        raise base.WrongBlobError(_WRONG_TEXT)


def _write_piece(file: Any, found: Any, data: bytes) -> None:
    found.update(data)
    try:
        file.write(data)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise base.FullError("the blob store has no space for this blob now; try again later") from error
        raise
