"""The bytes of a blob on disk: which shards are there, and where.

    <name>.part       files being filled, allocated whole before the first byte, so a full disk shows at once
    <name>.have       one byte per shard, 1 = verified; written after the shard's bytes
    <name>            the files when all shards are verified and the manifest has ended

Invariants:
- a shard is marked only after its bytes were hashed and found to be those of the manifest;
- while `.have` exists its marks are hashed again when the store is opened: a power cut may keep a mark and lose the
  bytes. It is removed when everything was forced to disk, and then the blob is trusted;
- the last bytes of a shard (`TAIL_BYTES`) are not shown before its hash held, so nobody passes on a whole shard that is
  wrong;
- of a blob whose entry was dropped nothing is written any more; what is open can still be read.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from shoal.files import sync_dir
from shoal.shardcast.errors import ShardError, StaleError
from shoal.shardcast.handles import Handles
from shoal.shardcast.hashing import hash_shards
from shoal.shardcast.layout import Layout, Shard, group_shards
from shoal.shardcast.manifest import DELTA, FULL, ManifestLog
from shoal.shardcast.marks import Marks
from shoal.shardcast.parts import allocate_file, remove_tree, sync_file
from shoal.shardcast.places import Places
from shoal.shardcast.pool import map_ordered, run_blocking
from shoal.shardcast.signal import Signal
from shoal.shardcast.writer import ShardWriter, SpareWriter

__all__ = ["Blob", "ShardWriter", "Tools"]

TAIL_BYTES = 1 << 16
"""How much of a shard is held back until its hash held."""
GROUP_BYTES = 1 << 23
"""About what one thread hashes at a time."""
NUM_AHEAD = 6
"""Groups that are hashed or wait to be, ahead of the one that is looked at."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What all blobs of a store share."""

    pool: Executor
    handles: Handles
    note: Callable[[str], None]


