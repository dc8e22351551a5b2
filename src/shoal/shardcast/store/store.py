"""The versions that a process holds, in a folder of its own.

    store.lock  store.json                      who has it open; run and publisher of these versions
    v<version>-<16 hex of digest>/              one entry: manifest.ndjson, full, delta (see blob.py), source.json

The life of an entry:

    new -> growing -> ended -> complete
    any of these -> gone (no longer found) -> removed when its last holder releases it

The store keeps the newest `keep` versions, the newest complete one (others build on it), those published in the last
`keep_s` as far as all of them take no more than `keep_bytes`, and the chain: the versions by whose deltas the newest is
reached, at most `MAX_CHAIN`, whatever the publisher does. In the store of a server the chain begins at a complete
anchor, so that a client that joins late finds it and every delta since, and the next anchor can be built from them. In
a client's store it begins at any held version, so that a client that fell behind continues by deltas. A store that
holds none of these begins at an anchor. Beyond `keep` a client's chain is manifests and deltas, never full blobs.
If the newest version is an adapter, version 0, its base, belongs to the chain and is kept in full everywhere.

Invariants:
- the manifest's file is the log; a line counts there with its newline, and is written before it counts in memory;
- one live process at a time uses the folder (flock, released by the kernel when the process ends);
- file names come from our own integers and hashes, and from names that passed `check_name`; nothing outside the folder
  is touched;
- there is one entry per version, that of the largest serial; an entry that is held is never deleted;
- `max_bytes` takes precedence over what is to be kept;
- whatever an earlier process left, opening ends with entries that are valid or gone.
"""

import asyncio
import contextlib
import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ConfigError
from shoal.identity.keys import check_public
from shoal.shardcast.errors import ManifestError, StaleError
from shoal.shardcast.format.layout import BASE_VERSION, holds_adapter
from shoal.shardcast.format.manifest import DELTA, FULL, ManifestLog
from shoal.shardcast.format.records import MAX_LINE_BYTES, Delta, End
from shoal.shardcast.store.blob import Blob
from shoal.shardcast.store.lock import claim_folder
from shoal.shardcast.store.open_files import OpenFileCache
from shoal.shardcast.store.origin_files import PublishedBlob, PublishedFiles
from shoal.shardcast.store.writer import remove_tree, write_at
from shoal.util.aio import Notifier, run_blocking
from shoal.util.files import remove_dir, sweep_leftovers, sync_path
from shoal.util.units import check_run

logger = logging.getLogger(__name__)

MANIFEST = "manifest.ndjson"
SOURCE = "source.json"
MAX_CHAIN = 64


