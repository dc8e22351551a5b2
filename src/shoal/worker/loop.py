"""The worker's loop: weights, leases, rollouts, delivery, side by side.

    relays -> weights --\\
    coordinator -> leases -> mill (a thread) -> outbox -> coordinator

Invariants:
- generation never waits for the network while there is work: leases are asked for one ahead, new weights are pulled and
  finished work is delivered beside it;
- nothing is written with a version before the coordinator has spoken of it;
- what was taken on is on disk before it is begun, what was written before it is handed in. A worker that was killed
  delivers what it had written, writes again what it had not (the same tokens), and asks under the same key;
- a lease that is no longer wanted is dropped at the next token;
- on the first signal nothing more is asked for, what is written is delivered, and the rest is returned by leaving.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

from shoal.node.session import Session, State
from shoal.node.tasks import run_together
from shoal.node.waits import LONGEST_PAUSE_S
from shoal.node.weights import LOOK_S, describe_relays, number_version
from shoal.shardcast.client import Client
from shoal.swarm.messages import HeartbeatAnswer
from shoal.swarm.postings import MICRO
from shoal.worker.author import Author, Work
from shoal.worker.delivery import AT_ONCE, Delivery
from shoal.worker.intake import Order, WorkLimits
from shoal.worker.mill import Mill
from shoal.worker.outbox import Outbox
from shoal.worker.supply import Supply

HUNGER_S = 1.0
"""between two looks whether the mill has leases and no weights for them"""
ANNOUNCED_S = 0.5
"""until it is asked again whether a version that is here was announced; later, twice as long each time"""
FAREWELL_S = 30.0
"""how long a worker that stops goes on delivering"""


class Worker:
    """One worker; `run` ends when the run is finished, or after the first signal."""

    def __init__(
        self, session: Session, weights: Client, author: Author, folder: Path, *, limits: WorkLimits, slots: int
    ) -> None:
        self._session, self._weights = session, weights
        self._done: asyncio.Queue[Work] = asyncio.Queue()
        self._failed: asyncio.Queue[tuple[Order, str]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._mill = Mill(
            author, self._hand_over, limits=limits, give_back=self._hand_back, slots=slots, spans=session.spans
        )
        self._outbox = Outbox(folder, author.write)
        self._supply = Supply(session, self._outbox, self._mill, author.recipe, limits, self._offer_pulled)
        self._delivery = Delivery(session, self._outbox, self._supply.end)
        self._held = -1
        self._pulled: tuple[int, Path] | None = None
        """the newest version on this machine"""
        self._begun = time.monotonic()
        session.describe, session.heard = self._describe_state, self._hear

    async def run(self) -> None:
        """Work until the run is finished or the session stops."""
        deliveries = [self._delivery.run() for _ in range(AT_ONCE)]
        hands = [self._collect_work(), self._return_failed()]
        beside = [self._turn_mill(), self._follow_weights(), self._tell_hunger(), *hands]
        await run_together(self._work(), *beside, *deliveries)
        if not self._supply.finished:
            await self._session.leave()

    def describe(self) -> str:
        """One line for whoever watches."""
        version = self._mill.version
        parts = [
            f"v{version}" if version >= 0 else "no weights yet",
            f"{self._count_rate()} tokens/s",
            f"{len(self._supply.leases)} leases",
            f"{self._delivery.tally.delivered} delivered",
            f"{self._session.answer.accepted} accepted",
            f"credit {self._session.answer.earned / MICRO:.3f}",
            f"standing {self._session.answer.standing.value}",
        ]
        wait = self._session.waits.longest()
        if self._session.problem:
            parts.append(self._session.problem)
        elif self._supply.fault:
            parts.append(f"gives leases back: {self._supply.fault}")
        elif wait is not None and (self._is_hungry or not self._mill.count_done()):
            parts.append(f"waits for {wait.for_whom}: {wait.detail or self._supply.reason or wait.name}")
        elif not self._supply.leases and self._supply.reason:
            parts.append(self._supply.reason)
        return "  ".join(parts)

    async def _work(self) -> None:
        """Take leases until there is a reason to stop, then deliver what is written."""
        await self._supply.resume()  # before anything is delivered: it notes what was left
        for parcel in await asyncio.to_thread(self._outbox.list_parcels):
            self._delivery.send(parcel)
        stop, supply = asyncio.create_task(self._session.stopping.wait()), asyncio.create_task(self._supply.run())
        try:
            await asyncio.wait((stop, supply), return_when=asyncio.FIRST_COMPLETED)
            if supply.done():
                supply.result()
        finally:
            for task in (stop, supply):
                task.cancel()
            await asyncio.gather(stop, supply, return_exceptions=True)
        await self._delivery.drain(FAREWELL_S)

    async def _turn_mill(self) -> None:
        """Run the mill's thread, which is waited for whatever ends this task."""
        with ThreadPoolExecutor(1, "mill") as pool:
            turning = asyncio.get_running_loop().run_in_executor(pool, self._mill.run)
            try:
                await asyncio.shield(turning)
            finally:
                self._mill.stop()

    def _hand_over(self, work: Work) -> None:
        """Called from the mill's thread."""
        self._loop.call_soon_threadsafe(self._done.put_nowait, work)

    def _hand_back(self, order: Order, reason: str) -> None:
        """Called from the mill's thread."""
        self._loop.call_soon_threadsafe(self._failed.put_nowait, (order, reason))

    async def _follow_weights(self) -> None:
        """Offer every new version to the mill."""
        while True:
            folder = await self._session.waits.insist(
                "weights", self._find_newer, for_whom="the relays", timeout_s=LOOK_S, told=self._held < 0
            )
            self._held = number_version(folder)
            with self._session.spans.span("have", version=self._held):
                pass  # a moment: from here on the version is on this machine
            self._pulled = self._held, folder
            self._offer_pulled()
            self._session.beat_soon()
            await self._await_announcement()

    async def _await_announcement(self) -> None:
        """Until the version that was pulled is in the ledger; its trainer publishes no other before."""
        pause_s = ANNOUNCED_S
        while self._is_ahead:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            self._session.beat_soon()

    @property
    def _is_ahead(self) -> bool:
        """Whether the version that was pulled is not known to be in the ledger."""
        return self._pulled is not None and self._pulled[0] > max(
            self._session.answer.newest_version, self._supply.newest
        )

    def _offer_pulled(self) -> None:
        """Let the mill have what was pulled once it is in the ledger.

        Weights travel beside their announcement, and may be faster; if the trainer dies between the two, by minutes.
        What was written with them before is not taken.
        """
        if self._pulled is not None and not self._is_ahead:
            self._mill.offer(*self._pulled)

    def _hear(self, answer: HeartbeatAnswer) -> None:
        self._supply.hear(answer)
        self._offer_pulled()

    async def _tell_hunger(self) -> None:
        """Say so while there is work and no version that may write it."""
        while True:
            await asyncio.sleep(HUNGER_S)
            if self._is_hungry:
                whom, reason = "the relays", describe_relays(self._weights)
                if self._is_ahead:
                    whom, reason = "the trainer", f"v{self._held} is here, and not announced yet"
                await self._session.waits.insist(
                    "weights", self._await_food, for_whom=whom, timeout_s=LOOK_S, reason=reason
                )

    @property
    def _is_hungry(self) -> bool:
        return self._mill.is_starved or self._supply.is_barren

    async def _await_food(self) -> None:
        while self._is_hungry:
            await asyncio.sleep(HUNGER_S)

    async def _find_newer(self) -> Path:
        async with aclosing(self._weights.follow()) as folders:
            async for folder in folders:
                if number_version(folder) > self._held:
                    return folder
        raise AssertionError("a client follows for ever")

    async def _collect_work(self) -> None:
        """Pack finished work and send it on its way."""
        while True:
            work = await self._done.get()
            lease = self._supply.leases.get(work.order.lease)
            if lease is not None:  # else it was cancelled in the meantime
                self._supply.mark_written(work.order.lease)
                parcel = await asyncio.to_thread(self._outbox.pack, work, lease.fence)
                self._delivery.send(parcel)

    async def _return_failed(self) -> None:
        """Give back what this machine cannot score."""
        while True:
            order, reason = await self._failed.get()
            await self._supply.give_back(order.lease, reason)

    def _describe_state(self) -> State:
        metrics = {"tokens_per_s": self._count_rate(), "queued": len(self._supply.leases)}
        return State(version=self._held, leases=self._supply.list_progress(), metrics=metrics)

    def _count_rate(self) -> int:
        return round(self._mill.num_tokens / max(time.monotonic() - self._begun, 1e-9))