class Blob:
    """The full or the delta blob of an entry. Everything here belongs to the event loop's thread."""

    def __init__(
        self,
        name: str,
        log: ManifestLog,
        folder: Path,
        *,
        tools: Tools,
        grown: Signal,
        reserve: Callable[[], Awaitable[None]],
    ) -> None:
        layout = log.full if name == FULL else log.delta
        assert layout is not None, "a delta blob comes with its record"
        self.name = name
        self.layout: Layout = layout
        self.grown = grown
        """the manifest has more lines"""
        self.settled = False
        """under its final name"""
        self.charged = False
        """counts against the store's limit"""
        self.places = Places()
        self._log = log
        self._entry_folder = folder
        self._tools = tools
        self._reserve = reserve
        self._marks = Marks(folder / f"{name}.have", layout, tools.handles)
        self._stopped = False
        self._prepared = False
        self._preparing = asyncio.Lock()
        self._flush: asyncio.Task[None] | None = None
        self._spare_numbers = itertools.count()

    # What is there.

    @property
    def complete(self) -> bool:
        """Whether all shards are verified."""
        return self._marks.num_missing == 0

    @property
    def num_missing(self) -> int:
        return self._marks.num_missing

    @property
    def have_bytes(self) -> int:
        """Bytes of verified shards."""
        return self._marks.have_bytes

    @property
    def pool(self) -> Executor:
        return self._tools.pool

    @property
    def handles(self) -> Handles:
        return self._tools.handles

    @property
    def folder(self) -> Path:
        """Where the files lie now; the file itself for a delta."""
        return self._entry_folder / (self.name if self.settled else f"{self.name}.part")

    def path_of(self, file: str) -> Path:
        """Where a file of the layout lies now."""
        return self.folder / file if self.name == FULL else self.folder

    def hash_of(self, index: int) -> bytes | None:
        """The hash that a shard must have, None while it is not known."""
        return self._log.hash_of(self.name, index)

    def has(self, index: int) -> bool:
        """Whether a shard is verified."""
        return self._marks[index]

    def missing(self, start: int = 0) -> Iterator[int]:
        """Numbers of the shards that are not verified, as it goes along."""
        return self._marks.missing(start)

    def ready(self, index: int) -> int:
        """Bytes from the start of a shard that may be passed on."""
        size = self.layout.shards[index].size
        return size if self._marks[index] else max(0, min(self.places.visible(index), size - TAIL_BYTES))

    def attempt(self, index: int) -> int:
        """Which writer's bytes these are: another number means that bytes read before are void."""
        return self.places.attempt(index)

    def progress(self, index: int) -> Signal:
        """Notified when `ready` of a shard changes, or its writer gives up."""
        return self.places.progress(index)

    @contextlib.contextmanager
    def locate(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Descriptor, offset and size of a shard, good until the block ends, up to what is `ready` of it."""
        shard = self.layout.shards[index]
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(self.handles.lease(self.path_of(shard.file)))
            except FileNotFoundError:
                raise ShardError(f"shard {index} is not here") from None
            yield descriptor, shard.offset, shard.size

    # Filling it.

    def start(self, index: int, *, spare: bool = False) -> ShardWriter:
        """The writer of a missing shard; there is one at a time, and spares next to it."""
        assert not self._marks[index], f"shard {index} is there"
        if spare:
            path = self._entry_folder / f"{self.name}.spare-{index}-{next(self._spare_numbers)}"
            aside = SpareWriter(self, index, path)
            self.places.add_spare(aside)
            return aside
        writer = ShardWriter(self, index)
        self.places.add(writer)
        return writer

    async def prepare(self) -> Path:
        """Allocate the files, if that is still to be done; where they are."""
        async with self._preparing:
            self._check_live()
            if not self._prepared:
                try:
                    await self._charge()
                    await run_blocking(None, self._allocate)
                except BaseException:
                    await self._give_back()
                    self._check_live()  # a folder that vanished is no fault of the disk
                    raise
                self._prepared = True
        return self.folder

    async def recheck(self) -> int:
        """Hash every shard that is not marked and has a hash, mark what is right; how many are still missing."""
        assert not self.places.occupied, "nobody writes meanwhile"
        known = (self.layout.shards[index] for index in self.missing() if self.hash_of(index) is not None)
        async with contextlib.aclosing(self._hash_right(known)) as right:
            async for shard in right:
                self.mark(shard.index)
        return self.num_missing

    @contextlib.asynccontextmanager
    async def reserve(self) -> AsyncIterator[None]:
        """While the block runs, and from then on if files were taken over, the blob counts against the store's limit;
        OSError if there is no room."""
        charged = self.charged
        await self._charge()
        try:
            yield
        finally:
            self.charged = charged or self._prepared

    async def take_over(self, folder: Path) -> int:
        """Put files that were made here in the place of those being filled, and check them like any others.

        `folder` lies in the entry's and holds the files of the layout; how many shards are still missing.
        """
        assert self.name == FULL and not self.settled and not self.places.occupied, (
            "a blob being filled, by nobody else"
        )
        self._check_live()
        for file in self.layout.files:
            path = folder / file.name
            if not path.is_file() or path.stat().st_size != file.size:
                raise ShardError(f"{file.name}: not there with {file.size} bytes")
        await self._charge()
        self._marks.reset()
        self.handles.forget(self.folder)
        await run_blocking(None, remove_tree, self.folder)
        folder.rename(self.folder)
        self._prepared = True
        return await self.recheck()

    async def settle(self) -> None:
        """Give a complete blob its final name. The files are forced to disk behind it: see `.have` above."""
        assert self.complete, "all shards are verified"
        assert self.name == DELTA or self._log.ended, "the manifest has ended"
        await self.prepare()  # a blob without a single byte has been written to by nobody
        if self.settled:
            return
        part = self.folder
        part.rename(self._entry_folder / self.name)
        self.settled = True
        self.handles.forget(part)
        self._flush = asyncio.create_task(self._flush_files())

    async def wait_flushed(self) -> None:
        """Until nothing is being forced to disk any more."""
        if self._flush is not None:
            await asyncio.shield(self._flush)

    async def restore(self) -> None:
        """Take back what an earlier process left."""
        self.settled = self._is_whole()
        marked = self._marks.read()
        if marked is None and self.settled:
            self._marks.count_all()
        known = (self.layout.shards[index] for index in marked or [] if self.hash_of(index) is not None)
        async with contextlib.aclosing(self._hash_right(known)) as right:
            async for shard in right:
                self._marks.count(shard)
        if self.settled and not self.complete:
            self.folder.rename(self._entry_folder / f"{self.name}.part")
            self.settled = False
        self._prepared = self.settled
        self.charged = self.folder.exists()
        if self.settled and marked is not None:
            self._flush = asyncio.create_task(self._flush_files())
        elif marked is not None:
            self._marks.write()  # without those that did not hold

    def trust_part(self) -> None:
        """Mark all shards of a file that this process wrote and hashed itself."""
        self._marks.count_all()
        self._marks.write()
        self._prepared = self.charged = True

    def stop_writers(self) -> None:
        """End everyone who writes, for good: the entry is dropped."""
        self._stopped = True
        self.places.stop_all()

    def mark(self, index: int) -> None:
        """A shard's bytes are in place and verified."""
        self._marks.mark(self.layout.shards[index])
        self.places.notify(index)

    # On disk.

    def _check_live(self) -> None:
        if self._stopped:
            raise StaleError("the version was dropped")

    async def _charge(self) -> None:
        """Count against the store's limit from now on, if that leaves room."""
        charged, self.charged = self.charged, True
        try:
            await self._reserve()
        except BaseException:
            self.charged = charged
            raise

    async def _give_back(self) -> None:
        """After a failed allocation: let go of the space, unless there are verified bytes in it."""
        if self._marks.untouched:
            await run_blocking(None, remove_tree, self.folder)
            self._marks.remove()
            self.charged = False

    def _allocate(self) -> None:
        if self.name == FULL:
            self.folder.mkdir(exist_ok=True)
        for file in self.layout.files:
            allocate_file(self.path_of(file.name), file.size)
        self._marks.write()

    def _is_whole(self) -> bool:
        """Whether the files are under their final names with the right sizes; others are removed."""
        final = self._entry_folder / self.name
        if not final.exists():
            return False
        for file in self.layout.files:
            path = final / file.name if self.name == FULL else final
            if not path.is_file() or path.stat().st_size != file.size:
                remove_tree(final)
                return False
        return True

    async def _hash_right(self, shards: Iterator[Shard]) -> AsyncGenerator[Shard, None]:
        """Those of the shards whose bytes on disk have the hash of the manifest."""
        groups = map_ordered(self.pool, self._hash_group, group_shards(shards, GROUP_BYTES), NUM_AHEAD)
        async with contextlib.aclosing(groups):
            async for group, hashes in groups:
                for shard, found in zip(group, hashes, strict=True):
                    if found is not None and found == self.hash_of(shard.index):
                        yield shard

    def _hash_group(self, group: list[Shard]) -> list[bytes] | list[None]:
        try:
            return hash_shards(self.path_of(group[0].file), group)
        except (ShardError, FileNotFoundError):
            return [None] * len(group)

    async def _flush_files(self) -> None:
        try:
            await run_blocking(None, self._sync_files)
        except OSError as error:
            self._tools.note(
                f"{self.folder}: not forced to disk ({error.strerror}); it is checked again at the next start"
            )
            return
        self._marks.remove()

    def _sync_files(self) -> None:
        for file in self.layout.files:
            sync_file(self.path_of(file.name))
        if self.name == FULL:
            sync_dir(self.folder)
        sync_dir(self._entry_folder)
