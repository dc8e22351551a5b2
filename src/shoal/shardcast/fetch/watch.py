"""Discovers what to fetch: the versions that upstreams announce, and the manifests of those we hold.

Every upstream is asked for its list by a request that it answers when there are changes (long polling). Heads are
adopted only with the publisher's signature. An upstream that lists anything else is charged for it, and the rest of its
list is not read. Manifests are read from any upstream that announced the version, starting at the next line we need.

Invariants:
- the complete list of an upstream is read when a connection to it begins and at least every `RELIST_S`, so that it is
  not asked forever for what it no longer has;
- a version is attributed to an upstream as soon as it is in the store, not only at the end of the list;
- if a manifest brings no line for `SILENCE_S`, another upstream is asked: silence is no fault, but no reason to wait.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from shoal.shardcast.errors import ManifestError, StaleError
from shoal.shardcast.fetch.connection import InvalidDataError, UpstreamError, UpstreamResponse
from shoal.shardcast.fetch.upstream_stats import Upstream
from shoal.shardcast.fetch.upstreams import GoneError, UpstreamPool
from shoal.shardcast.format.manifest import ManifestLog
from shoal.shardcast.store.store import StoredVersion, VersionStore

POLL_S = 20
"""How long an upstream may keep a long poll open."""
RELIST_S = 60.0
SILENCE_S = 3.0
LINE_BYTES = (256 << 10) + 1
"""Maximum length of a line, including its newline."""
LIST_BYTES = 16 << 20
"""Maximum length of a list of versions."""
MAX_HEADS = 1024
_LIST_S = 15.0
_RETRY_S = 0.25


@dataclass(slots=True)
class _ListChanges:
    """The result of reading one list."""

    serial: int
    """largest serial seen"""
    digests: set[str] = field(default_factory=set)
    num_lines: int = 0


class Watcher:
    """Keeps a store's heads and manifests up to date. `run` is its only task."""

    def __init__(self, store: VersionStore, upstreams: UpstreamPool) -> None:
        self._store = store
        self._upstreams = upstreams
        self._manifest_tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Work until cancelled. A disk error ends it."""
        tasks = {asyncio.create_task(self._poll(upstream)) for upstream in self._upstreams.all}
        try:
            while True:
                changed = self._store.changed.wait()
                for entry in reversed(self._store.entries()):  # the lines of the newest version are needed most
                    if not entry.log.ended and not entry.gone and entry.digest not in self._manifest_tasks:
                        self._manifest_tasks[entry.digest] = asyncio.create_task(self._follow_manifest(entry))
                running = tasks | set(self._manifest_tasks.values())
                done, _ = await asyncio.wait({changed, *running}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                for task in done & running:
                    task.result()  # only a tail ends normally
                self._manifest_tasks = {key: task for key, task in self._manifest_tasks.items() if not task.done()}
        finally:
            running = tasks | set(self._manifest_tasks.values())
            self._manifest_tasks.clear()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _poll(self, upstream: Upstream) -> None:
        """Long-poll one upstream forever."""
        loop = asyncio.get_running_loop()
        newest, relist_at = 0, 0.0
        while True:
            fresh = loop.time() >= relist_at
            changes = None
            with self._upstreams.charge(upstream):
                changes = await self._list(upstream, None if fresh else newest)
            if changes is None:
                relist_at = 0.0
                now = self._upstreams.clock()
                if upstream.unreachable_since is None:
                    upstream.unreachable_since = now
                    self._upstreams.changed.notify()
                await asyncio.sleep(max(_RETRY_S, max(upstream.cool_until, upstream.banned_until("")) - now))
                continue
            if fresh:
                upstream.announced &= changes.digests
                relist_at = loop.time() + RELIST_S
            newest = max(newest, changes.serial)
            self._upstreams.record_list(upstream)
            self._upstreams.changed.notify()

    async def _list(self, upstream: Upstream, after: int | None) -> _ListChanges:
        """The versions that an upstream announces: all, or those newer than a serial as soon as there are any."""
        changes = _ListChanges(max(0, after or 0))
        wait_s = 0 if after is None else POLL_S
        target = "/versions" if after is None else f"/versions?after={after}&wait={wait_s}"
        begun = asyncio.get_running_loop().time()
        async with self._upstreams.ask(upstream, target, head_s=wait_s + _LIST_S) as answer:
            try:
                async for line in read_lines(answer, _LIST_S, LIST_BYTES):
                    await self._adopt(line, upstream, changes)
            except TimeoutError as error:
                raise UpstreamError("stalled in the middle of its list") from error
        if after == changes.serial and asyncio.get_running_loop().time() - begun < _RETRY_S:
            raise UpstreamError("responds to a long poll at once and without changes")
        return changes

    async def _adopt(self, line: bytes, upstream: Upstream, changes: _ListChanges) -> None:
        """Adopt one announced head into the store, if it is new and useful."""
        if changes.num_lines >= MAX_HEADS:
            raise UpstreamError(f"announces more than {MAX_HEADS} versions")
        log = ManifestLog(self._store.publisher, self._store.run)
        try:
            log.feed(line)
        except ManifestError as error:
            raise InvalidDataError(f"announced a forged version ({error})") from error
        changes.num_lines += 1
        changes.serial = max(changes.serial, log.head.serial)
        # Before the store has it: a task that finds it there must also find an upstream for it.
        upstream.announced.add(log.digest)
        try:
            if self._store.find_digest(log.digest) is None:
                await self._store.adopt(line)
        except StaleError:
            upstream.announced.discard(log.digest)
        else:
            changes.digests.add(log.digest)

    async def _follow_manifest(self, entry: StoredVersion) -> None:
        """Read a manifest to its end, or until the version is gone."""
        last: list[Upstream] = []
        while not entry.log.ended and not entry.gone:
            try:
                upstream = await self._upstreams.pick(entry.digest, avoid=last)
            except GoneError:
                await self._upstreams.sleep(1.0)  # until an upstream announces it again, or the store drops it
                continue
            last = [upstream]
            with (
                self._upstreams.charge(upstream, entry.digest),
                self._upstreams.wait_for(f"the manifest of version {entry.version}"),
            ):
                await self._read_manifest(upstream, entry)

    async def _read_manifest(self, upstream: Upstream, entry: StoredVersion) -> None:
        before, begun = len(entry.log.lines), asyncio.get_running_loop().time()
        target = f"/v/{entry.version}/{entry.digest[:16]}/manifest?from={before}"
        async with self._upstreams.ask(upstream, target) as answer:
            try:
                async for line in read_lines(answer, SILENCE_S, None):
                    await entry.append(line)
                    if entry.gone:
                        return
            except (TimeoutError, StaleError):
                return
            except ManifestError as error:
                raise InvalidDataError(f"sent a forged manifest of version {entry.version} ({error})") from error
        if len(entry.log.lines) == before and asyncio.get_running_loop().time() - begun < _RETRY_S:
            raise UpstreamError("sent an incomplete manifest")


async def read_lines(answer: UpstreamResponse, line_s: float, max_bytes: int | None) -> AsyncIterator[bytes]:
    """Yield the lines of a body with their newlines; `TimeoutError` if one takes longer than `line_s`."""
    loop = asyncio.get_running_loop()
    rest, total = bytearray(), 0
    deadline = loop.time() + line_s
    while data := await answer.read_piece(max(0.0, deadline - loop.time())):
        total += len(data)
        if max_bytes is not None and total > max_bytes:
            raise UpstreamError(f"sent more than {max_bytes} bytes")
        *ends, tail = data.split(b"\n")  # the rest has no newline, and is not searched again
        for end in ends:
            yield bytes(rest) + end + b"\n"
            rest.clear()
            await asyncio.sleep(0)  # each line costs its reader a signature check
            deadline = loop.time() + line_s
        rest += tail
        if len(rest) > LINE_BYTES:
            raise UpstreamError("sent an overlong line")
    if rest:
        raise UpstreamError("ended in the middle of a line")
