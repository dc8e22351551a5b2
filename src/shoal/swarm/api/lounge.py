"""Where callers wait for work, jobs and batches that are not there yet (`wait_s` in their requests).

Events of the ledger ring: an open step, a lease that ended or an outcome for those who want leases, a file or a verdict
for those who want jobs, an outcome for those who want a batch. What only the caller can change (it holds all the leases
it may) is answered at once.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from shoal.swarm.bells import Bell, Outcome
from shoal.swarm.coordinator import Coordinator
from shoal.swarm.event import Event, Kind
from shoal.swarm.messages import (
    BatchAnswer,
    ClaimAnswer,
    ClaimRequest,
    CutRequest,
    LeaseAnswer,
    LeaseRequest,
)

_WAITABLE = frozenset({"no_need", "no_version", "queue_full"})
"""codes of refused leases that an event will change, whoever asks"""
_LEASES = frozenset({Kind.STEP_OPEN, Kind.LEASE_END, Kind.SUB_OUTCOME, Kind.VERSION_PUBLISH, Kind.ADMIN, Kind.PARAMS})
_JOBS = frozenset({Kind.SUB_RECEIPT, Kind.VAL_VERDICT, Kind.VAL_LAPSE, Kind.APPEAL})
_BATCHES = frozenset({Kind.SUB_OUTCOME, Kind.STEP_OPEN})


class Lounge:
    """Keeps callers until there is something for them. All but `_hear` runs in the loop that serves them."""

    def __init__(self, coordinator: Coordinator, most: int) -> None:
        self._coordinator = coordinator
        self._leases, self._jobs, self._batches = Bell(most), Bell(most), Bell(most)
        self._loop: asyncio.AbstractEventLoop | None = None
        coordinator.listen(self._hear)

    @property
    def num_waiting(self) -> int:
        return self._leases.num_waiting + self._jobs.num_waiting + self._batches.num_waiting

    async def grant_lease(self, node: str, request: LeaseRequest) -> LeaseAnswer:
        """`Coordinator.grant_lease`, when there is something to grant."""
        self._enter()
        attempt = partial(self._coordinator.grant_lease, node, request.request_key)
        return await self._leases.serve(attempt, _judge_lease, request.wait_s)

    async def claim_jobs(self, node: str, request: ClaimRequest) -> ClaimAnswer:
        """`Coordinator.claim_jobs`, when there is something to claim."""
        self._enter()
        attempt = partial(self._coordinator.claim_jobs, node, request.most)
        return await self._jobs.serve(attempt, _judge_claim, request.wait_s)

    async def cut_batch(self, node: str, step: int, request: CutRequest) -> BatchAnswer:
        """`Coordinator.cut_batch`, when it can be cut."""
        self._enter()
        attempt = partial(self._coordinator.cut_batch, node, step)
        return await self._batches.serve(attempt, _judge_batch, request.wait_s)

    def close(self) -> None:
        """Send everybody away with what there is: the coordinator stops."""
        for bell in (self._leases, self._jobs, self._batches):
            bell.close()

    def _enter(self) -> None:
        self._loop = asyncio.get_running_loop()

    def _hear(self, events: Sequence[Event]) -> None:
        """Called where the ledger is written, in its thread."""
        kinds = {event.kind for event in events}
        if self._loop is not None and not self._loop.is_closed() and kinds & (_LEASES | _JOBS | _BATCHES):
            self._loop.call_soon_threadsafe(self._ring, kinds)

    def _ring(self, kinds: set[str]) -> None:
        for bell, ringing in ((self._leases, _LEASES), (self._jobs, _JOBS), (self._batches, _BATCHES)):
            if kinds & ringing:
                bell.ring()


def _judge_lease(answer: LeaseAnswer) -> Outcome:
    return Outcome.NOTHING if answer.lease is None and answer.code in _WAITABLE else Outcome.SERVED


def _judge_claim(answer: ClaimAnswer) -> Outcome:
    # A job may be for others, not for whose own work it is.
    return Outcome.SERVED if answer.jobs else Outcome.NOT_YOU


def _judge_batch(answer: BatchAnswer) -> Outcome:
    return Outcome.NOT_YOU if answer.batch is None else Outcome.SERVED