class StoredVersion:
    """One version. Used only from the event loop's thread."""

    def __init__(
        self, folder: Path, log: ManifestLog, store: "VersionStore", source: PublishedFiles | None = None
    ) -> None:
        self.folder = folder
        self.log = log
        self.grown = Notifier()
        """the log has more lines, or the entry is gone"""
        self.gone = False
        self.delta: Blob | None = None
        self._store = store
        self._num_holds = 0
        log.lines.keep_in(folder / MANIFEST)
        self.full = Blob(FULL, self, store) if source is None else PublishedBlob(self, store, source)
        if log.delta is not None:
            self.delta = Blob(DELTA, self, store)

    @property
    def version(self) -> int:
        return self.log.head.version

    @property
    def serial(self) -> int:
        return self.log.head.serial

    @property
    def digest(self) -> str:
        return self.log.digest

    @property
    def source(self) -> PublishedFiles | None:
        """The files of an origin's entry; None in the store of a relay or client."""
        return self.full.source if isinstance(self.full, PublishedBlob) else None

    @property
    def is_adapter(self) -> bool:
        """Whether its files are an adapter over version 0."""
        return holds_adapter(file.name for file in self.full.layout.files)

    @property
    def complete(self) -> bool:
        """Whether the log has ended and every shard of the full blob is verified."""
        return self.log.ended and self.full.complete

    @property
    def ready(self) -> bool:
        """Whether it is complete and has its final name."""
        return self.complete and self.full.settled

    @property
    def held(self) -> bool:
        return self._num_holds > 0

    @property
    def blobs(self) -> list[Blob]:
        return [self.full] if self.delta is None else [self.full, self.delta]

    @property
    def disk_bytes(self) -> int:
        """Bytes allocated in the store."""
        return sum(blob.layout.total for blob in self.blobs if blob.charged)

    @property
    def kept_bytes(self) -> int:
        """Bytes that keeping it takes, here and, for an origin's entry, where its files are."""
        return self.disk_bytes + (0 if self.source is None else self.full.layout.total)

    async def append(self, line: bytes) -> None:
        """Verify and store the next line; ManifestError changes nothing. The last line is on disk on return."""
        self._check_live()
        checked = self.log.check(line)
        # On disk first: a line only in memory would be a gap on disk after the next one.
        self._write_line(checked.line)
        self.log.commit(checked)
        if isinstance(checked.record, Delta):
            self.delta = Blob(DELTA, self, self._store)
        self.grown.notify()
        self._store.changed.notify()
        if isinstance(checked.record, End):
            try:
                await run_blocking(None, self._sync_manifest)
            except FileNotFoundError:
                self._check_live()
                raise

    def read_lines(self, first: int, num_bytes: int) -> tuple[bytes, int]:
        """Lines of the manifest as they are sent, and the number of the next one; empty once the entry is gone."""
        return (b"", first) if self.gone else self.log.lines.read_batch(first, num_bytes)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """While the block runs nothing of this entry is deleted."""
        if not self.held:
            self._check_live()
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1
            if self.gone and not self.held:
                self._store.remove_released(self)

    async def restore(self) -> None:
        """Restore what an earlier process left of the blobs, and finish those with all bytes."""
        for blob in self.blobs:
            await blob.restore()
            if blob.complete and (blob.name == DELTA or self.log.ended):
                await blob.settle()

    def end(self) -> None:
        """Mark the entry as gone: no more lines, no more shards; all waiters are woken."""
        self.gone = True
        for blob in self.blobs:
            blob.stop_writers()
        self.grown.notify()

    async def wait_flushed(self) -> None:
        """Wait until the sync to disk has finished."""
        for blob in self.blobs:
            await blob.wait_flushed()

    def point_to(self, source: PublishedFiles) -> None:
        """Serve the same content from a different place."""
        assert isinstance(self.full, PublishedBlob), "must be an origin's entry"
        self._store.open_files.forget(self.full.folder)
        self.full.source = source

    def _check_live(self) -> None:
        if self.gone:
            raise StaleError(f"version {self.version} was dropped")

    def _write_line(self, line: bytes) -> None:
        data, place = line + b"\n", self.log.lines.num_bytes
        with self._store.open_files.lease(self.folder / MANIFEST, os.O_RDWR | os.O_NOFOLLOW) as descriptor:
            try:
                write_at(descriptor, memoryview(data), place)
            except OSError:
                os.ftruncate(descriptor, place)
                raise

    def _sync_manifest(self) -> None:
        for path in (self.folder / MANIFEST, self.folder, self.folder.parent):
            sync_path(path)


def read_log(folder: Path, publisher: str, run: str) -> ManifestLog | None:
    """The log stored in a folder, with an incomplete last line cut off; None if not even its head exists."""
    log = ManifestLog(publisher, run)
    log.lines.keep_in(folder / MANIFEST)
    try:
        with (folder / MANIFEST).open("r+b") as file:
            good = 0
            while (line := file.readline(MAX_LINE_BYTES + 1)).endswith(b"\n"):
                try:
                    log.feed(line)
                except ManifestError:
                    break
                good += len(line)
            file.truncate(good)
    except FileNotFoundError:
        return None
    return log if log.lines else None


def list_kept(entries: Mapping[int, StoredVersion], keep: int, *, serves: bool) -> set[int]:
    """The versions to keep. They may include one that is still to come: the first missing one of the chain."""
    complete = [version for version, entry in entries.items() if entry.complete]
    return {*sorted(entries)[-keep:], *sorted(complete)[-1:], *find_chain(entries, serves=serves)}


def find_chain(entries: Mapping[int, StoredVersion], *, serves: bool) -> set[int]:
    """The versions of the chain to the newest, inclusive, and the base of an adapter."""
    to_held, found = _trace_chain(entries, lambda entry: entry.complete and (entry.log.head.anchor or not serves))
    chain = to_held if found else _trace_chain(entries, lambda entry: entry.log.head.anchor)[0]
    return chain | find_base(entries)


def find_base(entries: Mapping[int, StoredVersion]) -> set[int]:
    """Version 0 if the newest is an adapter over it, otherwise nothing."""
    return {BASE_VERSION} if entries and entries[max(entries)].is_adapter else set()


