"""Writing one shard: bytes go to disk and through the hash as they arrive, and count when the hash matches.

    start -> receive ... -> finish     the shard is verified and stays
                         -> abort      its bytes are discarded; readers of them stop

`ShardClaims` tracks who writes which shard of a blob. A shard has one writer at a time; spares write to a separate
file, and become the writer only to put verified bytes in place. State is kept only for shards that are being written,
were written, or are waited for.

Races, and how they are resolved:
- a thread may still be writing for a writer that was aborted: the next writer of the shard waits for it, so no late
  byte overwrites a verified shard;
- two writers of one shard would write to the same place: the second one, a spare, writes to its own file and copies the
  bytes over only when they are verified;
- a thread adds bytes while readers on the event loop check how many there are: it adds first and then checks whether
  anyone looked. Readers set `_watched` before they look, so either they see the bytes or the thread sees them.
"""

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from blake3 import blake3

from shoal.shardcast.errors import ShardError, StaleError
from shoal.shardcast.format.hashing import own_buffer
from shoal.util.aio import RECEIVERS, Notifier, run_blocking

if TYPE_CHECKING:
    from shoal.shardcast.store.blob import Blob


def allocate_file(path: Path, size: int) -> None:
    """Create a file with all blocks allocated if the file system supports it; existing bytes are kept."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(descriptor, size)
        if size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Remove one of our folders or a file, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Write a whole buffer at an offset in a file."""
    while view:
        length = os.pwrite(descriptor, view, offset)
        view, offset = view[length:], offset + length


def copy_range(source: int, target: int, offset: int, size: int) -> None:
    """Copy the first `size` bytes of one file to an offset in another."""
    view = own_buffer()
    done = 0
    while done < size:
        length = os.preadv(source, [view[: min(len(view), size - done)]], done)
        if length == 0:
            raise ShardError("the spare file became shorter")
        write_at(target, view[:length], offset + done)
        done += length


class ShardClaims:
    """The writers of one blob."""

    def __init__(self) -> None:
        self._writers: dict[int, ShardWriter] = {}
        self._waiting: set[ShardWriter] = set()
        """spares, and writers that wait for a spare to finish"""
        self._draining: set[ShardWriter] = set()
        self._attempts: dict[int, int] = {}
        self._signals: WeakValueDictionary[int, Notifier] = WeakValueDictionary()

    @property
    def occupied(self) -> bool:
        """Whether any shard is being written."""
        return bool(self._writers)

    def visible(self, index: int) -> int:
        """Bytes of a shard that its writer put in place."""
        writer = self._writers.get(index)
        return 0 if writer is None else writer.visible

    def attempt(self, index: int) -> int:
        """How many writers a shard has had: if it changes, bytes read before are invalid."""
        return self._attempts.get(index, 0)

    def progress(self, index: int) -> Notifier:
        """Notified when `Blob.ready` of a shard changes, or its writer gives up; exists as long as it is referenced."""
        signal = self._signals.get(index)
        if signal is None:
            signal = self._signals[index] = Notifier()
        return signal

    def notify(self, index: int) -> None:
        """Wake all waiters for a shard."""
        signal = self._signals.get(index)
        if signal is not None:
            signal.notify()

    def add(self, writer: "ShardWriter") -> None:
        """Add a writer. It owns the place at once, or must `claim` it from a spare that is about to finish.

        A spare writes to a separate file, and owns no place before it is verified (`take`).
        """
        if writer.spare:
            self._waiting.add(writer)
            return
        other = self._writers.setdefault(writer.index, writer)
        assert other is writer or other.spare, f"shard {writer.index} has a writer"
        self._attempts[writer.index] = self.attempt(writer.index) + 1
        if other is not writer:
            self._waiting.add(writer)

    async def claim(self, writer: "ShardWriter") -> None:
        """Claim the place once no spare owns it, unless the writer has ended by then."""
        while self._writers.get(writer.index, writer) is not writer and not writer.over:
            await self.progress(writer.index).wait()
        if not writer.over:
            self._waiting.discard(writer)
            self._writers[writer.index] = writer

    def take(self, spare: "ShardWriter") -> None:
        """Make a spare with verified bytes the writer; the previous writer ends."""
        if spare.index in self._writers:
            self._writers[spare.index].abort()
        self._attempts[spare.index] = self.attempt(spare.index) + 1
        self._writers[spare.index] = spare

    def leave(self, writer: "ShardWriter", *, busy: bool) -> None:
        """Remove a writer that finished or gave up; if a thread is still `busy` for it, it is removed again later."""
        if self._writers.get(writer.index) is writer:
            del self._writers[writer.index]
        self._waiting.discard(writer)
        (self._draining.add if busy else self._draining.discard)(writer)
        self.notify(writer.index)

    async def wait_drained(self, writer: "ShardWriter") -> None:
        """Wait until no thread writes to the shard for a previous writer that gave up."""
        while any(other.index == writer.index and other is not writer for other in self._draining):
            await self.progress(writer.index).wait()

    def stop_all(self) -> None:
        """End all writers."""
        for writer in [*self._writers.values(), *self._waiting]:
            writer.abort()


Pull = Callable[[memoryview], int | None]
"""Puts bytes at the start of a view and returns how many; None: none at the moment, 0: no more will come."""


