"""The versions that a process holds, in one folder that it has to itself.

    store.lock  store.json                      who has it open; whose versions these are
    v<version>-<16 hex of digest>/              one entry: manifest.ndjson, full, delta (see blob.py), source.json

Invariants:
- one live process at a time has the folder (flock, given up by the kernel when the process ends);
- names come from our own integers and hashes, and from names that `check_name` passed; nothing outside is touched;
- there is one entry per version, that of the largest serial; one that is held is never deleted;
- what is kept is in retention.py; `max_bytes` comes before that;
- whatever an earlier process left, opening ends with entries that are true or gone.
"""

import asyncio
import errno
import os
import re
import shutil
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from shoal.errors import ConfigError
from shoal.files import remove_dir, sweep_leftovers
from shoal.keys import check_public
from shoal.runname import check_run
from shoal.shardcast.blob import Tools
from shoal.shardcast.entry import MANIFEST, SOURCE, Entry, read_log
from shoal.shardcast.errors import StaleError
from shoal.shardcast.handles import Handles
from shoal.shardcast.lock import claim_folder
from shoal.shardcast.manifest import ManifestLog
from shoal.shardcast.parts import remove_tree
from shoal.shardcast.pool import run_blocking
from shoal.shardcast.retention import find_way, list_kept
from shoal.shardcast.signal import Signal
from shoal.shardcast.source import Source

__all__ = ["Entry", "Store"]

DEFAULT_KEEP = 5
NUM_THREADS = 4
"""Threads that hash and write. More than cores, since some wait for the disk."""
MAX_GONE = 4096
"""Dropped versions that are remembered one by one."""
_FOLDER = re.compile(r"v(0|[1-9][0-9]{0,18})-[0-9a-f]{16}")
_SCRATCH = ("full.spare-*", "delta.spare-*", "built*")


def _ignore_note(text: str) -> None:
    """Where nobody wants to read notes."""


