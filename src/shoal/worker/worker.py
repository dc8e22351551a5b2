"""The worker: pulls weights, takes leases, generates rollouts and submits them, concurrently.

    relays -> weights --\\
    coordinator -> leases -> generator (a thread) -> submitter -> coordinator

Invariants:
- generation never waits for the network while there is work: leases are requested one ahead; new weights are pulled and
  finished work is submitted concurrently;
- a version is not used before the coordinator has announced it;
- a lease's state is on disk (`worker.leases`): after a kill the worker submits what was written, generates the rest
  again (with the same tokens), and requests under the same key;
- a lease that is no longer wanted is dropped at the next token;
- after the first signal the worker requests nothing more, submits what is written, and returns the rest by leaving.
"""

import asyncio
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from shoal.ledger.event import MICRO
from shoal.node.session import RoleState, Session
from shoal.node.weights import NEW_VERSION_S, describe_relays, number_version
from shoal.shardcast.client import ShardcastClient
from shoal.util.aio import Backoff, run_together, run_until_set
from shoal.util.units import count_things
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour
from shoal.worker.generator import Generator
from shoal.worker.leases import LeaseTable
from shoal.worker.orders import LeaseOrder, WorkLimits
from shoal.worker.requester import LeaseRequester
from shoal.worker.submitter import NUM_PARALLEL, Submitter

T = TypeVar("T")
POLL_S = 1.0
"""interval of the check for leases without weights"""
ANNOUNCEMENT = Backoff.steady(0.5, 10.0)
"""between two heartbeats that check whether a pulled version is announced"""
SHUTDOWN_GRACE_S = 30.0
"""how long a stopping worker keeps submitting"""


