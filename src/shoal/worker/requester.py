"""Requesting leases, and how heartbeats and failures affect them.

Invariants:
- there is one request at a time, and none while the engine is full and more is queued, while weights are missing, or
  while `MAX_HELD` leases are held: this bounds what a coordinator can make a worker keep;
- a lease is requested for the newest version that is here. If no step accepts that one any more, none is requested
  until newer weights arrive; if newer weights arrive during a request, it is repeated under its key with their version;
- a lease that this machine cannot score is returned. That lowers the lease limit, and the coordinator pauses nodes that
  return many.
"""

import asyncio
import logging
from functools import partial

from shoal.net.retry import RefusedError
from shoal.node.session import Session, SessionError
from shoal.protocol.messages import HeartbeatAnswer, Lease, LeaseAnswer, LeaseProgress
from shoal.recipe import Recipe
from shoal.util.aio import Notifier
from shoal.util.clock import read_clock
from shoal.worker.generator import Generator
from shoal.worker.leases import LeaseState, LeaseTable
from shoal.worker.orders import LeaseError, WorkLimits, take_order

logger = logging.getLogger(__name__)

LONG_POLL_S = 20
"""how long the coordinator may hold a request until it has a lease"""
PAUSE_S = 1.0
"""pause between two checks whether more work is needed, if nothing happens"""
MAX_HELD = 64
"""most leases at once, as many as a heartbeat reports; no honest coordinator grants more"""


class LeaseRequester:
    """Requests leases for a worker."""

    def __init__(
        self, session: Session, leases: LeaseTable, generator: Generator, recipe: Recipe, limits: WorkLimits
    ) -> None:
        self._session, self._leases, self._generator = session, leases, generator
        self._recipe, self._limits = recipe, limits
        self._news = Notifier()
        self.finished = False
        """whether the run needs no more work"""
        self.reason = ""
        """why there is no lease now, as stated by the coordinator"""
        self.newest = -1
        """newest version that a lease named; it is in the ledger"""
        self._missing = -1
        """version that is needed for the next lease"""
        self.failure = ""
        """why the last lease was returned; cleared once one is written"""

    @property
    def lacks_weights(self) -> bool:
        """Whether leases cannot be worked on until newer weights arrive."""
        return self._generator.lacks_weights or self._generator.newest < self._missing

    async def resume(self) -> None:
        """Drop expired leases of an earlier process."""
        now_ms = read_clock() + self._session.client.clock_offset_ms
        for record in self._leases.list_records(LeaseState.HELD):
            if record.order.deadline_ms <= now_ms:
                await asyncio.to_thread(self._leases.end, record.order.lease)

    async def run(self) -> None:
        """Request leases until the run is finished."""
        while not self.finished:
            await self._return_unusable()  # first: while they are held, weights seem to be missing
            if self._has_enough():
                await self.wait_news(PAUSE_S)
                continue
            key, version = await asyncio.to_thread(self._leases.find_key), self._generator.newest
            answer = await self._request(key, version)
            if answer is None:
                continue
            self.reason = answer.reason
            if answer.lease is not None:
                await self._accept(answer.lease, key)
            elif answer.code == "finished":
                self.finished = True
            elif answer.code == "version":
                self._missing = max(self._missing, version + 1)
            else:
                if answer.code == "work":
                    await self._session.join_again()
                await self.wait_news(max(PAUSE_S, min(answer.retry_after_s, LONG_POLL_S)))

    def take_answer(self, answer: HeartbeatAnswer) -> None:
        """Drop leases that the coordinator no longer wants."""
        self.finished = self.finished or answer.finished
        for lease in answer.cancelled:
            record = self._leases.find(lease)
            if record is not None and record.can_be_cancelled:
                self._leases.end(lease)
        self._news.notify()

    def end(self) -> None:
        """Request nothing more: the last version of the run is out."""
        self._session.note_finished()
        self.finished = True
        self._news.notify()

    async def give_back(self, lease: str, reason: str) -> None:
        """Return a lease that this machine cannot finish; nothing is submitted for it."""
        if self._leases.find(lease) is None:
            return  # cancelled in the meantime
        self.failure = reason
        logger.warning(f"returning lease {lease}, nothing is submitted for it: {reason}")
        try:
            give_back = partial(self._session.client.return_lease, lease)
            await self._session.ask_coordinator("return", give_back, reported=False)
        except RefusedError as error:
            logger.warning(f"lease {lease} could not be returned: {error}")
        await asyncio.to_thread(self._leases.end, lease)
        self._news.notify()

    def list_progress(self) -> tuple[LeaseProgress, ...]:
        """Progress of each lease for the heartbeat; for the coordinator, written leases have ended."""
        done = self._generator.count_done()
        records = self._leases.list_records(LeaseState.HELD, LeaseState.RUNNING)
        names = [record.order.lease for record in records[:MAX_HELD]]
        return tuple(LeaseProgress(lease=name, done=done.get(name, 0)) for name in names)

    async def wait_news(self, seconds: float) -> None:
        """Wait until a heartbeat or a lease brings news, or for `seconds`."""
        await asyncio.wait([self._news.wait()], timeout=seconds)

    def note_written(self) -> None:
        """Note that a lease was generated and scored: this machine works, and may have room for another."""
        self.failure = ""
        self._news.notify()

    def note_weights(self) -> None:
        """Note that newer weights can be used."""
        self._news.notify()

    def note_ended(self) -> None:
        """Note that a lease was delivered or refused: a node at its limit may get the next one now."""
        self._news.notify()

    def _has_enough(self) -> bool:
        generator = self._generator
        waits_for_weights = generator.newest < 0 or self.lacks_weights
        return generator.has_enough or waits_for_weights or len(self._leases) >= MAX_HELD

    async def _request(self, key: str, version: int) -> LeaseAnswer | None:
        """The answer to a request; None if newer weights arrived first."""
        ask_lease = partial(self._session.client.ask_lease, key, version=version, wait_s=LONG_POLL_S)
        asking = asyncio.create_task(self._session.ask_coordinator("lease", ask_lease))
        newer = asyncio.create_task(self._wait_newer(version))
        try:
            await asyncio.wait((asking, newer), return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        except RefusedError as error:
            raise SessionError(f"no more leases: {error}", error.refusal.code) from None
        finally:
            for task in (asking, newer):
                task.cancel()
            await asyncio.gather(asking, newer, return_exceptions=True)

    async def _wait_newer(self, version: int) -> None:
        while self._generator.newest <= version:
            await self.wait_news(LONG_POLL_S)

    async def _return_unusable(self) -> None:
        """Return leases whose version is gone, as after a long stop."""
        for order in self._generator.list_unusable():
            await self.give_back(order.lease, f"v{order.version} is not on this machine any more")

    async def _accept(self, lease: Lease, key: str) -> None:
        """Take on a granted lease, unless it is held already: it would be written twice."""
        if self._leases.find(lease.lease) is not None:
            await asyncio.to_thread(self._leases.drop_key)
            return
        try:
            order = take_order(lease, self._recipe, self._limits)
        except LeaseError as error:
            raise SessionError(f"the coordinator's lease {lease.lease} {error}") from None
        await asyncio.to_thread(self._leases.hold, order, fence=lease.fence, request_key=key)
        self.newest = max(self.newest, lease.version)
        self._news.notify()