class Store:
    """An open store. Everything here belongs to the event loop's thread; nothing blocks it for long."""

    def __init__(
        self,
        folder: Path,
        lock: int,
        *,
        run: str,
        publisher: str,
        keep: int,
        max_bytes: int | None,
        serves: bool,
        tools: Tools,
    ) -> None:
        self.folder = folder
        self.run = run
        self.publisher = publisher
        self.keep = keep
        self.max_bytes = max_bytes
        self.serves = serves
        self.note = tools.note
        """gets sentences for whoever runs this"""
        self.changed = Signal()
        """an entry came, went or grew"""
        self._lock = lock
        self._tools = tools
        self._entries: dict[int, Entry] = {}
        self._going: set[Entry] = set()
        self._gone: dict[int, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls,
        folder: Path,
        *,
        run: str,
        publisher: str,
        keep: int = DEFAULT_KEEP,
        max_bytes: int | None = None,
        serves: bool = True,
        role: str = "",
        note: Callable[[str], None] = _ignore_note,
    ) -> "Store":
        """Open a folder, or make it, and take back what is in it.

        `serves`: whether others fetch from it, which decides what is kept. `role` is what other processes are told
        about this one. `note` gets sentences for whoever runs this.
        """
        _check_settings(run, publisher, keep, max_bytes)
        lock = await claim_folder(folder, run=run, publisher=publisher, role=role)
        pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="shoal-store")
        tools = Tools(pool, Handles(), note)
        store = cls(
            folder, lock, run=run, publisher=publisher, keep=keep, max_bytes=max_bytes, serves=serves, tools=tools
        )
        try:
            await store._restore()
        except BaseException:
            await store.close()
            raise
        return store

    def entries(self) -> list[Entry]:
        """All entries, ascending by version."""
        return [self._entries[version] for version in sorted(self._entries)]

    def find(self, version: int) -> Entry | None:
        """The entry of a version."""
        return self._entries.get(version)

    def find_digest(self, digest: str) -> Entry | None:
        """The entry whose manifest has this digest, given whole or as its first 16 characters."""
        for entry in self._entries.values():
            if digest in (entry.digest, entry.digest[:16]):
                return entry
        return None

    def is_gone(self, version: int) -> bool:
        """Whether a version was dropped, or is older than all that are kept: asking again is in vain."""
        if version in self._entries:
            return False
        return version in self._gone or self._is_old(version)

    @property
    def pool(self) -> Executor:
        """Threads for hashing and writing."""
        return self._tools.pool

    @property
    def used_bytes(self) -> int:
        """Bytes allocated, those of dropped entries included that are still held."""
        return sum(entry.disk_bytes for entry in [*self._entries.values(), *self._going])

    async def adopt(self, head_line: bytes) -> Entry:
        """The entry of a head that a peer sent: a new one if need be.

        ManifestError: not a head of this run by its publisher. StaleError: a true one, but not wanted any more.
        """
        return await self._add(head_line, None)

    async def add_source(self, head_line: bytes, source: Source) -> Entry:
        """The entry of a version that this process publishes from files elsewhere."""
        return await self._add(head_line, source)

    async def drop(self, entry: Entry) -> None:
        """Let an entry go: nobody finds it from now on, and it is removed once nobody holds it."""
        if entry.gone:
            return
        self._forget(entry)
        if not entry.held:
            await self._remove(entry)

    async def trim(self) -> None:
        """Drop what is not to be kept and is not held."""
        await self._drop_old()
        for entry in self._list_dispensable():
            if self.max_bytes is None or self.used_bytes <= self.max_bytes:
                return
            if entry.disk_bytes and not entry.held:
                await self.drop(entry)

    async def close(self) -> None:
        """Finish what is being written to disk, then let others open the folder. Closing twice is harmless."""
        if self._lock < 0:
            return
        for entry in [*self._entries.values(), *self._going]:
            for blob in entry.blobs:
                blob.stop_writers()
            await entry.wait_flushed()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._tools.handles.close()
        self._tools.pool.shutdown(wait=True)
        os.close(self._lock)
        self._lock = -1

    # What entries ask for.

    async def make_room(self, entry: Entry) -> None:
        """Drop older versions until the limit holds with what `entry` is about to allocate; OSError if it cannot."""
        await self._drop_old()  # or a client would keep all that it builds on a long way until the end of it
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

    def let_go(self, entry: Entry) -> None:
        """The last one who held a gone entry is through."""
        self._spawn(self._remove_noting(entry))

    def lose_source(self, entry: Entry) -> None:
        """The files that an entry was published from are not those any more."""
        if not entry.gone:
            assert entry.source is not None
            self._tools.note(f"{entry.source.path}: changed since it was published; version {entry.version} is dropped")
            self._forget(entry)
            if not entry.held:
                self._spawn(self._remove_noting(entry))

    # Coming and going.

    async def _add(self, head_line: bytes, source: Source | None) -> Entry:
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

    def _refuse_stale(self, log: ManifestLog) -> None:
        head = log.head
        existing = self._entries.get(head.version)
        if existing is not None and existing.serial >= head.serial:
            raise StaleError(f"version {head.version} was replaced")
        if existing is None and self._is_old(head.version):
            raise StaleError(f"version {head.version} is older than what is kept")

    def _is_old(self, version: int) -> bool:
        """Whether a version that is not here would not be kept."""
        newest = sorted(self._entries)[-self.keep :]
        if len(newest) < self.keep or version > newest[0]:
            return False
        return version not in find_way(self._entries, serves=self.serves)

    async def _drop_old(self) -> None:
        kept = list_kept(self._entries, self.keep, serves=self.serves)
        for entry in self.entries():
            if entry.version not in kept and not entry.held:
                await self.drop(entry)

    def _list_dispensable(self) -> list[Entry]:
        """Entries in the order in which a limit of bytes drops them: those on no way first, then by age."""
        way = find_way(self._entries, serves=self.serves)
        return sorted(self.entries(), key=lambda entry: entry.version in way)

    def _create(self, log: ManifestLog, source: Source | None) -> Entry:
        folder = self.folder / _name_folder(log)
        if any(entry.folder == folder for entry in self._going):
            raise StaleError(f"version {log.head.version} was dropped and is being removed")
        try:
            folder.mkdir()
            if source is not None:  # first, so that no manifest of a source is ever without it
                (folder / SOURCE).write_bytes(source.to_bytes())
            (folder / MANIFEST).write_bytes(b"".join(line + b"\n" for line in log.lines))
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return Entry(folder, log, tools=self._tools, keeper=self, source=source)

    def _forget(self, entry: Entry) -> None:
        entry.end()
        self._going.add(entry)
        if self._entries.get(entry.version) is entry:
            del self._entries[entry.version]
            self._gone[entry.version] = None
            if len(self._gone) > MAX_GONE:
                del self._gone[next(iter(self._gone))]
        if entry.held:  # without its manifest it does not come back if this process ends before the last reader does
            (entry.folder / MANIFEST).rename(entry.folder / f"{MANIFEST}.gone")
        self.changed.notify()

    async def _remove(self, entry: Entry) -> None:
        await entry.wait_flushed()
        self._tools.handles.forget(entry.folder)
        await run_blocking(None, remove_dir, entry.folder)
        self._going.discard(entry)

    async def _remove_noting(self, entry: Entry) -> None:
        try:
            await self._remove(entry)
        except OSError as error:
            self._tools.note(f"{entry.folder}: cannot be removed ({error.strerror}); the next start tries again")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Opening.

    async def _restore(self) -> None:
        await run_blocking(None, sweep_leftovers, self.folder)
        for folder in sorted(self.folder.iterdir()):
            if _FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
                entry = await run_blocking(None, self._load, folder)
                if entry is None or not self._take_back(entry):
                    await run_blocking(None, remove_dir, folder)
        for entry in self.entries():
            await entry.restore()
        await self.trim()

    def _load(self, folder: Path) -> Entry | None:
        """What an earlier process left in a folder, None if that is nothing to go on with."""
        for pattern in _SCRATCH:
            for path in folder.glob(pattern):
                remove_tree(path)
        log = read_log(folder, self.publisher, self.run)
        if log is None or _name_folder(log) != folder.name:
            return None
        if not (folder / SOURCE).exists():
            return Entry(folder, log, tools=self._tools, keeper=self)
        source = self._load_source(folder, log)
        return None if source is None else Entry(folder, log, tools=self._tools, keeper=self, source=source)

    def _load_source(self, folder: Path, log: ManifestLog) -> Source | None:
        try:
            source = Source.from_bytes((folder / SOURCE).read_bytes())
        except ValueError:
            return None
        if not log.ended:
            return None  # published half; whoever publishes does it again
        if not source.is_unchanged():
            self._tools.note(f"{source.path}: changed since it was published; version {log.head.version} is dropped")
            return None
        return source

    def _take_back(self, entry: Entry) -> bool:
        """Whether an entry is the one of its version; an older one already taken gives way."""
        other = self._entries.get(entry.version)
        if other is not None and other.serial > entry.serial:
            return False
        self._entries[entry.version] = entry
        if other is not None:
            remove_dir(other.folder)
        return True


def _name_folder(log: ManifestLog) -> str:
    return f"v{log.head.version}-{log.digest[:16]}"


def _check_settings(run: str, publisher: str, keep: int, max_bytes: int | None) -> None:
    try:
        check_run(run)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_public(publisher)
    if keep < 1:
        raise ConfigError(f"keep = {keep}: at least one version has to be kept")
    if max_bytes is not None and max_bytes < 1:
        raise ConfigError(f"max_bytes = {max_bytes}: must be at least 1")
