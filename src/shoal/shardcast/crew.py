"""The sources of one client at work: who is asked next, and what each answer means for who gave it.

`charge` is the one place where what a source did becomes its record: everything that asks a source does so inside it.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from shoal.shardcast.link import (
    Answer,
    BusyError,
    Deadlines,
    DeniedError,
    LinkPool,
    MissingError,
    SourceError,
    WrongError,
)
from shoal.shardcast.signal import Signal
from shoal.shardcast.sources import Source, SourceBook

PROBE_BYTES = 1 << 18
_NAP_S = 1.0
"""Longest sleep before a source is looked for again, whatever the pauses say."""


class GoneError(Exception):
    """No source has the version any more."""


class Crew:
    """A book of sources with connections to them."""

    def __init__(
        self,
        urls: Iterable[str],
        *,
        deadlines: Deadlines | None = None,
        ticket: str | None = None,
        rng: random.Random | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.book = SourceBook(urls)
        self.deadlines = deadlines or Deadlines()
        self.rng = rng or random.Random()
        self.note = note
        self.changed = Signal()
        """a source announced a version, took one back, or failed"""
        self.waits: dict[object, str] = {}
        """what is being waited for at this moment, by who waits"""
        self.received_bytes = 0
        self.late: set[Source] = set()
        """sources with a transfer that is late; others are asked first"""
        self._pools = {source: LinkPool(source.url, self.deadlines, ticket) for source in self.book.sources}
        self._probes: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def ask(
        self, source: Source, target: str, *headers: tuple[str, str], head_s: float | None = None
    ) -> AsyncIterator[Answer]:
        """One request to a source; see `LinkPool.request`."""
        async with self._pools[source].request(target, *headers, head_s=head_s) as answer:
            yield answer

    @contextmanager
    def charge(self, source: Source, digest: str = "", *, shard: bool = False) -> Iterator[None]:
        """Write what goes wrong within the block into the source's record, and go on after the block.

        A request for a shard counts as one under way; lists and manifests wait most of the time and take no link.
        """
        source.busy += shard
        try:
            yield
        except SourceError as error:
            if isinstance(error, WrongError):
                self.book.record_wrong(source, digest, str(error))
                self.note(f"{source}: {error}")
            elif isinstance(error, MissingError) and digest:
                source.heads.discard(digest)
                source.tally.reason = str(error)
            elif isinstance(error, BusyError) and digest:
                self.book.record_busy(source, digest, str(error), error.pause)
            else:
                source.denied = isinstance(error, DeniedError)
                self.book.record_failure(source, str(error), error.pause)
            self.changed.notify()
        finally:
            source.busy -= shard

    async def pick(self, digest: str, avoid: Collection[Source] = ()) -> Source:
        """A source to ask for that version, as soon as one may be asked; `GoneError` if none has it."""
        while (source := self.book.draw(self.rng, digest, [*avoid, *self.late])) is None:
            pause = self.book.find_pause(digest)
            if pause is None:
                raise GoneError("no source has this version any more")
            with self.wait_for(self._phrase_wait(digest)):
                await self.sleep(min(pause, _NAP_S) + 0.001)
        return source

    @contextmanager
    def wait_for(self, what: str) -> Iterator[None]:
        """Name what the block waits for, for those who look."""
        waiter = object()
        self.waits[waiter] = what
        try:
            yield
        finally:
            del self.waits[waiter]

    def count(self, source: Source, num_bytes: int) -> None:
        """Bytes of a body arrived."""
        source.tally.bytes += num_bytes
        self.received_bytes += num_bytes

    async def sleep(self, seconds: float) -> None:
        """Sleep, but no longer than until something changes with the sources."""
        waiter = self.changed.wait()
        try:
            await asyncio.wait({waiter}, timeout=seconds)
        finally:
            waiter.cancel()

    async def probe_all(self, patience_s: float) -> None:
        """Measure every source once; those that are late go on behind, and count as failed when they fail."""
        self._probes = [asyncio.create_task(self._probe(source)) for source in self.book.sources]
        await asyncio.wait(self._probes, timeout=patience_s)

    async def close(self) -> None:
        """Close all connections."""
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for pool in self._pools.values():
            pool.close()

    async def _probe(self, source: Source) -> None:
        loop = asyncio.get_running_loop()
        view = memoryview(bytearray(PROBE_BYTES))
        with self.charge(source):
            begun = loop.time()
            async with self.ask(source, f"/probe?bytes={PROBE_BYTES}", head_s=self.deadlines.rest_s) as answer:
                answer.start_body(PROBE_BYTES)
                try:
                    async with asyncio.timeout(self.deadlines.window_s):
                        while answer.left:
                            await answer.receive(view)
                except TimeoutError as error:
                    raise SourceError("too slow to be measured") from error
            self.book.record_success(source, PROBE_BYTES, loop.time() - begun)

    def _phrase_wait(self, digest: str) -> str:
        """Why nobody can be asked, by the source that comes back first."""
        holders = self.book.list_holders(digest)
        first = min(holders, key=lambda source: max(source.cool_until, source.banned_until(digest)))
        return f"{first} ({first.tally.reason})"
