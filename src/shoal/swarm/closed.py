"""A coordinator that cannot write, for its disk is full: every request is answered with that, until there is room.

Whoever asks hears the reason and tries again, as for any answer 503: roles wait, and `shoal status` says why.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.disk import has_room
from shoal.swarm.api.refuse import build_refusal
from shoal.swarm.clock import read_clock
from shoal.swarm.refusal import AuthError
from shoal.swarm.serve import Server, load_tls
from shoal.swarm.service import ServiceConfig

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

LOOK_S = 1.0
RETRY_S = 2
TEXT = "the coordinator waits for room on its disk, which is full; it goes on by itself when there is some"


async def await_room(config: ServiceConfig, data: Path) -> None:
    """Until there is room on the disk of a coordinator's folder; meanwhile the reason is served in its place."""
    tls = load_tls(Path(config.tls_certificate), Path(config.tls_key)) if config.tls_certificate else None
    server = Server(_refuse_all, limits=config.http, tls=tls)
    await server.start(config.host, config.port)
    try:
        while not await asyncio.to_thread(has_room, data):
            await asyncio.sleep(LOOK_S)
    finally:
        await server.close()


async def _refuse_all(scope: "Scope", receive: "Receive", send: "Send") -> None:
    """Called as an ASGI app."""
    refusal = AuthError(503, "disk", TEXT, retry_after_s=RETRY_S)
    await build_refusal(refusal, read_clock)(scope, receive, send)
