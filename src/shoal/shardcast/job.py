"""One shard on its way: source after source until its hash holds.

Invariants:
- a source that fails in the middle costs itself: the next one continues behind the bytes that are there;
- wrong bytes are blamed on a source only if all of them came from it. After a wrong mixture nobody is blamed, and from
  then on every attempt at this shard starts anew, so that the next wrong one has one name on it;
- a late shard is asked for a second time elsewhere (`hedge`); whoever is first with the right bytes wins.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from shoal.shardcast.blob import Blob, ShardWriter
from shoal.shardcast.crew import Crew, GoneError
from shoal.shardcast.errors import ShardError, StaleError
from shoal.shardcast.fetch import fetch_shard
from shoal.shardcast.link import WrongError
from shoal.shardcast.sources import Source
from shoal.shardcast.store import Entry

_LOOK_S = 1.0
"""How often a shard that waits for its hash looks whether its version is still there."""


@dataclass(slots=True)
class Part:
    """What one source sent of a shard."""

    source: Source
    begun: float
    num_bytes: int = 0
    seconds: float | None = None
    """None until it is over and complete"""


class ShardJob:
    """Fetches one shard. `run` ends when the shard is there, and raises `GoneError` or an `OSError` of the disk."""

    def __init__(self, crew: Crew, entry: Entry, name: str, index: int, share: Callable[[], int]) -> None:
        self.entry = entry
        self.name = name
        self.index = index
        self.part: Part | None = None
        """what is being sent at the moment"""
        self.arrived = False
        """all bytes are there, and only their hash is not"""
        self.pace_s: float | None = None
        """seconds per byte of the transfer that brought the shard"""
        self._crew = crew
        self._share = share
        self._writer: ShardWriter | None = None
        self._mixing = True
        self._main: asyncio.Task[None] | None = None
        self._spare: asyncio.Task[None] | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.entry.digest, self.name, self.index

    @property
    def blob(self) -> Blob:
        blob = self.entry.full if self.name == "full" else self.entry.delta
        assert blob is not None, "a delta is fetched only after its record came"
        return blob

    @property
    def written(self) -> int:
        """Bytes that are there and count if the hash holds."""
        return 0 if self._writer is None else self._writer.written

    @property
    def hedged(self) -> bool:
        return self._spare is not None and not self._spare.done()

    async def run(self) -> None:
        with self.entry.hold():
            self._main = asyncio.create_task(self._repeat())
            try:
                await asyncio.wait({self._main})
                self._raise_failure()
            finally:
                await self._stop_all()

    def hedge(self) -> bool:
        """Ask another source for the same shard; False if there is no other to ask."""
        busy = [self.part.source] if self.part else []
        others = [source for source in self._crew.book.list_ready(self.entry.digest) if source not in busy]
        if self.hedged or not others or self.blob.has(self.index):
            return False
        source = self._crew.book.draw(self._crew.rng, self.entry.digest, busy)
        assert source is not None, "there are others"
        self._spare = asyncio.create_task(self._race(source))
        return True

    async def _repeat(self) -> None:
        while not self.blob.has(self.index):
            if self.entry.gone:
                raise GoneError("the version was replaced or dropped")
            self.arrived = False
            with self.blob.start(self.index) as self._writer:
                try:
                    await self._fill(self._writer)
                except StaleError:
                    await self._await_spare()

    async def _fill(self, writer: ShardWriter) -> None:
        """Fill one writer and finish it; return without if the bytes are wrong."""
        parts: list[Part] = []
        while writer.written < writer.size:
            source = await self._crew.pick(self.entry.digest, avoid=[part.source for part in parts[-1:]])
            self.part = Part(source, _now())
            try:
                await self._transfer(self.part, writer)
            except StaleError:
                self._record_loss()
                raise
            finally:
                parts += [self.part] if self.part.num_bytes else []
                self.part = None
            if writer.written < writer.size and not self._mixing:
                return
        await self._finish(writer, parts)

    async def _transfer(self, part: Part, writer: ShardWriter) -> None:
        def count(num_bytes: int) -> None:
            part.num_bytes += num_bytes
            self._crew.count(part.source, num_bytes)

        with self._crew.charge(part.source, self.entry.digest, shard=True):
            await fetch_shard(
                self._crew, part.source, self.entry, self.name, self.index, writer, share=self._share(), count=count
            )
            part.seconds = _now() - part.begun

    async def _finish(self, writer: ShardWriter, parts: list[Part]) -> None:
        self.arrived = True
        try:
            await self._await_hash()
            await writer.finish()
        except ShardError as error:
            self._blame(parts, str(error))
            return
        for part in parts:
            if part.seconds is not None:
                part.source.tally.shards += 1
                self.pace_s = part.seconds / part.num_bytes
                self._crew.book.record_success(part.source, part.num_bytes, part.seconds)

    async def _await_hash(self) -> None:
        """Wait until the manifest has come as far as this shard."""
        with self._crew.wait_for(f"the hashes of version {self.entry.version}"):
            while self.entry.log.hash_of(self.name, self.index) is None:
                if self.entry.gone:
                    raise GoneError("the version was replaced or dropped")
                waiter = self.entry.grown.wait()
                await asyncio.wait({waiter}, timeout=_LOOK_S)
                waiter.cancel()

    async def _await_spare(self) -> None:
        """Wait for the one that took our place: it has the right bytes and only puts them where they belong."""
        if self._spare is not None:
            await asyncio.wait({self._spare})

    def _record_loss(self) -> None:
        """Write down how slow the source was that another one overtook."""
        if self.part is not None and self._spare is not None:
            self._crew.book.record_rate(self.part.source, self.part.num_bytes, _now() - self.part.begun)

    def _blame(self, parts: list[Part], reason: str) -> None:
        givers = {part.source for part in parts}
        if len(givers) > 1:
            self._mixing = False
            return
        with self._crew.charge(givers.pop(), self.entry.digest):
            raise WrongError(f"sent a wrong shard {self.index} of version {self.entry.version} ({reason})")

    async def _race(self, source: Source) -> None:
        """A second attempt, written aside from the first; the first is given up if this one wins."""
        part = Part(source, _now())
        with self.blob.start(self.index, spare=True) as writer:
            try:
                await self._transfer(part, writer)
                if writer.written == writer.size:
                    await self._finish(writer, [part])
            except StaleError:
                return
        if self.blob.has(self.index) and self._main is not None:
            self._record_loss()
            self._main.cancel()

    def _raise_failure(self) -> None:
        """Raise what ended the work, unless the shard is there all the same."""
        if self.blob.has(self.index):
            return
        for task in (self._main, self._spare):
            if task is not None and task.done() and not task.cancelled():
                task.result()

    async def _stop_all(self) -> None:
        tasks = [task for task in (self._main, self._spare) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _now() -> float:
    return asyncio.get_running_loop().time()
