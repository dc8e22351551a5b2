"""What there is to fetch: the versions that sources announce, and the manifests of those we hold.

Every source is asked for its list by a request that it answers when there is news. Heads are adopted only with the
publisher's signature; a source that lists anything else is charged for it and the rest of its list is not read.
Manifests are read on from any source that announced the version, from the line we are at.

Invariants:
- a source's list is taken as a whole when a connection to it begins and at least every `RELIST_S`, so that what it no
  longer has is not asked of it for ever;
- a version is known as a source's from the moment it is in the store, not from the end of the list;
- a manifest that brings no line for `SILENCE_S` is asked for elsewhere: silence is no fault, but no reason to wait.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from shoal.shardcast.crew import Crew, GoneError
from shoal.shardcast.errors import ManifestError, StaleError
from shoal.shardcast.link import Answer, SourceError, WrongError
from shoal.shardcast.manifest import ManifestLog
from shoal.shardcast.sources import Source
from shoal.shardcast.store import Entry, Store

POLL_S = 20
"""How long a source may keep a request for news open."""
RELIST_S = 60.0
SILENCE_S = 3.0
LINE_BYTES = (256 << 10) + 1
"""Longest line, with its newline."""
LIST_BYTES = 16 << 20
"""Longest list of versions."""
MAX_HEADS = 1024
_LIST_S = 15.0
_RETRY_S = 0.25


@dataclass(slots=True)
class _News:
    """What one list brought."""

    serial: int
    """largest serial seen"""
    digests: set[str] = field(default_factory=set)
    num_lines: int = 0


class Watcher:
    """Keeps a store's heads and manifests up to date. `run` is its only task."""

    def __init__(self, store: Store, crew: Crew) -> None:
        self._store = store
        self._crew = crew
        self._tails: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Work until cancelled. A disk that refuses ends it with that error."""
        tasks = {asyncio.create_task(self._poll(source)) for source in self._crew.book.sources}
        try:
            while True:
                changed = self._store.changed.wait()
                self._start_tails()
                running = tasks | set(self._tails.values())
                done, _ = await asyncio.wait({changed, *running}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                for task in done & running:
                    task.result()  # none ends in good order but a tail
                self._tails = {digest: task for digest, task in self._tails.items() if not task.done()}
        finally:
            running = tasks | set(self._tails.values())
            self._tails.clear()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _start_tails(self) -> None:
        """Newest first: their lines are wanted most."""
        for entry in reversed(self._store.entries()):
            if not entry.log.ended and not entry.gone and entry.digest not in self._tails:
                self._tails[entry.digest] = asyncio.create_task(self._tail(entry))

    async def _poll(self, source: Source) -> None:
        """Ask one source for news for ever."""
        loop = asyncio.get_running_loop()
        newest, relist_at = 0, 0.0
        while True:
            fresh = loop.time() >= relist_at
            news = None
            with self._crew.charge(source):
                news = await self._list(source, None if fresh else newest)
            if news is None:
                relist_at = 0.0
                self._lose(source)
                await asyncio.sleep(self._pause_of(source))
                continue
            if fresh:
                source.heads &= news.digests
                relist_at = loop.time() + RELIST_S
            newest = max(newest, news.serial)
            self._crew.book.record_list(source)
            self._crew.changed.notify()

    def _lose(self, source: Source) -> None:
        """A source's list could not be read."""
        if source.lost_at is None:
            source.lost_at = self._crew.book.clock()
            self._crew.changed.notify()

    async def _list(self, source: Source, after: int | None) -> _News:
        """What a source announces: all of it, or what is newer than a serial as soon as there is such."""
        news = _News(max(0, after or 0))
        wait_s = 0 if after is None else POLL_S
        target = "/versions" if after is None else f"/versions?after={after}&wait={wait_s}"
        begun = asyncio.get_running_loop().time()
        async with self._crew.ask(source, target, head_s=wait_s + _LIST_S) as answer:
            try:
                async for line in read_lines(answer, _LIST_S, LIST_BYTES):
                    await self._adopt(line, source, news)
            except TimeoutError as error:
                raise SourceError("stalled in the middle of its list") from error
        if after == news.serial and asyncio.get_running_loop().time() - begun < _RETRY_S:
            raise SourceError("answers at once and without news when asked to wait for some")
        return news

    async def _adopt(self, line: bytes, source: Source, news: _News) -> None:
        """Take one announced head into the store, if it is new and of use."""
        if news.num_lines >= MAX_HEADS:
            raise SourceError(f"announces more than {MAX_HEADS} versions")
        log = ManifestLog(self._store.publisher, self._store.run)
        try:
            log.feed(line)
        except ManifestError as error:
            raise WrongError(f"announced a forged version ({error})") from error
        news.num_lines += 1
        news.serial = max(news.serial, log.head.serial)
        # Before the store has it: whoever finds it there at once must find a source for it too.
        source.heads.add(log.digest)
        try:
            if self._store.find_digest(log.digest) is None:
                await self._store.adopt(line)
        except StaleError:
            source.heads.discard(log.digest)
        else:
            news.digests.add(log.digest)

    def _pause_of(self, source: Source) -> float:
        now = self._crew.book.clock()
        return max(_RETRY_S, max(source.cool_until, source.banned_until("")) - now)

    async def _tail(self, entry: Entry) -> None:
        """Read a manifest to its end, or until the version is gone."""
        last: list[Source] = []
        while not entry.log.ended and not entry.gone:
            try:
                source = await self._crew.pick(entry.digest, avoid=last)
            except GoneError:
                await self._crew.sleep(1.0)  # until somebody announces it again, or the store drops it
                continue
            last = [source]
            with self._crew.charge(source, entry.digest), self._crew.wait_for(f"the manifest of {entry.version}"):
                await self._read_manifest(source, entry)

    async def _read_manifest(self, source: Source, entry: Entry) -> None:
        before, begun = len(entry.log.lines), asyncio.get_running_loop().time()
        target = f"/v/{entry.version}/{entry.digest[:16]}/manifest?from={before}"
        async with self._crew.ask(source, target) as answer:
            try:
                async for line in read_lines(answer, SILENCE_S, None):
                    await entry.append(line)
                    if entry.gone:
                        return
            except TimeoutError:
                return
            except StaleError:
                return
            except ManifestError as error:
                raise WrongError(f"sent a forged manifest of version {entry.version} ({error})") from error
        if len(entry.log.lines) == before and asyncio.get_running_loop().time() - begun < _RETRY_S:
            raise SourceError("ends a manifest before its end")


async def read_lines(answer: Answer, line_s: float, max_bytes: int | None) -> AsyncIterator[bytes]:
    """Lines of a body, each with its newline and within `line_s` of the one before; `TimeoutError` if it is not."""
    loop = asyncio.get_running_loop()
    rest, total = bytearray(), 0
    deadline = loop.time() + line_s
    while data := await answer.read_piece(max(0.0, deadline - loop.time())):
        total += len(data)
        if max_bytes is not None and total > max_bytes:
            raise SourceError(f"sends more than {max_bytes} bytes")
        *ends, tail = data.split(b"\n")  # the rest has no newline, and is not searched again
        for end in ends:
            yield bytes(rest) + end + b"\n"
            rest.clear()
            await asyncio.sleep(0)  # each line costs its reader a signature
            deadline = loop.time() + line_s
        rest += tail
        if len(rest) > LINE_BYTES:
            raise SourceError("sends a line without end")
    if rest:
        raise SourceError("ends in the middle of a line")
