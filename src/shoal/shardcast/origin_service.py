"""A running origin: serves a run's versions, and publishes what is linked into the folder it watches.

    async with open_origin(data, run=run, key=key) as service:
        await service.run()

It may start without a version. After a restart it serves the earlier versions again if the files still exist.
"""

import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.identity.keys import Key
from shoal.net.limits import ServeLimits
from shoal.shardcast.origin import ANCHOR_EVERY, SHARD_BYTES, Origin
from shoal.shardcast.origin_watch import VersionWatch
from shoal.shardcast.serve.server import ShardServer
from shoal.shardcast.store.store import DEFAULT_KEEP, StoredVersion, VersionStore
from shoal.shardcast.tickets import TicketTable
from shoal.util.aio import run_blocking
from shoal.util.spans import SpanLog
from shoal.util.units import format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OriginService:
    """An origin that serves. Call `publish` for one version, or `run` to publish what appears in its folder."""

    origin: Origin
    server: ShardServer
    watch: VersionWatch
    spans: SpanLog

    async def publish(self, path: Path, version: int) -> StoredVersion:
        """Publish a version, and log its size and how long it took."""
        start = time.monotonic()
        with self.spans.span("publish", version=version):
            entry = await self.origin.publish(path, version)
        size, count = entry.full.layout.total, len(entry.full.layout.shards)
        text = f"published v{version}  {format_bytes(size)} in {count} shard{'s' * (count != 1)}"
        if entry.delta is not None:
            delta = entry.delta.layout.total
            text += f", delta {format_bytes(delta)} (1/{size / max(1, delta):.0f})"
        logger.info(f"{text} in {time.monotonic() - start:.1f} s")
        return entry

    async def run(self) -> None:
        """Publish what appears in the folder, until cancelled."""
        await self.watch.run(self.publish)


@asynccontextmanager
async def open_origin(
    data: Path,
    *,
    run: str,
    key: Key,
    host: str = "127.0.0.1",
    port: int = 0,
    keep: int = DEFAULT_KEEP,
    keep_s: float = 0.0,
    keep_bytes: int | None = None,
    shard_size: int = SHARD_BYTES,
    anchor_every: int = ANCHOR_EVERY,
    limits: ServeLimits | None = None,
    open_tickets: Callable[[], TicketTable | None] = lambda: None,
    tls: ssl.SSLContext | None = None,
    spans: SpanLog | None = None,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[OriginService]:
    """An origin that serves while the block runs. `settings`, by flag, are what `request_publish` compares.

    `open_tickets` is called once the folder is locked: its book belongs to one process.
    """
    async with AsyncExitStack() as stack:
        store = await VersionStore.open(
            data, run=run, publisher=key.public, keep=keep, keep_s=keep_s, keep_bytes=keep_bytes, role="origin"
        )
        stack.push_async_callback(store.close)
        origin = Origin(store, key, shard_size=shard_size, anchor_every=anchor_every)
        if (tickets := open_tickets()) is not None:
            stack.callback(tickets.close)
        server = ShardServer(store, limits=limits, tickets=tickets, tls=tls)
        await server.start(host, port)
        stack.push_async_callback(server.close)
        watch = await run_blocking(None, VersionWatch, data, settings)
        logger.info(f"serving run {run} at {server.url}, publisher {key.public}")
        yield OriginService(origin, server, watch, spans or SpanLog(None, "origin"))
