"""An honest node that goes on calling while others attack: whether it is answered, and how long that takes."""

import asyncio
import math
import time

from shoal.swarm.asking import RefusedError, UnreachableError
from shoal.swarm.client import NodeClient
from shoal.swarm.messages import Heartbeat

PAUSE_S = 0.02


class Witness:
    """Sends heartbeats one after the other; `watch` it in a task of its own."""

    def __init__(self, client: NodeClient) -> None:
        self._client = client
        self.waits_s: list[float] = []
        """of the calls that were answered"""
        self.unanswered = 0

    async def watch(self) -> None:
        """Call until cancelled."""
        while True:
            begun = time.monotonic()
            try:
                await self._client.send_heartbeat(Heartbeat(role="worker", metrics={}))
            except (RefusedError, UnreachableError):
                self.unanswered += 1
            else:
                self.waits_s.append(time.monotonic() - begun)
            await asyncio.sleep(PAUSE_S)

    def find_wait(self, share: float) -> float:
        """The wait in seconds that this share of the answers stayed below; 0 if there were none."""
        waits = sorted(self.waits_s)
        return waits[max(0, math.ceil(share * len(waits)) - 1)] if waits else 0.0
