"""One version in a store: its manifest, its blobs, and who is using them.

    new -> growing -> ended -> complete
      any of these -> gone (found no more) -> removed when the last one who holds it lets go

Invariant: the manifest's file is the log; a line counts there with its newline, and is written before it counts here.
"""

import contextlib
import os
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Protocol

from shoal.files import sync_dir
from shoal.shardcast.blob import Blob, Tools
from shoal.shardcast.errors import ManifestError, StaleError
from shoal.shardcast.manifest import DELTA, FULL, ManifestLog
from shoal.shardcast.parts import sync_file, write_at
from shoal.shardcast.pool import run_blocking
from shoal.shardcast.records import MAX_LINE_BYTES, Delta, End
from shoal.shardcast.signal import Signal
from shoal.shardcast.source import Source, SourceBlob

MANIFEST = "manifest.ndjson"
SOURCE = "source.json"


class Keeper(Protocol):
    """What an entry asks of its store."""

    changed: Signal

    def make_room(self, entry: "Entry") -> Awaitable[None]: ...
    def let_go(self, entry: "Entry") -> None: ...
    def lose_source(self, entry: "Entry") -> None: ...


class Entry:
    """One version. Everything here belongs to the event loop's thread."""

    def __init__(
        self, folder: Path, log: ManifestLog, *, tools: Tools, keeper: Keeper, source: Source | None = None
    ) -> None:
        self.folder = folder
        self.log = log
        self.grown = Signal()
        """the log has more lines, or the entry is gone"""
        self.gone = False
        self.delta: Blob | None = None
        self._tools = tools
        self._keeper = keeper
        self._num_holds = 0
        log.lines.keep_in(folder / MANIFEST)
        self.full = self._make_full(source)
        if log.delta is not None:
            self.delta = self._make_blob(DELTA)

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
    def source(self) -> Source | None:
        """Where an origin's files are; None in the store of a relay or client."""
        return self.full.source if isinstance(self.full, SourceBlob) else None

    @property
    def complete(self) -> bool:
        """Whether the log has ended and every shard of the full blob is verified."""
        return self.log.ended and self.full.complete

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

    async def append(self, line: bytes) -> None:
        """Verify the next line and keep it; ManifestError changes nothing. The last line is on disk on return."""
        self._check_live()
        checked = self.log.check(line)
        # On disk first: a line in memory alone would be a gap on disk after the next one.
        self._write_line(checked.line)
        self.log.commit(checked)
        if isinstance(checked.record, Delta):
            self.delta = self._make_blob(DELTA)
        self.grown.notify()
        self._keeper.changed.notify()
        if isinstance(checked.record, End):
            try:
                await run_blocking(None, self._sync_manifest)
            except FileNotFoundError:
                self._check_live()
                raise

    def read_lines(self, first: int, num_bytes: int) -> tuple[bytes, int]:
        """Lines of the manifest as they are sent, and the number of the next; none once the entry is gone."""
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
                self._keeper.let_go(self)

    async def restore(self) -> None:
        """Take back what an earlier process left of the blobs, and finish what it had all bytes of."""
        for blob in self.blobs:
            await blob.restore()
            if blob.complete and (blob.name == DELTA or self.log.ended):
                await blob.settle()

    def end(self) -> None:
        """Be gone: no more lines, no more shards, and whoever waits for any is told."""
        self.gone = True
        for blob in self.blobs:
            blob.stop_writers()
        self.grown.notify()

    async def wait_flushed(self) -> None:
        """Until nothing of it is being forced to disk any more."""
        for blob in self.blobs:
            await blob.wait_flushed()

    def point_to(self, source: Source) -> None:
        """Serve the same content from another place."""
        assert isinstance(self.full, SourceBlob), "an origin's entry"
        self._tools.handles.forget(self.full.folder)
        self.full.point_to(source, lambda: self._keeper.lose_source(self))

    def _check_live(self) -> None:
        if self.gone:
            raise StaleError(f"version {self.version} was dropped")

    def _make_full(self, source: Source | None) -> Blob:
        if source is None:
            return self._make_blob(FULL)
        blob = self._make_blob(FULL, SourceBlob)
        assert isinstance(blob, SourceBlob)
        blob.point_to(source, lambda: self._keeper.lose_source(self))
        return blob

    def _make_blob(self, name: str, kind: type[Blob] = Blob) -> Blob:
        return kind(
            name,
            self.log,
            self.folder,
            tools=self._tools,
            grown=self.grown,
            reserve=lambda: self._keeper.make_room(self),
        )

    def _write_line(self, line: bytes) -> None:
        data, place = line + b"\n", self.log.lines.num_bytes
        with self._tools.handles.lease(self.folder / MANIFEST, os.O_RDWR | os.O_NOFOLLOW) as descriptor:
            try:
                write_at(descriptor, memoryview(data), place)
            except OSError:
                os.ftruncate(descriptor, place)
                raise

    def _sync_manifest(self) -> None:
        sync_file(self.folder / MANIFEST)
        sync_dir(self.folder)
        sync_dir(self.folder.parent)


def read_log(folder: Path, publisher: str, run: str) -> ManifestLog | None:
    """The log that is kept in a folder, its torn end cut off; None if not even its head is there."""
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
