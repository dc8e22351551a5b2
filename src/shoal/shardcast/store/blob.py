"""The bytes of a blob on disk: which shards are verified, and where they are.

    <name>.part       files being filled, allocated completely before the first byte, so a full disk shows at once
    <name>.have       one byte per shard, 1 = verified; written after the shard's bytes
    <name>            the files when all shards are verified and the manifest is complete

Invariants:
- a shard is marked only after its bytes were hashed and found to match the manifest;
- while `.have` exists, marked shards are hashed again when the store is opened: a power cut may keep a mark and lose
  the bytes. It is removed after everything was synced to disk, and then the blob is trusted;
- the last bytes of a shard (`TAIL_BYTES`) are not readable before its hash is verified, so nobody relays a whole shard
  that is wrong;
- nothing is written to a blob whose entry was dropped; open files can still be read.
"""

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.shardcast.errors import ShardError, StaleError
from shoal.shardcast.format.hashing import hash_ordered
from shoal.shardcast.format.layout import Shard, ShardLayout
from shoal.shardcast.format.manifest import DELTA, FULL
from shoal.shardcast.store.open_files import OpenFileCache
from shoal.shardcast.store.writer import ShardClaims, ShardWriter, SpareWriter, allocate_file, remove_tree, write_at
from shoal.util.aio import run_blocking
from shoal.util.files import sync_path

if TYPE_CHECKING:
    from shoal.shardcast.store.store import StoredVersion, VersionStore

__all__ = ["Blob", "ShardWriter"]

logger = logging.getLogger(__name__)


