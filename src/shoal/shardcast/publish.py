"""The origin: turns a checkpoint into a version that others can fetch while it is still being hashed.

    scan -> head (the version is there) -> hashes, a few at a time \
                                        -> delta or no_delta        > end -> trim

Invariants:
- the files are read once and never copied; memory does not depend on their size;
- the same content under the same version again is the same entry; other content replaces it, with a larger serial;
- what could not be published to its end (an error, a cancellation, a kill) is dropped, and leaves no trace after the
  next opening of the store;
- files that changed while they were read, or cannot be read, are a `ConfigError`, and their version never ends;
- whatever goes wrong with a delta costs the delta, not the version.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Literal

from shoal.errors import ConfigError
from shoal.files import write_atomic
from shoal.keys import Key
from shoal.shardcast.encode import DeltaJob, make_delta
from shoal.shardcast.entry import SOURCE, Entry
from shoal.shardcast.errors import ShardError, StaleError
from shoal.shardcast.hashing import HASH_BYTES, hash_root, hash_shards
from shoal.shardcast.layout import File, Layout, Shard, group_shards
from shoal.shardcast.pool import map_ordered, outlast, run_blocking
from shoal.shardcast.records import (
    MAX_FILES,
    MAX_LINE_BYTES,
    MAX_NUMBER,
    MAX_SHARD_BYTES,
    MAX_SHARDS,
    MAX_TOTAL_BYTES,
    MIN_SHARD_BYTES,
    Delta,
    Hashes,
    Head,
    NoDelta,
    Record,
    sign_record,
)
from shoal.shardcast.source import Source, scan_source
from shoal.shardcast.store import Store

SHARD_BYTES = 8 << 20
ANCHOR_EVERY = 8
FLUSH_BYTES = 64 << 20
"""Hashes of so many bytes are signed together, at most."""
FLUSH_S = 0.25
"""And are not kept back longer than this."""
MAX_LINE_HASHES = 3800
"""Hashes in one line; as many as this fit into it."""
GROUP_BYTES = 1 << 23
NUM_AHEAD = 6


class Origin:
    """Publishes into a store, one version at a time."""

    def __init__(
        self,
        store: Store,
        key: Key,
        *,
        shard_size: int = SHARD_BYTES,
        anchor_every: int = ANCHOR_EVERY,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if key.public != store.publisher:
            raise ConfigError(f"the key {key.public} is not the publisher of this store, {store.publisher}")
        if not MIN_SHARD_BYTES <= shard_size <= MAX_SHARD_BYTES:
            raise ConfigError(f"shard_size = {shard_size}: must be from {MIN_SHARD_BYTES} to {MAX_SHARD_BYTES}")
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
        parent: int | Literal["newest"] | None = "newest",
        anchor: bool | None = None,
    ) -> Entry:
        """Publish a folder of files or a file, and return when all of its manifest is written.

        A delta is made against `parent`, by default the newest complete version below this one. An anchor is a version
        that relays hold in full: by default every few versions, counted by their numbers, and those without a parent.
        """
        async with self._publishing:
            source = await run_blocking(None, _open_source, path)
            self._check_size(source, version)
            known = await self._compare(source, version)
            if isinstance(known, Entry):
                return known
            base = self._choose_parent(version, parent)
            with contextlib.nullcontext() if base is None else base.hold():
                entry = await self._add_entry(source, version, base, anchor)
                with entry.hold():
                    await self._fill_entry(entry, base, known)
            await self.store.trim()
            return entry

    def _check_size(self, source: Source, version: int) -> None:
        if not 0 <= version <= MAX_NUMBER:
            raise ConfigError(f"version = {version}: must be a whole number from 0 to {MAX_NUMBER}")
        layout = _lay_out(source, self._shard_size)
        if layout.total == 0:
            raise ConfigError(f"{source.path}: holds no bytes, there is nothing to publish")
        if len(layout.files) > MAX_FILES:
            raise ConfigError(f"{source.path}: {len(layout.files)} files, more than the {MAX_FILES} allowed")
        if layout.total > MAX_TOTAL_BYTES:
            raise ConfigError(f"{source.path}: {layout.total} bytes, more than the {MAX_TOTAL_BYTES} allowed")
        if len(layout.shards) > MAX_SHARDS:
            raise ConfigError(f"{source.path}: more than {MAX_SHARDS} shards; choose a larger shard_size")

    async def _compare(self, source: Source, version: int) -> Entry | bytes:
        """The entry that has this content already, or else the hashes found while looking, if any."""
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
        # The same bytes in another place: serve them from there, the old ones may be about to go.
        await run_blocking(None, write_atomic, held.folder / SOURCE, source.to_bytes())
        held.point_to(source)
        return held

    def _choose_parent(self, version: int, parent: int | Literal["newest"] | None) -> Entry | None:
        if parent is None:
            return None
        if parent == "newest":
            older = [entry for entry in self.store.entries() if entry.version < version and entry.complete]
            return older[-1] if older else None
        entry = self.store.find(parent)
        if parent >= version or entry is None or not entry.complete:
            raise ConfigError(f"parent = {parent}: must be a complete version of this store below {version}")
        return entry

    async def _add_entry(self, source: Source, version: int, base: Entry | None, anchor: bool | None) -> Entry:
        if anchor is None:
            # Also if numbers are left out: each step over a multiple of `anchor_every` gives one.
            anchor = base is None or version // self._anchor_every > base.version // self._anchor_every
        line = sign_record(self._key, "", 0, self._make_head(source, version, base, anchor))
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"{source.path}: so many files with such long names do not fit into a manifest")
        try:
            return await self.store.add_source(line, source)
        except StaleError as error:
            raise ConfigError(f"version = {version}: {error}") from None

    def _make_head(self, source: Source, version: int, base: Entry | None, anchor: bool) -> Head:
        serials = [entry.serial for entry in self.store.entries()]
        self._last_serial = max(self._clock_ns(), self._last_serial + 1, max(serials, default=0) + 1)
        files = _lay_out(source, self._shard_size).files
        parent = None if base is None else base.version
        return Head(self.store.run, version, self._last_serial, self._shard_size, files, parent, anchor)

    async def _fill_entry(self, entry: Entry, base: Entry | None, known: bytes) -> None:
        """Everything after the head; an entry that cannot be finished is dropped."""
        source = entry.source
        assert source is not None, "it was added with one"
        try:
            await self._append_blobs(entry, base, known)
            if not await run_blocking(None, source.is_unchanged):
                raise _say_changed(source)
            await self._append(entry, entry.log.compute_end())
        except BaseException as error:
            await self.store.drop(entry)
            if isinstance(error, StaleError):  # whoever was sending from it saw the change first
                raise _say_changed(source) from None
            raise

    async def _append_blobs(self, entry: Entry, base: Entry | None, known: bytes) -> None:
        if base is None:
            await self._append_hashes(entry, known)
            return
        job = DeltaJob(base, entry)
        adding = asyncio.create_task(self._append_delta(entry, job))
        try:
            await self._append_hashes(entry, known)
            # Shielded: a cancellation has to reach us, who stop the job, not the task that waits for it.
            await asyncio.shield(adding)
        finally:
            job.stop()
            await outlast(adding)

    async def _append_hashes(self, entry: Entry, known: bytes) -> None:
        """The hashes of all shards, signed in portions as they come."""
        source, layout = entry.source, entry.log.full
        assert source is not None
        waiting: list[bytes] = []
        filled, flushed_at = 0, time.monotonic()
        async with contextlib.aclosing(self._hash_source(source, layout, known)) as hashes:
            async for shard, part in hashes:
                waiting.append(part)
                filled += shard.size
                late = time.monotonic() - flushed_at >= FLUSH_S
                if late or filled >= FLUSH_BYTES or len(waiting) >= MAX_LINE_HASHES:
                    await self._append(entry, Hashes(entry.log.num_hashes, tuple(waiting)))
                    waiting, filled, flushed_at = [], 0, time.monotonic()
        if waiting:
            await self._append(entry, Hashes(entry.log.num_hashes, tuple(waiting)))

    async def _append_delta(self, entry: Entry, job: DeltaJob) -> None:
        """The word about the delta as soon as it is known: nobody waits for one that does not come."""
        result = await make_delta(job)
        if job.stopped:
            return
        if isinstance(result, Delta) and len(result.hashes) > MAX_LINE_HASHES:
            result = NoDelta("more shards than one line can name")
            await run_blocking(None, job.path.unlink)
        await self._append(entry, result)
        if isinstance(result, NoDelta):
            self.store.note(f"version {entry.version} has no delta: {result.reason}")
        elif entry.delta is not None:
            entry.delta.trust_part()
            await entry.delta.settle()

    async def _append(self, entry: Entry, record: Record) -> None:
        await entry.append(sign_record(self._key, entry.digest, len(entry.log.lines), record))

    async def _hash_source(
        self, source: Source, layout: Layout, known: bytes
    ) -> AsyncGenerator[tuple[Shard, bytes], None]:
        """Shards with their hashes, in order; those in `known` are taken as they are."""
        folder = source.folder
        num_known = len(known) // HASH_BYTES
        for index in range(num_known):
            yield layout.shards[index], known[index * HASH_BYTES : (index + 1) * HASH_BYTES]
        shards = (layout.shards[index] for index in range(num_known, len(layout.shards)))

        def hash_group(group: list[Shard]) -> list[bytes]:
            return hash_shards(folder / group[0].file, group)

        groups = map_ordered(self.store.pool, hash_group, group_shards(shards, GROUP_BYTES), NUM_AHEAD)
        async with contextlib.aclosing(groups):
            try:
                async for group, hashes in groups:
                    for shard, part in zip(group, hashes, strict=True):
                        yield shard, part
            except (ShardError, FileNotFoundError):
                raise _say_changed(source) from None
            except OSError as error:
                raise _say_unreadable(source.path, error) from None


def _open_source(path: Path) -> Source:
    """What is to be published, every file of it open to us; ConfigError with the reason if it is not."""
    source = scan_source(path)
    for name in source.stamps:
        try:
            os.close(os.open(source.folder / name, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise _say_unreadable(source.folder / name, error) from None
    return source


def _say_unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{error.filename or path}: cannot be read ({error.strerror})")


def _say_changed(source: Source) -> ConfigError:
    return ConfigError(f"{source.path}: changed while it was being published; publish it again when it is complete")


def _lay_out(source: Source, shard_size: int) -> Layout:
    return Layout((File(name, stamp.size) for name, stamp in source.stamps.items()), shard_size)
