"""Leases: asking for them, holding them, dropping those that nobody wants any more.

Invariants:
- a lease is on disk before it is begun, and the key it is asked under before it is asked for;
- there is one request at a time, and none while the engine is full and more is waiting, or waits for weights;
- a lease that this machine cannot score is returned: it costs width, and the coordinator lets who returns many rest;
- a lease whose work is written is the delivery's: heartbeats tell nothing more of it, and hear nothing. To the
  coordinator a lease is over once its manifest is there, and the file must not be dropped for that.
"""

import asyncio

from shoal.node.session import ASK_S, Session, SessionError, end_session
from shoal.recipe import Recipe
from shoal.swarm.asking import RefusedError
from shoal.swarm.clock import read_clock
from shoal.swarm.head import ForkError
from shoal.swarm.keepsakes import KeepError
from shoal.swarm.messages import HeartbeatAnswer, Lease, LeaseAnswer, Progress
from shoal.worker.intake import LeaseError, WorkLimits, take_order
from shoal.worker.mill import Mill
from shoal.worker.outbox import Outbox

POLL_S = 20
"""how long the coordinator may keep a request for a lease until it has one"""
PAUSE_S = 1.0
"""between two looks whether more work is needed, if nothing happens"""
MAX_TOLD = 64
"""leases in one heartbeat"""


class Supply:
    """The leases of a worker."""

    def __init__(self, session: Session, outbox: Outbox, mill: Mill, recipe: Recipe, limits: WorkLimits) -> None:
        self._session, self._outbox, self._mill = session, outbox, mill
        self._recipe, self._limits = recipe, limits
        self._news = asyncio.Event()
        self._written: set[str] = set()
        self.leases: dict[str, Lease] = {}
        """that are held"""
        self.finished = False
        """the run needs no more work"""
        self.reason = ""
        """why there is no lease now, in the coordinator's words"""
        self.fault = ""
        """why the last lease was given back; empty again once one is written"""

    async def resume(self) -> None:
        """Take up leases that an earlier process left, if they still have time."""
        for lease in await asyncio.to_thread(self._outbox.list_leases):
            if lease.deadline_ms > read_clock() + self._session.client.clock_offset_ms:
                self._take(lease)
            else:
                await asyncio.to_thread(self._outbox.forget, lease.lease)

    async def run(self) -> None:
        """Ask for leases until the run is finished."""
        while not self.finished:
            if self._mill.has_enough or self._mill.is_starved or self._mill.version < 0:
                await self._pause(PAUSE_S)
                continue
            answer = await self._ask()
            self.reason = answer.reason
            if answer.lease is not None:
                await asyncio.to_thread(self._outbox.add_lease, answer.lease)
                self._take(answer.lease)
            elif answer.code == "finished":
                self.finished = True
            else:
                await self._pause(max(PAUSE_S, min(answer.retry_after_s, POLL_S)))

    def hear(self, answer: HeartbeatAnswer) -> None:
        """Drop what the coordinator does not want any more."""
        self.finished = self.finished or answer.finished
        for lease in answer.cancelled:
            if lease in self.leases and lease not in self._written:
                self._mill.cancel(lease)
                self._outbox.forget(lease)
                self.end(lease)
        self._news.set()

    def mark_written(self, lease: str) -> None:
        """All of a lease is generated; what becomes of it is the delivery's business."""
        self._written.add(lease)
        self.fault = ""

    def end(self, lease: str) -> None:
        """A lease is done with."""
        self.leases.pop(lease, None)
        self._written.discard(lease)
        self._news.set()

    async def give_back(self, lease: str, reason: str) -> None:
        """Return a lease that this machine cannot finish; nothing is claimed for it."""
        if lease not in self.leases:
            return  # cancelled in the meantime
        self.fault = reason
        self._session.note(f"lease {lease} is given back, nothing is claimed for it: {reason}")
        client = self._session.client
        try:
            await self._session.waits.insist(
                "return", lambda: client.return_lease(lease), for_whom="the coordinator", timeout_s=ASK_S, told=False
            )
        except RefusedError as error:
            self._session.note(f"lease {lease} is not wanted back: {error}")
        except (ForkError, KeepError) as error:
            raise end_session(error) from None
        await asyncio.to_thread(self._outbox.forget, lease)
        self.end(lease)

    def list_progress(self) -> tuple[Progress, ...]:
        """How far each lease is, for the heartbeat."""
        done = self._mill.count_done()
        names = [name for name in self.leases if name not in self._written]
        return tuple(Progress(lease=name, done=done.get(name, 0)) for name in names[:MAX_TOLD])

    async def _ask(self) -> LeaseAnswer:
        key = await asyncio.to_thread(self._outbox.find_key)
        client = self._session.client
        try:
            return await self._session.waits.insist(
                "lease", lambda: client.ask_lease(key, wait_s=POLL_S), for_whom="the coordinator", timeout_s=ASK_S
            )
        except RefusedError as error:
            raise SessionError(f"no more leases: {error}") from None
        except (ForkError, KeepError) as error:
            raise end_session(error) from None

    def _take(self, lease: Lease) -> None:
        try:
            order = take_order(lease, self._recipe, self._limits)
        except LeaseError as error:
            raise SessionError(f"the coordinator's lease {lease.lease} {error}") from None
        self.leases[lease.lease] = lease
        self._mill.order(order)

    async def _pause(self, seconds: float) -> None:
        """Until something happens, or for so long."""
        self._news.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return