class VerifiedShards:
    """One byte per shard. Memory holds the current state; the file lists what the next process must check."""

    def __init__(self, path: Path, layout: ShardLayout, open_files: OpenFileCache) -> None:
        self._path = path
        self._layout = layout
        self._open_files = open_files
        self._have = bytearray(len(layout.shards))
        self.num_missing = len(layout.shards)
        self.have_bytes = 0

    def __getitem__(self, index: int) -> bool:
        return bool(self._have[index])

    def missing(self, start: int = 0) -> Iterator[int]:
        """Yield the numbers of unmarked shards, evaluated lazily."""
        index = self._have.find(0, start)
        while index >= 0:
            yield index
            index = self._have.find(0, index + 1)

    def mark(self, shard: Shard) -> None:
        """Mark a shard in the file, then here."""
        with self._open_files.lease(self._path, os.O_RDWR | os.O_NOFOLLOW) as descriptor:
            os.pwrite(descriptor, b"\1", shard.index)
        self.count(shard)

    def count(self, shard: Shard) -> None:
        """Mark a shard in memory; the file already has it."""
        if not self._have[shard.index]:
            self._have[shard.index] = 1
            self.num_missing -= 1
            self.have_bytes += shard.size

    def count_all(self) -> None:
        """Mark every shard in memory."""
        self._have[:] = b"\1" * len(self._have)
        self.num_missing, self.have_bytes = 0, self._layout.total

    def reset(self) -> None:
        """Clear all marks, in the file first."""
        self._have[:] = bytes(len(self._have))
        self.num_missing, self.have_bytes = len(self._have), 0
        self.write()

    def write(self) -> None:
        """Write the marks to the file; in place, so that a kill in the middle loses no mark."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            write_at(descriptor, memoryview(self._have), 0)
            os.ftruncate(descriptor, len(self._have))
        finally:
            os.close(descriptor)

    def read(self) -> list[int] | None:
        """The shards marked in the file; None if there is no file. Other contents are ignored."""
        try:
            with self._path.open("rb") as file:
                marks = file.read(len(self._have))
        except FileNotFoundError:
            return None
        return [index for index, mark in enumerate(marks) if mark == 1]

    def remove(self) -> None:
        """Remove the file, if there is one."""
        self._open_files.forget(self._path)
        self._path.unlink(missing_ok=True)


TAIL_BYTES = 1 << 16
"""How many bytes of a shard are held back until its hash is verified."""


class Blob:
    """The full or the delta blob of an entry. Used only from the event loop's thread."""

    def __init__(self, name: str, entry: "StoredVersion", store: "VersionStore") -> None:
        layout = entry.log.full if name == FULL else entry.log.delta
        assert layout is not None, "a delta blob requires its record"
        self.name = name
        self.entry = entry
        self.layout: ShardLayout = layout
        self.settled = False
        """whether it has its final name"""
        self.charged = False
        """whether it counts towards the store's limit"""
        self.claims = ShardClaims()
        self.pool, self.open_files = store.pool, store.open_files
        self._store = store
        self._verified = VerifiedShards(entry.folder / f"{name}.have", layout, store.open_files)
        self._stopped = False
        self._prepared = False
        self._preparing = asyncio.Lock()
        self._flush: asyncio.Task[None] | None = None
        self._spare_numbers = itertools.count()

    # Contents

    @property
    def complete(self) -> bool:
        """Whether all shards are verified."""
        return self._verified.num_missing == 0

    @property
    def num_missing(self) -> int:
        return self._verified.num_missing

    @property
    def have_bytes(self) -> int:
        """Bytes of verified shards."""
        return self._verified.have_bytes

    @property
    def folder(self) -> Path:
        """The current folder of the files; for a delta the file itself."""
        return self.entry.folder / (self.name if self.settled else f"{self.name}.part")

    def path_of(self, file: str) -> Path:
        """The current path of a file of the layout."""
        return self.folder / file if self.name == FULL else self.folder

    def hash_of(self, index: int) -> bytes | None:
        """The expected hash of a shard; None while it is unknown."""
        return self.entry.log.hash_of(self.name, index)

    def has(self, index: int) -> bool:
        """Whether a shard is verified."""
        return self._verified[index]

    def missing(self, start: int = 0) -> Iterator[int]:
        """Yield the numbers of unverified shards, evaluated lazily."""
        return self._verified.missing(start)

    def ready(self, index: int) -> int:
        """Number of bytes from the start of a shard that may be sent to others."""
        size = self.layout.shards[index].size
        return size if self._verified[index] else max(0, min(self.claims.visible(index), size - TAIL_BYTES))

    @contextlib.contextmanager
    def locate(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Descriptor, offset and size of what is `ready` of a shard, valid until the block ends."""
        shard = self.layout.shards[index]
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(self.open_files.lease(self.path_of(shard.file)))
            except FileNotFoundError:
                raise ShardError(f"shard {index} is not available") from None
            yield descriptor, shard.offset, shard.size

    # Writing

    def start(self, index: int, *, spare: bool = False) -> ShardWriter:
        """A writer for a missing shard; there is one at a time, and spares next to it."""
        assert not self._verified[index], f"shard {index} is already verified"
        if spare:
            path = self.entry.folder / f"{self.name}.spare-{index}-{next(self._spare_numbers)}"
            writer: ShardWriter = SpareWriter(self, index, path)
        else:
            writer = ShardWriter(self, index)
        self.claims.add(writer)
        return writer

    async def prepare(self) -> Path:
        """Allocate the files if necessary; returns their path."""
        async with self._preparing:
            self._check_live()
            if not self._prepared:
                try:
                    await self._charge()
                    await run_blocking(None, self._allocate)
                except BaseException:
                    await self._release_space()
                    self._check_live()  # a folder that was deleted is not a disk error
                    raise
                self._prepared = True
        return self.folder

    async def recheck(self) -> int:
        """Hash every unmarked shard with a known hash and mark the correct ones; returns how many are still missing."""
        assert not self.claims.occupied, "there must be no writer"
        async with contextlib.aclosing(self._hash_right(self.missing())) as right:
            async for shard in right:
                self.mark(shard.index)
        return self.num_missing

    @contextlib.asynccontextmanager
    async def reserve(self) -> AsyncIterator[None]:
        """Count the blob against the store's limit while the block runs, and afterwards if files were taken over.

        Raises OSError if there is no space.
        """
        charged = self.charged
        await self._charge()
        try:
            yield
        finally:
            self.charged = charged or self._prepared

    async def adopt_files(self, folder: Path) -> int:
        """Replace the files being filled with locally built ones, and check them like any others.

        `folder` is inside the entry's folder and holds the files of the layout. Returns how many shards are still
        missing.
        """
        assert self.name == FULL and not self.settled and not self.claims.occupied, (
            "the blob must be incomplete and have no writer"
        )
        self._check_live()
        for file in self.layout.files:
            path = folder / file.name
            if not path.is_file() or path.stat().st_size != file.size:
                raise ShardError(f"{file.name}: missing, or not {file.size} bytes long")
        await self._charge()
        self._verified.reset()
        self.open_files.forget(self.folder)
        await run_blocking(None, remove_tree, self.folder)
        folder.rename(self.folder)
        self._prepared = True
        return await self.recheck()

    async def settle(self) -> None:
        """Move a complete blob to its final name. The files are synced to disk in the background: see `.have` above."""
        assert self.complete, "all shards must be verified"
        assert self.name == DELTA or self.entry.log.ended, "the manifest must be complete"
        await self.prepare()  # nothing has been written yet for a blob without a single byte
        if self.settled:
            return
        part = self.folder
        part.rename(self.entry.folder / self.name)
        self.settled = True
        self.open_files.forget(part)
        self._flush = asyncio.create_task(self._flush_files())

    async def wait_flushed(self) -> None:
        """Wait until the sync to disk has finished."""
        if self._flush is not None:
            await asyncio.shield(self._flush)

    async def restore(self) -> None:
        """Restore what an earlier process left."""
        self.settled = self._is_whole()
        marked = self._verified.read()
        if marked is None and self.settled:
            self._verified.count_all()
        async with contextlib.aclosing(self._hash_right(marked or [])) as right:
            async for shard in right:
                self._verified.count(shard)
        if self.settled and not self.complete:
            self.folder.rename(self.entry.folder / f"{self.name}.part")
            self.settled = False
        self._prepared = self.settled
        self.charged = self.folder.exists()
        if self.settled and marked is not None:
            self._flush = asyncio.create_task(self._flush_files())
        elif marked is not None:
            self._verified.write()  # without those whose hash was wrong

    def trust_part(self) -> None:
        """Mark all shards of a file that this process wrote and hashed itself."""
        self._verified.count_all()
        self._verified.write()
        self._prepared = self.charged = True

    def stop_writers(self) -> None:
        """Stop all writers for good: the entry is dropped."""
        self._stopped = True
        self.claims.stop_all()

    def mark(self, index: int) -> None:
        """Mark a shard whose bytes are in place and verified."""
        self._verified.mark(self.layout.shards[index])
        self.claims.notify(index)

    # Files

    def _check_live(self) -> None:
        if self._stopped:
            raise StaleError("the version was dropped")

    async def _charge(self) -> None:
        """Count against the store's limit from now on, if there is space."""
        charged, self.charged = self.charged, True
        try:
            await self._store.make_room(self.entry)
        except BaseException:
            self.charged = charged
            raise

    async def _release_space(self) -> None:
        """Release the space after a failed allocation, unless there are verified bytes in it."""
        if self.num_missing == len(self.layout.shards):
            await run_blocking(None, remove_tree, self.folder)
            self._verified.remove()
            self.charged = False

    def _allocate(self) -> None:
        if self.name == FULL:
            self.folder.mkdir(exist_ok=True)
        for file in self.layout.files:
            allocate_file(self.path_of(file.name), file.size)
        self._verified.write()

    def _is_whole(self) -> bool:
        """Whether the files are under their final names with the right sizes; others are removed."""
        final = self.entry.folder / self.name
        if not final.exists():
            return False
        for file in self.layout.files:
            path = final / file.name if self.name == FULL else final
            if not path.is_file() or path.stat().st_size != file.size:
                remove_tree(final)
                return False
        return True

    async def _hash_right(self, indices: Iterable[int]) -> AsyncGenerator[Shard, None]:
        """Yield the shards whose bytes on disk match the manifest's hash."""
        known = (self.layout.shards[index] for index in indices if self.hash_of(index) is not None)
        async with contextlib.aclosing(hash_ordered(self.pool, self.path_of, known)) as hashed:
            async for shard, found in hashed:
                if found == self.hash_of(shard.index):
                    yield shard

    async def _flush_files(self) -> None:
        try:
            await run_blocking(None, self._sync_files)
        except OSError as error:
            logger.warning(f"{self.folder}: not synced to disk ({error.strerror}); the next start verifies it")
            return
        self._verified.remove()

    def _sync_files(self) -> None:
        for file in self.layout.files:
            sync_path(self.path_of(file.name))
        if self.name == FULL:
            sync_path(self.folder)
        sync_path(self.entry.folder)