def _trace_chain(
    entries: Mapping[int, StoredVersion], begins: Callable[[StoredVersion], bool]
) -> tuple[set[int], bool]:
    """From the newest version through its parents to the start of the chain, and whether there is a start."""
    chain: set[int] = set()
    version = max(entries, default=None)
    while version is not None and len(chain) < MAX_CHAIN:
        chain.add(version)
        entry = entries.get(version)
        if entry is None:
            break
        if begins(entry):
            return chain, True
        # Without a delta, a version can only be reached by its full blob.
        version = None if entry.log.delta_settled and entry.log.delta is None else entry.log.head.parent
    return chain, False


DEFAULT_KEEP = 5
NUM_THREADS = 4
"""Threads that hash and write. More than cores, since some wait for the disk."""
MAX_GONE = 4096
"""Number of dropped versions that are remembered individually."""
_FOLDER = re.compile(r"v(0|[1-9][0-9]{0,18})-[0-9a-f]{16}")
_SCRATCH = ("full.spare-*", "delta.spare-*", "built*")


@dataclass(eq=False, repr=False)
class VersionStore:
    """An open store. Used only from the event loop's thread; nothing blocks it for long."""

    folder: Path
    run: str
    publisher: str
    keep: int
    max_bytes: int | None
    serves: bool
    _lock: int
    keep_s: float = 0.0
    """versions of this many seconds are kept too"""
    keep_bytes: int | None = None
    """as far as all that is kept takes no more than this; None: no limit"""
    newest: int | None = None
    """newer versions are not adopted; for a client that wants an old one"""
    pool: Executor = field(default_factory=lambda: ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="shoal-store"))
    """threads for hashing and writing"""
    open_files: OpenFileCache = field(default_factory=OpenFileCache)
    changed: Notifier = field(default_factory=Notifier)
    """an entry was added, removed or extended"""
    _entries: dict[int, StoredVersion] = field(default_factory=dict)
    _removing: set[StoredVersion] = field(default_factory=set)
    _dropped: dict[int, None] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @classmethod
    async def open(
        cls,
        folder: Path,
        *,
        run: str,
        publisher: str,
        keep: int = DEFAULT_KEEP,
        keep_s: float = 0.0,
        keep_bytes: int | None = None,
        newest: int | None = None,
        max_bytes: int | None = None,
        serves: bool = True,
        role: str = "",
    ) -> "VersionStore":
        """Open or create a folder, and restore its contents.

        `serves`: whether others fetch from it, which decides what is kept. `role` describes this process to others.
        """
        check_run(run)
        check_public(publisher)
        if keep < 1:
            raise ConfigError(f"keep = {keep}: must be at least 1")
        if max_bytes is not None and max_bytes < 1:
            raise ConfigError(f"max_bytes = {max_bytes}: must be at least 1")
        lock = await claim_folder(folder, run=run, publisher=publisher, role=role)
        store = cls(folder, run, publisher, keep, max_bytes, serves, lock, keep_s, keep_bytes, newest)
        try:
            await store._restore()
        except BaseException:
            await store.close()
            raise
        return store

    def entries(self) -> list[StoredVersion]:
        """All entries, ascending by version."""
        return [self._entries[version] for version in sorted(self._entries)]

    def find(self, version: int) -> StoredVersion | None:
        """The entry of a version."""
        return self._entries.get(version)

    def is_base(self, version: int) -> bool:
        """Whether the newest version is an adapter over this one."""
        return version in find_base(self._entries)

    def find_digest(self, digest: str) -> StoredVersion | None:
        """The entry whose manifest has this digest, given completely or as its first 16 characters."""
        for entry in self._entries.values():
            if digest in (entry.digest, entry.digest[:16]):
                return entry
        return None

    def find_parent(self, entry: StoredVersion) -> StoredVersion | None:
        """The version that the entry's delta can be applied to, as far as known."""
        log = entry.log
        if log.head.parent is None or (log.delta_settled and log.delta is None):
            return None
        parent = self.find(log.head.parent)
        if parent is None or (log.parent_root is not None and parent.log.root not in (None, log.parent_root)):
            return None  # the parent is not here, or was published again after the delta was made
        return parent

    def is_gone(self, version: int) -> bool:
        """Whether a version was dropped, or is older than all that are kept: asking again is useless."""
        if version in self._entries:
            return False
        return version in self._dropped or self._is_old(version)

    @property
    def used_bytes(self) -> int:
        """Bytes allocated, including dropped entries that are still held."""
        return sum(entry.disk_bytes for entry in [*self._entries.values(), *self._removing])

    async def adopt(self, head_line: bytes, source: PublishedFiles | None = None) -> StoredVersion:
        """The entry of a head that a peer sent, or that this process publishes from files elsewhere; created if
        necessary.

        ManifestError: not a head of this run by its publisher. StaleError: a valid head that is no longer wanted.
        """
        log = ManifestLog(self.publisher, self.run)
        log.feed(head_line)
        existing = self.find_digest(log.digest)
        if existing is not None:
            return existing
        self._refuse_stale(log)
        entry = self._create(log, source)
        replaced = self._entries.get(entry.version)
        self._entries[entry.version] = entry
        if replaced is not None:
            await self.drop(replaced)
        self.changed.notify()
        await self.trim()
        return entry

    async def drop(self, entry: StoredVersion) -> None:
        """Drop an entry: it is no longer found, and is removed once its last holder releases it."""
        if entry.gone:
            return
        self._forget(entry)
        if not entry.held:
            await self._remove(entry)

    async def trim(self) -> None:
        """Drop entries that need not be kept and are not held."""
        await self._drop_old()
        for entry in self._list_dispensable():
            if self.max_bytes is None or self.used_bytes <= self.max_bytes:
                return
            if entry.disk_bytes and not entry.held:
                await self.drop(entry)

    async def close(self) -> None:
        """Finish writing to disk, then release the folder. Closing twice is harmless."""
        if self._lock < 0:
            return
        for entry in [*self._entries.values(), *self._removing]:
            for blob in entry.blobs:
                blob.stop_writers()
            await entry.wait_flushed()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self.open_files.close()
        self.pool.shutdown(wait=True)
        os.close(self._lock)
        self._lock = -1

    # Called by entries

    async def make_room(self, entry: StoredVersion) -> None:
        """Drop older versions until the limit holds with what `entry` will allocate; OSError if that is not enough."""
        await self._drop_old()  # otherwise a client on a long chain would keep everything it builds on until the end
        if self.max_bytes is None:
            return
        others = [other for other in self._list_dispensable() if other.version < entry.version and not other.held]
        spare_bytes = sum(other.disk_bytes for other in others)
        if self.used_bytes - spare_bytes > self.max_bytes:
            reason = f"{os.strerror(errno.EDQUOT)}: version {entry.version} needs more than {self.max_bytes} bytes"
            raise OSError(errno.EDQUOT, reason, os.fspath(self.folder))
        for other in others:
            if self.used_bytes <= self.max_bytes:
                return
            await self.drop(other)

    def remove_released(self, entry: StoredVersion) -> None:
        """Remove a dropped entry that is no longer held, in the background."""
        task = asyncio.get_running_loop().create_task(self._remove_noting(entry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drop_changed(self, entry: StoredVersion) -> None:
        """Drop an entry whose source files have changed."""
        if not entry.gone:
            assert entry.source is not None
            self._note_changed(entry.source, entry.version)
            self._forget(entry)
            if not entry.held:
                self.remove_released(entry)

    # Adding and removing entries

    def _refuse_stale(self, log: ManifestLog) -> None:
        head = log.head
        existing = self._entries.get(head.version)
        if existing is not None and existing.serial >= head.serial:
            raise StaleError(f"version {head.version} was replaced")
        if self.newest is not None and head.version > self.newest:
            raise StaleError(f"version {head.version} is newer than version {self.newest}, which is wanted")
        if existing is None and self._is_old(head.version):
            raise StaleError(f"version {head.version} is older than the versions kept")

    def _is_old(self, version: int) -> bool:
        """Whether a version that is not here would not be kept."""
        newest = sorted(self._entries)[-self.keep :]
        if len(newest) < self.keep or version > newest[0]:
            return False
        return version not in find_chain(self._entries, serves=self.serves)

    async def _drop_old(self) -> None:
        kept = list_kept(self._entries, self.keep, serves=self.serves)
        kept |= self._list_recent(kept)
        for entry in self.entries():
            if entry.version not in kept and not entry.held:
                await self.drop(entry)

    def _list_recent(self, kept: set[int]) -> set[int]:
        """Versions of the last `keep_s`, newest first, that `keep_bytes` allows besides those that are kept anyway."""
        since_ns = time.time_ns() - int(self.keep_s * 1e9)
        used_bytes = sum(self._entries[version].kept_bytes for version in kept & self._entries.keys())
        recent: set[int] = set()
        for entry in reversed(self.entries()):
            if entry.version in kept or entry.serial < since_ns:  # a serial is the time of publishing
                continue
            used_bytes += entry.kept_bytes
            if self.keep_bytes is not None and used_bytes > self.keep_bytes:
                break
            recent.add(entry.version)
        return recent

    def _list_dispensable(self) -> list[StoredVersion]:
        """Entries in the order in which a byte limit drops them: those on no chain first, then by age."""
        chain = find_chain(self._entries, serves=self.serves)
        return sorted(self.entries(), key=lambda entry: entry.version in chain)

    def _create(self, log: ManifestLog, source: PublishedFiles | None) -> StoredVersion:
        folder = self.folder / _name_folder(log)
        if any(entry.folder == folder for entry in self._removing):
            raise StaleError(f"version {log.head.version} was dropped and is being removed")
        try:
            folder.mkdir()
            if source is not None:  # first, so that a manifest of a source never exists without it
                (folder / SOURCE).write_bytes(source.to_bytes())
            (folder / MANIFEST).write_bytes(b"".join(line + b"\n" for line in log.lines))
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return StoredVersion(folder, log, self, source)

    def _forget(self, entry: StoredVersion) -> None:
        entry.end()
        self._removing.add(entry)
        if self._entries.get(entry.version) is entry:
            del self._entries[entry.version]
            self._dropped[entry.version] = None
            if len(self._dropped) > MAX_GONE:
                del self._dropped[next(iter(self._dropped))]
        if entry.held:  # without its manifest it is not restored if this process ends before the last reader
            (entry.folder / MANIFEST).rename(entry.folder / f"{MANIFEST}.gone")
        self.changed.notify()

    async def _remove(self, entry: StoredVersion) -> None:
        await entry.wait_flushed()
        self.open_files.forget(entry.folder)
        await run_blocking(None, remove_dir, entry.folder)
        self._removing.discard(entry)

    async def _remove_noting(self, entry: StoredVersion) -> None:
        try:
            await self._remove(entry)
        except OSError as error:
            logger.warning(f"{entry.folder}: cannot be removed ({error.strerror}); will retry at the next start")

    # Opening

    async def _restore(self) -> None:
        await run_blocking(None, sweep_leftovers, self.folder)
        for folder in sorted(self.folder.iterdir()):
            if _FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
                entry = await run_blocking(None, self._load, folder)
                if entry is None or not self._keep_newest(entry):
                    await run_blocking(None, remove_dir, folder)
        for entry in self.entries():
            await entry.restore()
        await self.trim()

    def _load(self, folder: Path) -> StoredVersion | None:
        """Load what an earlier process left in a folder; None if it is unusable."""
        for pattern in _SCRATCH:
            for path in folder.glob(pattern):
                remove_tree(path)
        log = read_log(folder, self.publisher, self.run)
        if log is None or _name_folder(log) != folder.name:
            return None
        source = None
        if (folder / SOURCE).exists() and (source := self._load_source(folder, log)) is None:
            return None
        return StoredVersion(folder, log, self, source)

    def _load_source(self, folder: Path, log: ManifestLog) -> PublishedFiles | None:
        try:
            source = PublishedFiles.from_bytes((folder / SOURCE).read_bytes())
        except ValueError:
            return None
        if not log.ended:
            return None  # only partially published; the publisher will publish it again
        if not source.is_unchanged():
            self._note_changed(source, log.head.version)
            return None
        return source

    def _note_changed(self, source: PublishedFiles, version: int) -> None:
        logger.warning(f"{source.path}: changed since it was published; version {version} is dropped")

    def _keep_newest(self, entry: StoredVersion) -> bool:
        """Whether an entry is the newest of its version; an older one already loaded is replaced."""
        other = self._entries.get(entry.version)
        if other is not None and other.serial > entry.serial:
            return False
        self._entries[entry.version] = entry
        if other is not None:
            remove_dir(other.folder)
        return True


def _name_folder(log: ManifestLog) -> str:
    return f"v{log.head.version}-{log.digest[:16]}"
