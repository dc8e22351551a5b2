"""Answers that are bytes of a shard, sent as they become ready.

Invariants:
- a shard is sent as far as the store says it may be (`Blob.ready`), in bytes of one writer only. If that writer gives
  up, or nothing comes for too long, the connection ends short;
- a shard that is not there is asked for (`Want`) for exactly as long as the request lives: who hangs up asks no more.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from shoal.shardcast.answers import BYTES
from shoal.shardcast.blob import Blob
from shoal.shardcast.connection import Connection, CutError
from shoal.shardcast.errors import ShardError
from shoal.shardcast.limits import ServeLimits
from shoal.shardcast.metrics import ServeMetrics
from shoal.shardcast.store import Entry
from shoal.shardcast.target import RefusalError, parse_range

Want = Callable[[Entry, str, int, str], AbstractContextManager[object] | None]
"""Called for a shard that is not there yet: (entry, "full" or "delta", index, name of the peer). The shard is wanted
while the block runs; None if it will never be here."""
Charge = Callable[[int], AbstractContextManager[object]]
"""Takes the price of so many bytes from whoever asked, for as many as were sent while the block ran."""


@dataclass(frozen=True)
class ShardRequest:
    """Which shard, and which part of it."""

    entry: Entry
    blob: str
    index: int
    range_header: str | None


@dataclass(frozen=True)
class _Span:
    """The bytes of a shard that an answer is made of, and the writer they come from."""

    blob: Blob
    index: int
    first: int
    end: int
    attempt: int

    def is_valid(self) -> bool:
        """Whether the bytes still come from the writer that they came from when the answer began."""
        return self.blob.attempt(self.index) == self.attempt and self.blob.ready(self.index) > 0


class ShardDesk:
    """Answers requests for shards."""

    def __init__(self, limits: ServeLimits, metrics: ServeMetrics, want: Want | None) -> None:
        self._limits = limits
        self._metrics = metrics
        self._want = want

    async def answer_shard(self, conn: Connection, request: ShardRequest, charge: Charge) -> None:
        """Send the shard; `RefusalError` for one that is not to be had, as long as no byte of it was sent."""
        conn.peer.version = max(request.entry.version, conn.peer.version or 0)
        with request.entry.hold():
            deadline_s = _now() + self._limits.first_seconds
            blob = await self._await_blob(conn, request, deadline_s)
            if request.index >= len(blob.layout.shards):
                raise RefusalError(404, "no such shard")
            size = blob.layout.shards[request.index].size
            part = parse_range(request.range_header, size)
            first, end = part or (0, size)
            with charge(end - first), self._ask_for(conn, request, blob, first):
                await self._await_bytes(conn, request, blob, first, deadline_s)
                attempt = blob.attempt(request.index)
                headers = [("Content-Type", BYTES), ("Content-Length", str(end - first)), ("Accept-Ranges", "bytes")]
                if part is not None:
                    headers.append(("Content-Range", f"bytes {first}-{end - 1}/{size}"))
                await conn.start_answer(200 if part is None else 206, *headers)
                await self._send_span(conn, _Span(blob, request.index, first, end, attempt))
                await conn.end_answer()

    async def _await_blob(self, conn: Connection, request: ShardRequest, deadline_s: float) -> Blob:
        """The blob asked for; whether there is a delta is known only some time after the head."""
        entry = request.entry
        if request.blob == "full":
            return entry.full
        while not entry.log.delta_settled and not entry.gone:
            await self._await_signal(conn, entry.grown.wait(), deadline_s)
        if entry.delta is None:
            raise RefusalError(410 if entry.gone else 404, "no delta")
        return entry.delta

    def _ask_for(
        self, conn: Connection, request: ShardRequest, blob: Blob, first: int
    ) -> AbstractContextManager[object]:
        if self._want is None or blob.ready(request.index) > first:
            return nullcontext()
        wanted = self._want(request.entry, request.blob, request.index, conn.peer.name)
        if wanted is None:
            raise RefusalError(404, "not held here")
        return wanted

    async def _await_bytes(
        self, conn: Connection, request: ShardRequest, blob: Blob, first: int, deadline_s: float
    ) -> None:
        """Wait until there is a byte to send, so that a source that can send nothing says so by its status."""
        while blob.ready(request.index) <= first:
            if request.entry.gone:
                raise RefusalError(410, "gone")
            await self._await_signal(conn, blob.progress(request.index).wait(), deadline_s)
        try:
            with blob.locate(request.index):
                return  # the file is there, and is still the one that was published
        except ShardError:
            raise RefusalError(410, "gone") from None

    async def _await_signal(self, conn: Connection, signal: "asyncio.Future[None]", deadline_s: float) -> None:
        if not await conn.wait_parked(signal, deadline_s - _now()):
            raise RefusalError(503, "not to be had now", ("Retry-After", "1"))

    async def _send_span(self, conn: Connection, span: _Span) -> None:
        """Send the bytes as they become ready."""
        self._metrics.transfers += 1
        sent = span.first
        try:
            while sent < span.end:
                ready = min(span.blob.ready(span.index), span.end)
                if not span.is_valid():
                    raise CutError("writer")
                if ready > sent:
                    with span.blob.locate(span.index) as (descriptor, offset, _):
                        await conn.send_file(descriptor, offset + sent, ready - sent, span.is_valid)
                    sent = ready
                else:
                    await self._await_growth(span.blob, span.index)
        except ShardError as error:
            raise CutError("gone") from error
        finally:
            self._metrics.transfers -= 1

    async def _await_growth(self, blob: Blob, index: int) -> None:
        try:
            async with asyncio.timeout(self._limits.stall_seconds):
                await blob.progress(index).wait()
        except TimeoutError as error:
            raise CutError("stalled") from error


def _now() -> float:
    return asyncio.get_running_loop().time()
