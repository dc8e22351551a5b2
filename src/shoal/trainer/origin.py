"""`shoal origin`: serves a run's versions, and takes new ones from the trainer through the inbox of its folder.

It starts without a version. What it served before it was stopped it serves again, if the files are still there.
"""

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from shoal.keys import Key
from shoal.node.spans import SpanLog
from shoal.shardcast.inbox import Inbox, Request
from shoal.shardcast.limits import ServeLimits
from shoal.shardcast.publish import ANCHOR_EVERY, SHARD_BYTES, Origin
from shoal.shardcast.server import Server
from shoal.shardcast.store import DEFAULT_KEEP, Store
from shoal.shardcast.tickets import TicketBook
from shoal.units import format_bytes

Ready = Callable[[Store, Server], None]


async def run_origin(
    data: Path,
    *,
    run: str,
    key: Key,
    host: str = "127.0.0.1",
    port: int = 0,
    keep: int = DEFAULT_KEEP,
    shard_size: int = SHARD_BYTES,
    anchor_every: int = ANCHOR_EVERY,
    limits: ServeLimits | None = None,
    tickets: TicketBook | None = None,
    spans: SpanLog | None = None,
    note: Callable[[str], None] = lambda _: None,
    ready: Ready = lambda _store, _server: None,
) -> None:
    """Serve until cancelled. `ready` hears when it serves; hand-overs are taken from then on."""
    spans = spans or SpanLog(None, "origin")
    async with AsyncExitStack() as stack:
        store = await Store.open(data, run=run, publisher=key.public, keep=keep, role="origin", note=note)
        stack.push_async_callback(store.close)
        origin = Origin(store, key, shard_size=shard_size, anchor_every=anchor_every)
        server = Server(store, limits=limits, tickets=tickets, role="origin")
        await server.start(host, port)
        stack.push_async_callback(server.close)
        inbox = await stack.enter_async_context(Inbox(data, note))
        note(f"serving run {run} at {server.url}, publisher {key.public}")
        ready(store, server)

        async def publish(request: Request) -> str:
            start = time.monotonic()
            with spans.span("publish", version=request.version):
                entry = await origin.publish(request.path, request.version)
            size = format_bytes(entry.full.layout.total)
            note(f"published v{request.version}, {size}, in {time.monotonic() - start:.2f} s")
            return entry.digest

        await inbox.serve(publish)
