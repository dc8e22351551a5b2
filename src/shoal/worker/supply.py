"""Leases: asking for them, holding them, dropping those that nobody wants any more.

Invariants:
- a lease is on disk before it is begun, and the key it is asked under before it is asked for;
- there is one request at a time, and none while the engine is full and more is waiting, or waits for weights, or
  while `MAX_HELD` leases are held, of whatever kind: what a coordinator can make a worker keep has an end;
- who lost a lease for want of weights asks for no other before it has them: it would lose one after the other, and have
  to rest when they are there;
- a lease that this machine cannot score is returned: it costs width, and the coordinator lets who returns many rest;
- a lease whose work is written is the delivery's: heartbeats tell nothing more of it, and hear nothing. To the
  coordinator a lease is over once its manifest is there, and the file must not be dropped for that.
"""

import asyncio
from collections.abc import Callable

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
MAX_HELD = 64
"""leases at once, as many as a heartbeat tells of; more is no honest coordinator's wish"""


class Supply:
    """The leases of a worker."""

    def __init__(
        self,
        session: Session,
        outbox: Outbox,
        mill: Mill,
        recipe: Recipe,
        limits: WorkLimits,
        heard_newest: Callable[[], None] = lambda: None,
    ) -> None:
        """`heard_newest` is called with each lease that is taken: `newest` may be another."""
        self._session, self._outbox, self._mill = session, outbox, mill
        self._recipe, self._limits, self._heard_newest = recipe, limits, heard_newest
        self._news = asyncio.Event()
        self._written: set[str] = set()
        self.leases: dict[str, Lease] = {}
        """that are held"""
        self.finished = False
        """the run needs no more work"""
        self.reason = ""
        """why there is no lease now, in the coordinator's words"""
        self.newest = -1
        """newest version that a lease spoke of: it is in the ledger"""
        self._lacked = -1
        """version without which a lease was lost"""
        self._resumed: frozenset[str] = frozenset()
        """leases that an earlier process left, written or not"""
        self.fault = ""
        """why the last lease was given back; empty again once one is written"""

    @property
    def is_barren(self) -> bool:
        """Whether leases would come to nothing here until there are newer weights."""
        return self._mill.version < self._lacked

    async def resume(self) -> None:
        """Take up leases that an earlier process left, if they still have time."""
        leases = await asyncio.to_thread(self._outbox.list_leases)
        parcels = await asyncio.to_thread(self._outbox.list_parcels)
        self._resumed = frozenset([*(lease.lease for lease in leases), *(parcel.manifest.lease for parcel in parcels)])
        for lease in leases:
            if lease.deadline_ms > read_clock() + self._session.client.clock_offset_ms:
                self._take(lease)
            else:
                await asyncio.to_thread(self._outbox.forget, lease.lease)

    async def run(self) -> None:
        """Ask for leases until the run is finished."""
        while not self.finished:
            if self._has_enough():
                await self._pause(PAUSE_S)
                continue
            answer = await self._ask()
            self.reason = answer.reason
            if answer.lease is not None:
                await self._accept(answer.lease)
            elif answer.code == "finished":
                self.finished = True
            else:
                await self._pause(max(PAUSE_S, min(answer.retry_after_s, POLL_S)))

    def hear(self, answer: HeartbeatAnswer) -> None:
        """Drop what the coordinator does not want any more."""
        self.finished = self.finished or answer.finished
        for lease in answer.cancelled:
            if lease in self.leases and lease not in self._written:
                if self.leases[lease].oldest_version > self._mill.version:
                    self._lacked = max(self._lacked, self.leases[lease].oldest_version)
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
        return tuple(Progress(lease=name, done=done.get(name, 0)) for name in names[:MAX_HELD])

    def _has_enough(self) -> bool:
        mill = self._mill
        is_hungry = mill.is_starved or mill.version < 0 or self.is_barren
        return mill.has_enough or is_hungry or len(self.leases) >= MAX_HELD

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

    async def _accept(self, lease: Lease) -> None:
        """Take on a lease that was granted.

        A kill may come between keeping a lease and dropping the key that it was asked under; that key brings the same
        one again, which is under way or written already. Twice it would be written, and signed for.
        """
        if lease.lease in self.leases or lease.lease in self._resumed:
            await asyncio.to_thread(self._outbox.drop_key)
            return
        await asyncio.to_thread(self._outbox.add_lease, lease)
        self._take(lease)

    def _take(self, lease: Lease) -> None:
        try:
            order = take_order(lease, self._recipe, self._limits)
        except LeaseError as error:
            raise SessionError(f"the coordinator's lease {lease.lease} {error}") from None
        self.leases[lease.lease] = lease
        self.newest = max(self.newest, lease.newest_version)
        self._mill.order(order)
        self._heard_newest()

    async def _pause(self, seconds: float) -> None:
        """Until something happens, or for so long."""
        self._news.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return
