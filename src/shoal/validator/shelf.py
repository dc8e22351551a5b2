"""Trusted weights by version: pulled through the relays when a job needs them, a few kept in memory.

Weights are trusted because the run's publisher signed their manifest; the relays they come through are not.
"""

import asyncio
from collections import OrderedDict

from shoal.node.session import Session
from shoal.node.waits import WaitError
from shoal.node.weights import Opener
from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.shardcast.client import Client
from shoal.shardcast.crew import GoneError

IN_MEMORY = 3
PULL_S = 120.0


class Shelf:
    """The policies of a run."""

    def __init__(self, session: Session, client: Client, recipe: Recipe, *, in_memory: int = IN_MEMORY) -> None:
        self._session, self._client, self._in_memory = session, client, in_memory
        self._opener = Opener(recipe)
        self._policies: OrderedDict[int, Policy] = OrderedDict()

    async def find(self, version: int) -> Policy | None:
        """The policy of a version; None if it is not to be had, now or any more."""
        if version not in self._policies:
            try:
                folder = await self._session.waits.bound(
                    "weights", self._client.pull(version), for_whom="the relays", timeout_s=PULL_S
                )
            except (GoneError, WaitError) as error:
                self._session.note(f"v{version} is not at hand: {error}")
                return None
            self._policies[version] = await asyncio.to_thread(self._opener.open, version, folder)
        self._policies.move_to_end(version)
        while len(self._policies) > self._in_memory:
            self._policies.popitem(last=False)
        return self._policies[version]
