"""Trusted weights by version: pulled through the relays when a job needs them, some kept in memory.

Weights are trusted because the run's publisher signed their manifest; the relays they come through are not.

Invariants:
- what is in memory is within `memory_bytes`, but for the version that was asked for last, which always is;
- relays that are away are waited for as long as the caller has time. Only of a version that no relay has any more it is
  said that it is not to be had.
"""

import asyncio
from collections import OrderedDict

from shoal.node.session import Session
from shoal.node.weights import Opener, describe_relays
from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.shardcast.client import Client
from shoal.shardcast.crew import GoneError

MEMORY_BYTES = 4 << 30
PULL_S = 120.0
"""after which a wait for weights is overdue, and begun anew"""


class Shelf:
    """The policies of a run."""

    def __init__(self, session: Session, client: Client, recipe: Recipe, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self._session, self._client, self._memory_bytes = session, client, memory_bytes
        self._opener = Opener(recipe)
        self._policies: OrderedDict[int, Policy] = OrderedDict()
        self._sizes: dict[int, int] = {}
        """bytes of each"""

    async def find(self, version: int) -> Policy | None:
        """The policy of a version, however long that takes; None if no relay has it any more."""
        if version not in self._policies:
            try:
                folder = await self._session.waits.insist(
                    "weights",
                    lambda: self._client.pull(version),
                    for_whom="the relays",
                    timeout_s=PULL_S,
                    reason=describe_relays(self._client),
                )
            except GoneError as error:
                self._session.note(f"v{version} is not to be had: {error}")
                return None
            policy = await asyncio.to_thread(self._opener.open, version, folder)
            self._policies[version], self._sizes[version] = policy, _measure_bytes(policy)
        self._policies.move_to_end(version)
        self._drop_old()
        return self._policies[version]

    def _drop_old(self) -> None:
        while len(self._policies) > 1 and sum(self._sizes.values()) > self._memory_bytes:
            version, _ = self._policies.popitem(last=False)
            del self._sizes[version]


def _measure_bytes(policy: Policy) -> int:
    return sum(weight.numel() * weight.element_size() for weight in policy.model.parameters())
