"""The origin: turns a checkpoint into a version that others can fetch while it is still being hashed.

    scan -> head (the version is there) -> hashes, a few at a time \
                                        -> delta or no_delta        > end -> trim

Invariants:
- the files are read once and never copied; memory does not depend on their size;
- a folder that is still being written (`growing.py`) is published file by file; its version ends only after its writer
  has finished, and is dropped if the writer ends before that;
- publishing the same content under the same version again returns the same entry; different content replaces it, with a
  larger serial;
- a version that was not published to its end (an error, a cancellation, a kill) is dropped, and leaves no trace after
  the next opening of the store;
- files that changed while they were read, or cannot be read, raise `ConfigError`, and their version never ends;
- a problem with a delta costs the delta, not the version. A delta that saves next to nothing, a parent that changed or
  cannot be compared, or a full disk gives a `NoDelta` with the reason. The reason is published, so it contains no
  details of this machine.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, cast

from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.shardcast.delta.delta import UselessDeltaError, encode_delta
from shoal.shardcast.errors import DeltaError, StaleError
from shoal.shardcast.format import records
from shoal.shardcast.format.hashing import GROUP_BYTES, HASH_BYTES, hash_ordered, hash_root, hash_shards
from shoal.shardcast.format.layout import File, Shard, ShardLayout, group_shards, is_single_pair
from shoal.shardcast.format.manifest import DELTA
from shoal.shardcast.format.records import Delta, Hashes, ManifestHead, NoDelta, Record, sign_record
from shoal.shardcast.growing import is_growing
from shoal.shardcast.store.origin_files import PublishedBlob, PublishedFiles, scan_source
from shoal.shardcast.store.store import SOURCE, StoredVersion, VersionStore
from shoal.util.aio import outlast, run_blocking
from shoal.util.files import write_atomic

logger = logging.getLogger(__name__)

SHARD_BYTES = 8 << 20
ANCHOR_EVERY = 8
FLUSH_BYTES = 64 << 20
"""Hashes of at most this many bytes are signed together."""
FLUSH_S = 0.25
"""Hashes are held back for at most this long."""
FILE_POLL_S = 0.05
"""How often a file that is being written is looked for."""
MAX_LINE_HASHES = 3800
"""Maximum number of hashes that fit into one line."""


DELTA_THREADS = 2
"""Encoding threads, in addition to those that hash."""
MAX_SHARE = 0.9
"""A delta larger than this share of its version is not worth making, waiting for and applying."""
RESERVED_BYTES = 1 << 16
RESERVED_HASH_BYTES = 80
"""Disk space that a delta leaves to the manifest, for its lines and for each of its hashes."""
POOR = "not smaller than the full version"
NO_ROOM = "no room for it"


class DeltaJob:
    """Parent and target version, the output file, and a way to stop."""

    def __init__(self, parent: StoredVersion, entry: StoredVersion) -> None:
        self.parent = parent
        self.entry = entry
        self.path = entry.folder / f"{DELTA}.part"
        self.stopped = False
        """set to stop the encoding at its next write"""


class Origin:
    """Publishes versions into a store, one at a time."""

    def __init__(
        self,
        store: VersionStore,
        key: Key,
        *,
        shard_size: int = SHARD_BYTES,
        anchor_every: int = ANCHOR_EVERY,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if key.public != store.publisher:
            raise ConfigError(f"the key {key.public} is not the publisher of this store, {store.publisher}")
        if not records.MIN_SHARD_BYTES <= shard_size <= records.MAX_SHARD_BYTES:
            raise ConfigError(
                f"shard_size = {shard_size}: must be from {records.MIN_SHARD_BYTES} to {records.MAX_SHARD_BYTES}"
            )
        if anchor_every < 1:
            raise ConfigError(f"anchor_every = {anchor_every}: must be at least 1")
        self.store = store
        self._key = key
        self._shard_size = shard_size
        self._anchor_every = anchor_every
        self._clock_ns = clock_ns
        self._last_serial = 0
        self._publishing = asyncio.Lock()

    async def publish(
        self,
        path: Path,
        version: int,
        *,
        delta: bool = True,
    ) -> StoredVersion:
        """Publish a folder of files or a file; returns when its whole manifest is written.

        A `delta` is made against the newest complete version below this one. An anchor is a version that relays hold in
        full: every `anchor_every`-th version by number, and every version without a parent.
        """
        async with self._publishing:
            source = await run_blocking(None, _open_source, path)
            self._check_size(source, version)
            known = await self._compare(source, version)
            if isinstance(known, StoredVersion):
                return known
            older = [entry for entry in self.store.entries() if entry.version < version and entry.complete]
            base = older[-1] if older and delta else None
            with contextlib.nullcontext() if base is None else base.hold():
                entry = await self._add_entry(source, version, base)
                with entry.hold():
                    await self._fill_entry(entry, base, known)
            await self.store.trim()
            return entry

    def _check_size(self, source: PublishedFiles, version: int) -> None:
        if not 0 <= version <= records.MAX_NUMBER:
            raise ConfigError(f"version = {version}: must be an integer between 0 and {records.MAX_NUMBER}")
        layout = _lay_out(source, self._shard_size)
        if layout.total == 0:
            raise ConfigError(f"{source.path}: nothing to publish, all files are empty")
        if len(layout.files) > records.MAX_FILES:
            raise ConfigError(f"{source.path}: {len(layout.files)} files, more than the {records.MAX_FILES} allowed")
        if layout.total > records.MAX_TOTAL_BYTES:
            raise ConfigError(f"{source.path}: {layout.total} bytes, more than the {records.MAX_TOTAL_BYTES} allowed")
        if len(layout.shards) > records.MAX_SHARDS:
            raise ConfigError(f"{source.path}: more than {records.MAX_SHARDS} shards; choose a larger shard_size")

    async def _compare(self, source: PublishedFiles, version: int) -> StoredVersion | bytes:
        """Return the entry that already has this content; otherwise the hashes computed meanwhile, if any."""
        held = self.store.find(version)
        if held is None or held.source is None or not held.complete:
            return b""
        if held.source == source:
            return held
        layout = _lay_out(source, held.log.head.shard_size)
        if held.log.full.files != layout.files:
            return b""
        async with contextlib.aclosing(self._hash_source(source, layout, b"")) as found:
            hashes = bytearray()
            async for _, part in found:
                hashes += part
        if hash_root(layout.total, layout.shard_size, hashes).hex() != held.log.root:
            return bytes(hashes) if layout.shard_size == self._shard_size else b""
        await _await_writer(source)
        # The same bytes in a different place: serve them from there, since the old files may be about to be deleted.
        await run_blocking(None, write_atomic, held.folder / SOURCE, source.to_bytes())
        held.point_to(source)
        return held

    async def _add_entry(self, source: PublishedFiles, version: int, base: StoredVersion | None) -> StoredVersion:
        # Also if version numbers are skipped: each step over a multiple of `anchor_every` gives one.
        anchor = base is None or version // self._anchor_every > base.version // self._anchor_every
        serials = [entry.serial for entry in self.store.entries()]
        self._last_serial = max(self._clock_ns(), self._last_serial + 1, max(serials, default=0) + 1)
        files = _lay_out(source, self._shard_size).files
        parent = None if base is None else base.version
        head = ManifestHead(self.store.run, version, self._last_serial, self._shard_size, files, parent, anchor)
        line = sign_record(self._key, "", 0, head)
        if len(line) > records.MAX_LINE_BYTES:
            raise ConfigError(f"{source.path}: too many files with long names to fit into a manifest")
        try:
            return await self.store.adopt(line, source)
        except StaleError as error:
            raise ConfigError(f"version = {version}: {error}") from None

    async def _fill_entry(self, entry: StoredVersion, base: StoredVersion | None, known: bytes) -> None:
        """Write everything after the head; an entry that cannot be finished is dropped."""
        source = entry.source
        assert source is not None, "the entry must have a source"
        try:
            grows = bool(source.awaited)
            await self._append_blobs(entry, base, known)
            await _await_writer(source)
            if grows:
                await run_blocking(None, write_atomic, entry.folder / SOURCE, source.to_bytes())
            if not await run_blocking(None, source.is_unchanged):
                raise _say_changed(source)
            await self._append(entry, entry.log.compute_end())
        except BaseException as error:
            await self.store.drop(entry)
            if isinstance(error, StaleError):  # a thread that was sending from the files saw the change first
                raise _say_changed(source) from None
            raise

    async def _append_blobs(self, entry: StoredVersion, base: StoredVersion | None, known: bytes) -> None:
        if base is None:
            await self._append_hashes(entry, known)
            return
        job, arrived = DeltaJob(base, entry), asyncio.Event()
        adding = asyncio.create_task(self._append_delta(entry, job, arrived))
        try:
            if entry.source is None or not entry.source.awaited:
                arrived.set()
            await self._append_hashes(entry, known)
            arrived.set()
            # Shielded: a cancellation must reach this code, which stops the job, and not the task that waits for it.
            await asyncio.shield(adding)
        finally:
            job.stopped = True
            arrived.set()
            await outlast(adding)

    async def _append_hashes(self, entry: StoredVersion, known: bytes) -> None:
        """Append the hashes of all shards, signed in portions as they are computed."""
        source, layout = entry.source, entry.log.full
        assert source is not None and isinstance(entry.full, PublishedBlob)
        waiting: list[bytes] = []
        filled, flushed_at = 0, time.monotonic()
        hashing = self._hash_source(source, layout, known, entry.full.admit_file)
        async with contextlib.aclosing(hashing) as hashes:
            async for shard, part in hashes:
                waiting.append(part)
                filled += shard.size
                # Before a wait for the next file everything is published.
                late = time.monotonic() - flushed_at >= FLUSH_S or _ends_file(source, shard)
                if late or filled >= FLUSH_BYTES or len(waiting) >= MAX_LINE_HASHES:
                    await self._append(entry, Hashes(entry.log.num_hashes, tuple(waiting)))
                    waiting, filled, flushed_at = [], 0, time.monotonic()
        if waiting:
            await self._append(entry, Hashes(entry.log.num_hashes, tuple(waiting)))

    async def _append_delta(self, entry: StoredVersion, job: DeltaJob, arrived: asyncio.Event) -> None:
        """Publish the result of the delta as soon as it is known, so that nobody waits for one that does not come.

        It is encoded once all files have `arrived`.
        """
        await arrived.wait()
        if job.stopped:
            return
        result = await run_blocking(None, make_delta, job)
        if job.stopped:
            return
        if isinstance(result, Delta) and len(result.hashes) > MAX_LINE_HASHES:
            result = NoDelta("more shards than one line can name")
            await run_blocking(None, job.path.unlink)
        await self._append(entry, result)
        if isinstance(result, NoDelta):
            logger.info(f"version {entry.version} has no delta: {result.reason}")
        elif entry.delta is not None:
            entry.delta.trust_part()
            await entry.delta.settle()

    async def _append(self, entry: StoredVersion, record: Record) -> None:
        await entry.append(sign_record(self._key, entry.digest, len(entry.log.lines), record))

    async def _hash_source(
        self,
        source: PublishedFiles,
        layout: ShardLayout,
        known: bytes,
        admit: Callable[[str], None] = lambda _name: None,
    ) -> AsyncGenerator[tuple[Shard, bytes], None]:
        """Yield shards with their hashes, in order; hashes in `known` are not computed again. Files of a growing folder
        are awaited, and passed to `admit` before they are hashed."""
        num_known = len(known) // HASH_BYTES
        for index in range(num_known):
            yield layout.shards[index], known[index * HASH_BYTES : (index + 1) * HASH_BYTES]
        rest: Iterator[Shard] = (layout.shards[index] for index in range(num_known, len(layout.shards)))
        for file, shards in groupby(rest, lambda shard: shard.file) if source.awaited else (("", rest),):
            if file in source.awaited:
                await _await_file(source, file)
                admit(file)
            async with contextlib.aclosing(self._hash_shards(source, shards)) as hashed:
                async for pair in hashed:
                    yield pair
        for file in source.awaited:  # empty ones
            await _await_file(source, file)

    async def _hash_shards(
        self, source: PublishedFiles, shards: Iterable[Shard]
    ) -> AsyncGenerator[tuple[Shard, bytes], None]:
        async with contextlib.aclosing(hash_ordered(self.store.pool, source.folder.joinpath, shards)) as hashed:
            try:
                async for shard, part in hashed:
                    if part is None:
                        raise _say_changed(source)
                    yield shard, part
            except OSError as error:
                raise _say_unreadable(source.path, error) from None


def _ends_file(source: PublishedFiles, shard: Shard) -> bool:
    """Whether a shard is the last of its file, and other files have not arrived."""
    return bool(source.awaited) and shard.offset + shard.size == source.fingerprints[shard.file].size


async def _await_file(source: PublishedFiles, name: str) -> None:
    while not await run_blocking(None, source.look_for, name):
        await asyncio.sleep(FILE_POLL_S)


async def _await_writer(source: PublishedFiles) -> None:
    """Wait until the writer of a growing folder has finished; ConfigError if it ended before that."""
    while await run_blocking(None, is_growing, source.path):
        await asyncio.sleep(FILE_POLL_S)


def compute_root(path: Path, shard_bytes: int) -> str:
    """Compute the root of a folder or file in a manifest with shards of this size. Blocking."""
    source = scan_source(path)
    layout = _lay_out(source, shard_bytes)
    groups = group_shards(layout.shards, GROUP_BYTES)
    hashes = b"".join(part for group in groups for part in hash_shards(source.folder / group[0].file, group))
    return hash_root(layout.total, layout.shard_size, hashes).hex()


def _open_source(path: Path) -> PublishedFiles:
    """Open everything that is to be published; ConfigError with the reason if a file cannot be opened."""
    source = scan_source(path)
    for name in source.fingerprints.keys() - source.awaited:
        try:
            os.close(os.open(source.folder / name, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise _say_unreadable(source.folder / name, error) from None
    return source


def _say_unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{error.filename or path}: cannot be read ({error.strerror})")


def _say_changed(source: PublishedFiles) -> ConfigError:
    return ConfigError(f"{source.path}: changed while it was being published; publish it again when it is complete")


def _lay_out(source: PublishedFiles, shard_size: int) -> ShardLayout:
    return ShardLayout((File(name, stamp.size) for name, stamp in source.fingerprints.items()), shard_size)


class _NoDeltaError(Exception):
    """The delta is not used; the text states why."""


class _BoundedFile:
    """The output file of `encode_delta`: stops when the delta is too large or leaves no space for the manifest."""

    def __init__(self, file: BinaryIO, job: DeltaJob) -> None:
        full = job.entry.log.full
        self._file = file
        self._job = job
        self._left = MAX_SHARE * full.total
        self._reserve = RESERVED_BYTES + RESERVED_HASH_BYTES * len(full.shards)

    def write(self, data: bytes | memoryview) -> int:
        size = memoryview(data).nbytes
        self._left -= size
        if self._job.stopped:
            raise _NoDeltaError("not published")
        if self._left <= 0:
            raise _NoDeltaError(POOR)
        status = os.fstatvfs(self._file.fileno())
        if status.f_bavail * status.f_frsize < size + self._reserve:
            raise _NoDeltaError(NO_ROOM)
        with _refuse_errors(NO_ROOM):
            self._file.write(data)
        return size


def make_delta(job: DeltaJob) -> Delta | NoDelta:
    """Encode the delta into the entry's folder and hash it. Without a delta no file is left. Blocking."""
    try:
        return _encode_file(job)
    except _NoDeltaError as error:
        job.path.unlink(missing_ok=True)
        return NoDelta(str(error))


