"""Writing one shard: bytes go to disk and through the hash as they come, and count when the hash holds.

    start -> receive | write ... -> finish     the shard is verified and stays
                                 -> abort      its bytes are forgotten; whoever was reading along stops

Races, and how they are broken:
- a thread may still be writing for a writer that was aborted: the next writer of the shard waits for it, so no late
  byte lands on a verified shard;
- two writers of one shard would write to one place: the second one, a spare, writes aside and takes the place over only
  with bytes that are verified;
- a thread adds bytes while readers on the event loop look how many there are: it adds first and then asks whether
  anyone looked, they leave word (`_watched`) before they look, so either they see the bytes or the thread sees them.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from shoal.shardcast.errors import ShardError, StaleError
from shoal.shardcast.hashing import own_buffer
from shoal.shardcast.parts import copy_range, write_at
from shoal.shardcast.pool import RECEIVERS, run_blocking

if TYPE_CHECKING:
    from types import TracebackType

    from shoal.shardcast.blob import Blob

Pull = Callable[[memoryview], int | None]
"""Puts bytes at the start of a view and says how many; None: none for the moment, 0: no more will come."""


class ShardWriter:
    """The one writer of a shard. Leaving its `with` block aborts it unless it finished."""

    spare = False

    def __init__(self, blob: "Blob", index: int) -> None:
        self._blob = blob
        self._hasher = blake3()
        self._lease = ExitStack()
        self._descriptor = -1
        self._busy = False
        self._watched = True
        """whether anyone may wait for more bytes: looked since waiters were last woken, or before there was a writer"""
        self.over = False
        """whether it takes no more bytes"""
        self.shard = blob.layout.shards[index]
        self.index = index
        self.size = self.shard.size
        self.written = 0

    @property
    def visible(self) -> int:
        """Bytes that lie where the shard's bytes belong. Whoever waits for more looks here first."""
        self._watched = True
        return self.written

    async def receive(self, pull: Pull) -> None:
        """Add what `pull` gives until all bytes are there or no more come, in one thread that stays on it.

        `pull` must return within some milliseconds, bytes or none: in between the thread looks whether it is still
        wanted. When this returns or raises, cancelled or not, nobody calls `pull` any more.
        """
        assert not self._busy, "one write at a time"
        self._check_open()
        with self._work():
            await self._open_once()
            halt = threading.Event()
            loop = asyncio.get_running_loop()
            await run_blocking(RECEIVERS, self._take_bytes, pull, loop, halt, halt=halt)
        self._check_open()
        self._blob.places.notify(self.index)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes that are at hand, in the same way. The buffer is free again when this returns or raises."""
        rest = memoryview(data).cast("B")
        self._check_open()
        if self.written + len(rest) > self.size:
            self.abort()
            raise ShardError(f"more than the {self.size} bytes of shard {self.index}")

        def pull(view: memoryview) -> int:
            nonlocal rest
            size = min(len(view), len(rest))
            view[:size], rest = rest[:size], rest[size:]
            return size

        await self.receive(pull)

    async def finish(self) -> None:
        """Verify the shard and mark it as held; waits for its hash if the manifest does not have it yet."""
        assert not self._busy, "one write at a time"
        self._check_open()
        if self.written != self.size:
            self.abort()
            raise ShardError(f"{self.written} bytes of the {self.size} of shard {self.index}")
        while (expected := self._blob.hash_of(self.index)) is None:
            await self._blob.grown.wait()
            self._check_open()
        if self._hasher.digest() != expected:
            self.abort()
            raise ShardError(f"shard {self.index} has another hash than its manifest says")
        try:
            await self._keep_bytes()
        finally:
            self.abort()  # only if the disk or the caller ended it here

    def abort(self) -> None:
        """Forget the bytes. Harmless when it is over already."""
        if not self.over:
            self.over = True
            self._blob.places.leave(self, busy=self._busy)
            if not self._busy:
                self._release()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self.abort()

    @property
    def _offset(self) -> int:
        return self.shard.offset

    async def _open_once(self) -> None:
        if self._descriptor < 0:
            self._descriptor = await self._open_target()
            self._check_open()

    async def _open_target(self) -> int:
        await self._blob.places.claim(self)
        self._check_open()
        await self._blob.prepare()
        await self._blob.places.wait_drained(self)
        path = self._blob.path_of(self.shard.file)
        return self._lease.enter_context(self._blob.handles.lease(path, os.O_RDWR | os.O_NOFOLLOW))

    def _take_bytes(self, pull: Pull, loop: asyncio.AbstractEventLoop, halt: threading.Event) -> None:
        """In a thread: what `pull` gives to disk and through the hash, piece by piece."""
        buffer = own_buffer()
        while self.written < self.size and not (halt.is_set() or self._is_stale()):
            received = pull(buffer[: self.size - self.written])
            if received == 0:
                return
            if received is None:
                continue
            self._put_bytes(buffer[:received])
            self.written += received
            if self._watched:
                self._watched = False
                loop.call_soon_threadsafe(self._blob.places.notify, self.index)

    def _put_bytes(self, view: memoryview) -> None:
        write_at(self._descriptor, view, self._offset + self.written)
        self._hasher.update(view)

    async def _keep_bytes(self) -> None:
        self._blob.mark(self.index)
        self.over = True
        self._blob.places.leave(self, busy=False)
        self._release()

    def _is_stale(self) -> bool:
        return self.over or self._blob.has(self.index)

    def _check_open(self) -> None:
        if self._is_stale():
            raise StaleError(f"shard {self.index} was given up or came another way")

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Threads are at work for this writer; what fails ends it, and what it used is let go when they are through."""
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
                self._blob.places.end_drain(self)

    def _release(self) -> None:
        self._lease.close()
        self._descriptor = -1


class SpareWriter(ShardWriter):
    """A second writer of a shard, next to the first: from another source, because the first one is slow."""

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
        self._lease.callback(self._path.unlink, missing_ok=True)
        self._lease.callback(os.close, descriptor)
        return descriptor

    async def _keep_bytes(self) -> None:
        """Take the place of the first writer, and put the verified bytes there."""
        self._check_open()
        self._blob.places.take(self)
        path = self._blob.path_of(self.shard.file)
        with self._work():
            await self._blob.places.wait_drained(self)
            with self._blob.handles.lease(path, os.O_RDWR | os.O_NOFOLLOW) as target:
                await run_blocking(self._blob.pool, copy_range, self._descriptor, target, self.shard.offset, self.size)
        self._check_open()
        await super()._keep_bytes()