class Worker:
    """One worker; `run` ends when the run is finished, or after the first signal."""

    def __init__(
        self,
        session: Session,
        weights: ShardcastClient,
        behaviour: WorkerBehaviour,
        folder: Path,
        *,
        limits: WorkLimits,
        slots: int,
        device: torch.device | None = None,
    ) -> None:
        self._session, self._weights, self._behaviour = session, weights, behaviour
        self._done: asyncio.Queue[FinishedWork] = asyncio.Queue()
        self._failed: asyncio.Queue[tuple[LeaseOrder, str]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._leases = LeaseTable(folder)
        self._generator = Generator(
            behaviour,
            self._leases,
            lambda work: self._put(self._done, work),
            limits=limits,
            give_back=lambda order, reason: self._put(self._failed, (order, reason)),
            slots=slots,
            device=device,
            spans=session.spans,
        )
        self._requester = LeaseRequester(session, self._leases, self._generator, behaviour.recipe, limits)
        self._submitter = Submitter(session, self._leases, self._requester.note_ended)
        self.counts = self._submitter.counts
        self._version = -1
        """newest version on this machine"""
        self.has_left = False
        """whether the coordinator knows that this worker stopped, and has its leases back"""
        self._started = time.monotonic()
        session.read_state, session.on_heartbeat = self._describe_state, self._requester.take_answer

    async def run(self) -> None:
        """Work until the run is finished or the session stops."""
        submitting = [self._submitter.run() for _ in range(NUM_PARALLEL)]
        handling = [self._collect_work(), self._return_failed()]
        following = [self._follow_weights(), self._report_missing_weights()]
        await run_together(self._work(), self._run_generator(), *following, *handling, *submitting)
        if not self._requester.finished:
            self.has_left = await self._session.leave()

    def describe(self) -> str:
        """A status line, the most important first: a narrow terminal cuts its end."""
        version, requester = self._generator.version, self._requester
        parts = [f"v{version}" if version >= 0 else "no weights yet"]
        wait, answer = self._session.waits.longest(), self._session.answer
        if self._session.problem:
            parts.append(self._session.problem)
        elif requester.failure:
            parts.append(f"returns leases: {requester.failure}")
        elif wait is not None and (requester.lacks_weights or not self._generator.count_done()):
            parts.append(f"waits for {wait.waiting_for}: {wait.detail or requester.reason or wait.name}")
        elif not len(self._leases) and requester.reason:
            parts.append(requester.reason)
        parts += [
            count_things(len(self._leases), "lease"),
            f"{self.counts.delivered} delivered",
            f"owner: {answer.accepted} accepted, credit {answer.earned / MICRO:.3f}, standing {answer.standing.value}",
            f"{self._count_rate()} tokens/s",
        ]
        return "  ".join(parts)

    async def _work(self) -> None:
        """Take leases until there is a reason to stop, then submit what is written."""
        await self._requester.resume()
        await run_until_set(self._session.stopping, self._requester.run())
        await self._submitter.drain(SHUTDOWN_GRACE_S)

    async def _run_generator(self) -> None:
        """Run the generator's thread; it is joined however this task ends."""
        with ThreadPoolExecutor(1, "generator") as pool:
            running = asyncio.get_running_loop().run_in_executor(pool, self._generator.run)
            try:
                await asyncio.shield(running)
            finally:
                self._generator.stop()

    def _put(self, queue: "asyncio.Queue[T]", item: T) -> None:
        """Called from the generator's thread."""
        self._loop.call_soon_threadsafe(queue.put_nowait, item)

    async def _follow_weights(self) -> None:
        """Give every new version to the generator once it is in the ledger.

        Weights travel independently of their announcement and may arrive earlier; by minutes, if the trainer dies
        between the two. Rollouts generated with an unannounced version are refused.
        """
        while True:
            folder = await self._session.waits.retry_forever(
                "weights",
                self._find_newer,
                waiting_for="the relays",
                timeout_s=NEW_VERSION_S,
                reported=self._version < 0,
            )
            self._version = number_version(folder)
            with self._session.spans.span("have", version=self._version):
                pass  # ends the wait: from here on the version is on this machine
            self._session.heartbeat_now()
            if self._version >= self._session.params.steps:
                self._requester.end()  # signed by the publisher: nothing needs to be generated any more
            await self._await_announcement()
            self._generator.update_weights(self._version, folder)
            self._requester.note_weights()

    async def _find_newer(self) -> Path:
        async with aclosing(self._weights.follow()) as folders:
            async for folder in folders:
                if number_version(folder) > self._version:
                    return folder
        raise AssertionError("a client follows forever")

    @property
    def _is_ahead(self) -> bool:
        """Whether the pulled version is not yet known to be in the ledger."""
        return self._version > max(self._session.answer.newest_version, self._requester.newest)

    async def _await_announcement(self) -> None:
        """Wait until the pulled version is in the ledger; its trainer publishes no other before."""
        for attempt in itertools.count():
            if not self._is_ahead:
                return
            await self._requester.wait_news(ANNOUNCEMENT.pause_s(attempt))
            self._session.heartbeat_now()

    async def _report_missing_weights(self) -> None:
        """Report a wait while there are leases but no version usable for them."""
        while True:
            await asyncio.sleep(POLL_S)
            if self._requester.lacks_weights:
                waiting_for, reason, is_ahead = "the relays", describe_relays(self._weights), self._is_ahead
                if is_ahead:
                    waiting_for, reason = "the trainer", f"v{self._version} has arrived but is not announced yet"
                wait = partial(self._wait_for_weights, is_ahead)
                await self._session.waits.retry_forever(
                    "weights", wait, waiting_for=waiting_for, timeout_s=NEW_VERSION_S, reason=reason
                )

    async def _wait_for_weights(self, is_ahead: bool) -> None:
        """Wait for weights, or until it is something else that they wait for."""
        while self._requester.lacks_weights and self._is_ahead == is_ahead:
            await asyncio.sleep(POLL_S)

    async def _collect_work(self) -> None:
        """Write finished work and submit it."""
        while True:
            work = await self._done.get()
            self._requester.note_written()
            record = await asyncio.to_thread(self._leases.write, work, self._behaviour)
            if record is not None:  # otherwise it was cancelled in the meantime
                self._submitter.submit(record)

    async def _return_failed(self) -> None:
        """Return leases that this machine cannot score."""
        while True:
            order, reason = await self._failed.get()
            await self._requester.give_back(order.lease, reason)

    def _describe_state(self) -> RoleState:
        leases = self._requester.list_progress()
        return RoleState(version=self._version, leases=leases, tokens_per_s=self._count_rate())

    def _count_rate(self) -> int:
        """Generated tokens per second since the start."""
        return round(self._generator.num_tokens / max(time.monotonic() - self._started, 1e-9))