def _encode_file(job: DeltaJob) -> Delta:
    log, parent = job.entry.log, job.parent
    parent_root = parent.log.root
    assert parent_root is not None, "a parent must be complete"
    roots = _choose_roots(parent, job.entry)
    with _refuse_errors(NO_ROOM), job.path.open("wb") as file:
        bounded = cast(BinaryIO, _BoundedFile(file, job))
        try:
            encode_delta(*roots, bounded, threads=DELTA_THREADS, max_share=MAX_SHARE)
        except UselessDeltaError:
            raise _NoDeltaError(POOR) from None
        except (DeltaError, OSError):
            raise _NoDeltaError("cannot be compared with its parent") from None
    if parent.source is not None and not parent.source.is_unchanged():
        raise _NoDeltaError("the parent changed")
    size = job.path.stat().st_size
    layout = ShardLayout([File(DELTA, size)], log.head.shard_size)
    with _refuse_errors("cannot be read"):
        hashes = tuple(hash_shards(job.path, layout.shards))
    return Delta(size, bytes.fromhex(parent_root), hashes)


@contextlib.contextmanager
def _refuse_errors(reason: str) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise _NoDeltaError(reason) from None


def _choose_roots(parent: StoredVersion, entry: StoredVersion) -> tuple[Path, Path]:
    """The paths to compare: two files, or two folders that hold nothing but what was published."""
    if is_single_pair(parent.log.full, entry.log.full):
        old, new = (each.full.path_of(each.log.full.files[0].name) for each in (parent, entry))
        return old, new
    if any(each.source is not None and each.source.single for each in (parent, entry)):
        raise _NoDeltaError("one is a folder and one a file")
    return parent.full.folder, entry.full.folder
