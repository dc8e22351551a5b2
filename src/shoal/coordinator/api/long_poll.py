"""Long polling for leases, validation jobs and batches (`wait_s` of a request); events of the ledger wake waiters.

A caller makes an attempt, which is a decision of the coordinator. If there is nothing for it, it waits in a queue for
an event that may change that, and tries again.

Invariants:
- first come, first served. An event wakes one waiter; one that is served, or is not eligible for what is available,
  wakes the next, and none retries twice for one event. So ten thousand waiters cost one attempt per available item, not
  ten thousand;
- no event is lost: after an event between an attempt and the following wait, the attempt is repeated;
- no caller waits longer than it requested. What changes without an event (a reservation that expires) is found by an
  attempt every `RETRY_S`;
- at most `max_waiting` callers wait in a queue. Further callers are answered at once, as are all once it is closed.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from functools import partial
from typing import TypeVar

from shoal.coordinator.coordinator import Coordinator
from shoal.ledger.event import Event, EventKind
from shoal.protocol.messages import BatchAnswer, ClaimAnswer, ClaimRequest, CutRequest, LeaseAnswer, LeaseRequest

T = TypeVar("T")
RETRY_S = 5.0

_WAITABLE = frozenset({"no_need", "no_version", "queue_full"})
"""codes of lease refusals that an event will change for any caller; the others depend on the caller"""
_LEASE_EVENTS = frozenset(
    {
        EventKind.STEP_OPEN,
        EventKind.LEASE_END,
        EventKind.SUB_OUTCOME,
        EventKind.VERSION_PUBLISH,
        EventKind.ADMIN,
        EventKind.PARAMS,
    }
)
_JOB_EVENTS = frozenset({EventKind.SUB_RECEIPT, EventKind.VAL_VERDICT, EventKind.VAL_LAPSE, EventKind.APPEAL})
_BATCH_EVENTS = frozenset({EventKind.SUB_OUTCOME, EventKind.STEP_OPEN})


class PollResult(Enum):
    """Outcome of an attempt."""

    SERVED = "served"
    """the answer is for the caller"""
    NOT_YOU = "not you"
    """nothing for this caller, but perhaps for the next one"""
    NOTHING = "nothing"
    """nothing for any caller"""


class WaitQueue:
    """Callers in one event loop that wait for the same kind of item."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        """with the number of events seen at each waiter's last attempt"""
        self._num_events = 0
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    def notify(self) -> None:
        """Report an event: let the first waiter retry."""
        self._num_events += 1
        self._wake_next()

    def close(self) -> None:
        """End all waits; each caller gets the answer of its last attempt."""
        self._is_closed = True
        while self._waiters:
            self._waiters.popleft()[1].set_result(None)

    async def poll(self, attempt: Callable[[], Awaitable[T]], judge: Callable[[T], PollResult], wait_s: float) -> T:
        """The answer of an attempt, repeated after events until it serves the caller or `wait_s` have passed."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + wait_s
        while True:
            num_events = self._num_events
            answer = await attempt()
            result = judge(answer)
            if result is not PollResult.NOTHING:
                self._wake_next()
            left_s = end_s - loop.time()
            if result is PollResult.SERVED or left_s <= 0 or self._is_closed:
                return answer
            if num_events != self._num_events:
                continue
            if len(self._waiters) >= self._max_waiting:
                return answer
            await self._wait(num_events, min(left_s, RETRY_S))
            if self._is_closed:
                return answer

    async def _wait(self, num_events: int, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (num_events, woken)
        self._waiters.append(entry)
        try:
            await asyncio.wait((woken,), timeout=seconds)
        except asyncio.CancelledError:
            if woken.done():
                self._wake_next()  # this caller is gone: pass its event on to the next one
            raise
        finally:
            if not woken.done():
                self._waiters.remove(entry)

    def _wake_next(self) -> None:
        """Wake the first waiter that has not retried since the last event."""
        for entry in self._waiters:
            num_events, woken = entry
            if num_events < self._num_events:
                self._waiters.remove(entry)
                woken.set_result(None)
                return


class LongPoll:
    """One queue each for leases, jobs and batches. Everything except `_note_events` runs in the server's event loop."""

    def __init__(self, coordinator: Coordinator, max_waiting: int) -> None:
        self._coordinator = coordinator
        self._leases, self._jobs, self._batches = (WaitQueue(max_waiting) for _ in range(3))
        self._queues = ((self._leases, _LEASE_EVENTS), (self._jobs, _JOB_EVENTS), (self._batches, _BATCH_EVENTS))
        self._loop: asyncio.AbstractEventLoop | None = None
        coordinator.listen(self._note_events)

    @property
    def num_waiting(self) -> int:
        return sum(queue.num_waiting for queue, _ in self._queues)

    async def grant_lease(self, node: str, request: LeaseRequest) -> LeaseAnswer:
        """`Coordinator.grant_lease`, once there is something to grant."""
        attempt = partial(self._coordinator.grant_lease, node, request.request_key, request.version)
        return await self._poll(self._leases, attempt, _judge_lease, request.wait_s)

    async def claim_jobs(self, node: str, request: ClaimRequest) -> ClaimAnswer:
        """`Coordinator.claim_jobs`, once there is something to claim."""
        attempt = partial(self._coordinator.claim_jobs, node, request.most)
        return await self._poll(self._jobs, attempt, _judge_claim, request.wait_s)

    async def cut_batch(self, node: str, step: int, request: CutRequest) -> BatchAnswer:
        """`Coordinator.cut_batch`, once it can be cut."""
        attempt = partial(self._coordinator.cut_batch, node, step)
        return await self._poll(self._batches, attempt, _judge_batch, request.wait_s)

    def close(self) -> None:
        """Answer all waiting callers, because the coordinator stops."""
        for queue, _ in self._queues:
            queue.close()

    async def _poll(
        self, queue: WaitQueue, attempt: Callable[[], Awaitable[T]], judge: Callable[[T], PollResult], wait_s: float
    ) -> T:
        self._loop = asyncio.get_running_loop()
        return await queue.poll(attempt, judge, wait_s)

    def _note_events(self, events: Sequence[Event]) -> None:
        """Called in the thread that writes the ledger."""
        kinds = {event.kind for event in events}
        for queue, triggers in self._queues:
            if kinds & triggers and self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(queue.notify)


def _judge_lease(answer: LeaseAnswer) -> PollResult:
    return PollResult.NOTHING if answer.lease is None and answer.code in _WAITABLE else PollResult.SERVED


def _judge_claim(answer: ClaimAnswer) -> PollResult:
    # An owner may not judge its own submissions, but others may.
    return PollResult.SERVED if answer.jobs else PollResult.NOT_YOU


def _judge_batch(answer: BatchAnswer) -> PollResult:
    return PollResult.NOT_YOU if answer.batch is None else PollResult.SERVED