class ShardWriter:
    """The only writer of a shard. Leaving its `with` block aborts it unless it has finished."""

    spare = False

    def __init__(self, blob: "Blob", index: int) -> None:
        self._blob = blob
        self._hasher = blake3()
        self._resources = ExitStack()
        self._descriptor = -1
        self._busy = False
        self._watched = True
        """whether anyone may wait for more bytes: someone looked since the last notification, or before the writer"""
        self.over = False
        """whether it accepts no more bytes"""
        self.shard = blob.layout.shards[index]
        self.index = index
        self.size = self.shard.size
        self.written = 0

    @property
    def visible(self) -> int:
        """Bytes that are in the shard's final place. Waiters for more bytes check this first."""
        self._watched = True
        return self.written

    async def receive(self, pull: Pull) -> None:
        """Write what `pull` returns until all bytes have arrived or no more come, in one dedicated thread.

        `pull` must return within some milliseconds, with or without bytes: in between the thread checks whether it is
        still needed. After this returns or raises, cancelled or not, `pull` is not called any more.
        """
        assert not self._busy, "one write at a time"
        self._check_open()
        with self._work():
            if self._descriptor < 0:
                self._descriptor = await self._open_target()
                self._check_open()
            halt = threading.Event()
            loop = asyncio.get_running_loop()
            await run_blocking(RECEIVERS, self._receive_bytes, pull, loop, halt, halt=halt)
        self._check_open()
        self._blob.claims.notify(self.index)

    async def finish(self) -> None:
        """Verify the shard and mark it as held; waits for its hash if the manifest does not have it yet."""
        assert not self._busy, "one write at a time"
        self._check_open()
        if self.written != self.size:
            self.abort()
            raise ShardError(f"shard {self.index} is incomplete: {self.written} of {self.size} bytes")
        while (expected := self._blob.hash_of(self.index)) is None:
            await self._blob.entry.grown.wait()
            self._check_open()
        if self._hasher.digest() != expected:
            self.abort()
            raise ShardError(f"shard {self.index} does not match its hash in the manifest")
        try:
            await self._commit_bytes()
        finally:
            self.abort()  # only if the disk or the caller ended it here

    def abort(self) -> None:
        """Discard the bytes. Harmless if the writer has already ended."""
        if not self.over:
            self.over = True
            self._blob.claims.leave(self, busy=self._busy)
            if not self._busy:
                self._release()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    @property
    def _offset(self) -> int:
        return self.shard.offset

    async def _open_target(self) -> int:
        await self._blob.claims.claim(self)
        self._check_open()
        await self._blob.prepare()
        await self._blob.claims.wait_drained(self)
        path = self._blob.path_of(self.shard.file)
        return self._resources.enter_context(self._blob.open_files.lease(path, os.O_RDWR | os.O_NOFOLLOW))

    def _receive_bytes(self, pull: Pull, loop: asyncio.AbstractEventLoop, halt: threading.Event) -> None:
        """In a thread: write what `pull` returns to disk and through the hash, piece by piece."""
        buffer = own_buffer()
        while self.written < self.size and not (halt.is_set() or self._is_stale()):
            received = pull(buffer[: self.size - self.written])
            if received == 0:
                return
            if received is None:
                continue
            write_at(self._descriptor, buffer[:received], self._offset + self.written)
            self._hasher.update(buffer[:received])
            self.written += received
            if self._watched:
                self._watched = False
                loop.call_soon_threadsafe(self._blob.claims.notify, self.index)

    async def _commit_bytes(self) -> None:
        self._blob.mark(self.index)
        self.over = True
        self._blob.claims.leave(self, busy=False)
        self._release()

    def _is_stale(self) -> bool:
        return self.over or self._blob.has(self.index)

    def _check_open(self) -> None:
        if self._is_stale():
            raise StaleError(f"shard {self.index} was cancelled or written by another writer")

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Mark threads as working for this writer; a failure ends it, and resources are released afterwards."""
        self._busy = True
        try:
            yield
        except BaseException:
            self._busy = False
            self.abort()
            raise
        finally:
            self._busy = False
            if self.over:
                self._release()
                self._blob.claims.leave(self, busy=False)

    def _release(self) -> None:
        self._resources.close()
        self._descriptor = -1


class SpareWriter(ShardWriter):
    """A second writer of a shard, next to the first: from another upstream, because the first is slow."""

    spare = True

    def __init__(self, blob: "Blob", index: int, path: Path) -> None:
        super().__init__(blob, index)
        self._path = path

    @property
    def visible(self) -> int:
        return 0

    @property
    def _offset(self) -> int:
        return 0

    async def _open_target(self) -> int:
        await self._blob.prepare()
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o644)
        self._resources.callback(self._path.unlink, missing_ok=True)
        self._resources.callback(os.close, descriptor)
        return descriptor

    async def _commit_bytes(self) -> None:
        """Take the place of the first writer, and put the verified bytes there."""
        self._check_open()
        self._blob.claims.take(self)
        path = self._blob.path_of(self.shard.file)
        with self._work():
            await self._blob.claims.wait_drained(self)
            with self._blob.open_files.lease(path, os.O_RDWR | os.O_NOFOLLOW) as target:
                await run_blocking(self._blob.pool, copy_range, self._descriptor, target, self.shard.offset, self.size)
        self._check_open()
        await super()._commit_bytes()
