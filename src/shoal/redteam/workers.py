"""The cheating workers of one attempt, and an engine that does honest work for a scripted attacker.

Each worker of an attempt joins, takes leases, computes and submits with the code of `shoal redteam work`. In addition,
the states of their submissions are polled, to know when the attempt is over.

    relays -> weights -> generator (a thread) -> work          `HonestEngine`: one machine, however many identities

`HonestEngine` is the worker's own generator with the honest behaviour: every validator accepts its work.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

from shoal.errors import UnreachableError
from shoal.node.recipe import fetch_recipe
from shoal.node.session import Role, Session, SessionError, open_session
from shoal.node.weights import number_version, open_weights
from shoal.protocol.messages import Standing, SubmissionState
from shoal.recipe import Recipe
from shoal.redteam.behaviours.forged_work import SubstitutingBehaviour
from shoal.redteam.behaviours.sleeper import SleeperBehaviour
from shoal.redteam.campaign import AttackAttempt, AttemptLimits
from shoal.redteam.registry import make_behaviours
from shoal.shardcast.client import ShardcastClient
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour
from shoal.worker.generator import Generator
from shoal.worker.leases import LeaseTable
from shoal.worker.orders import LeaseOrder, WorkLimits
from shoal.worker.submitter import SubmissionCounts
from shoal.worker.worker import Worker

POLL_S = 1.0
START_S = 300.0
"""maximum wait for the first submission before the time of an attempt starts to count"""
SHUTDOWN_GRACE_S = 20.0
"""time for its workers to return their leases"""
_OPEN = (SubmissionState.COMMITTED, SubmissionState.RECEIVED)
_ENDS = {Standing.BANNED: "banned", Standing.LIMITED: "limited"}
_UNSUITABLE = frozenset({"rollouts", "tokens", "too_large", "version", "blob_known"})
"""codes for a manifest that is refused for what it says: no validator will see the work"""


class WorkerAttempt:
    """The workers that carry out one attack together."""

    def __init__(self, attempt: AttackAttempt, url: str, folder: Path, limits: AttemptLimits) -> None:
        self._attempt, self._url, self._folder, self._limits = attempt, url, folder, limits
        self._states: dict[str, SubmissionState] = {}
        self._has_submitted = False
        """whether anything was submitted"""
        self._honest: set[str] = set()
        """submissions from before the attack had what it needs, or in which it found nothing to change"""
        self._counts: SubmissionCounts | None = None
        """of the first worker"""

    async def run(self) -> None:
        """Run it and fill in the outcome. Raises a worker's exception if no coordinator could have caused it."""
        async with AsyncExitStack() as stack:
            first = await self._open(stack, 1)
            behaviours = self._make_behaviours(first, await fetch_recipe(first, self._folder))
            others = [await self._open(stack, number) for number in range(2, len(behaviours) + 1)]
            sessions = [first, *others]
            works = map(self._work, range(1, len(sessions) + 1), sessions, behaviours)
            tasks = [asyncio.create_task(work) for work in works]
            try:
                self._attempt.ended, self._attempt.text = await self._watch(first, behaviours[0], tasks)
            finally:
                await _stop_workers(sessions, tasks)
                self._attempt.unchanged = sorted(_list_unchanged(behaviours[0]))

    def _make_behaviours(self, first: Session, recipe: Recipe) -> tuple[WorkerBehaviour, ...]:
        behaviours = make_behaviours(self._attempt.attack, recipe)
        if self._attempt.share == 1.0:
            return behaviours
        sleeper = SleeperBehaviour(behaviours[0], self._attempt.share, lambda: first.answer.standing is Standing.GOOD)
        return sleeper, *behaviours[1:]

    async def _open(self, stack: AsyncExitStack, number: int) -> Session:
        session = await stack.enter_async_context(open_session(self._url, self._folder_of(number), role=Role.WORKER))
        self._attempt.owners = (*self._attempt.owners, session.identity.owner)
        return session

    def _folder_of(self, number: int) -> Path:
        return self._folder / f"node-{number}"

    async def _work(self, number: int, session: Session, behaviour: WorkerBehaviour) -> None:
        folder = self._folder_of(number)
        async with open_weights(session, folder / "weights", keep=session.params.async_level + 2) as weights:
            limits = WorkLimits(memory_mb=self._limits.memory_mb)
            worker = Worker(session, weights, behaviour, folder, limits=limits, slots=self._limits.slots)
            if number == 1:
                self._counts = worker.counts
            await session.keep(worker.run())

    async def _watch(
        self, first: Session, behaviour: WorkerBehaviour, tasks: Sequence["asyncio.Task[None]"]
    ) -> tuple[str, str]:
        """Why it ended, as a code and a text."""
        entered = begun = time.monotonic()
        while time.monotonic() < begun + self._limits.seconds:
            for task in tasks:
                if task.done() and (ended := _read_end(task)) and task is tasks[0]:
                    return ended
            if word := _ENDS.get(first.answer.standing):
                return word, ""
            if refusal := self._find_refusal():
                return "refused", refusal
            await self._update_states(first, behaviour)
            if not self._has_submitted and time.monotonic() < entered + START_S:
                begun = time.monotonic()  # a starting swarm has no leases yet
            if len(self._states.keys() - self._honest) >= self._limits.submissions:
                return "judged", f"{len(self._states)} submissions"
            await asyncio.sleep(POLL_S)
        return "late", ""

    def _find_refusal(self) -> str:
        """Why a manifest of the first worker was refused for what it says; empty if none was."""
        refusal = None if self._counts is None else self._counts.refusal
        return refusal.text if refusal is not None and refusal.code in _UNSUITABLE else ""

    async def _update_states(self, first: Session, behaviour: WorkerBehaviour) -> None:
        """Update the states of the first worker's submissions; retried later if the coordinator is unreachable."""
        # A cheat that still waits for what it needs works honestly, and reports that with `is_honest`.
        is_honest, unchanged = bool(getattr(behaviour, "is_honest", False)), _list_unchanged(behaviour)
        for path in sorted((self._folder_of(1) / "receipts").glob("s*.json")):
            receipt = json.loads(path.read_bytes())["body"]
            name = str(receipt["submission"])
            self._has_submitted = True
            if is_honest or receipt["lease"] in unchanged:
                self._honest.add(name)
            if name in self._states:
                continue
            try:
                state = (await first.client.explain(name)).state
            except UnreachableError:
                return
            if state not in _OPEN:
                self._states[name] = state


def _list_unchanged(behaviour: WorkerBehaviour) -> Set[str]:
    return behaviour.unchanged if isinstance(behaviour, SubstitutingBehaviour) else frozenset()


def _read_end(task: "asyncio.Task[None]") -> tuple[str, str]:
    """Why a worker ended: the run excluded it, or the run is finished."""
    try:
        task.result()
    except SessionError as error:
        return "unwanted", str(error)
    return "done", "the run is finished"


async def _stop_workers(sessions: Sequence[Session], tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Let workers submit finished work and return the rest, then end them."""
    for session in sessions:
        session.stopping.set()
    await asyncio.wait(tasks, timeout=SHUTDOWN_GRACE_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


SLOTS, MEMORY_MB = 64, 1024


class HonestEngine:
    """The engine; created by `open_honest_engine`."""

    def __init__(self, recipe: Recipe) -> None:
        loop = asyncio.get_running_loop()
        self._orders: dict[str, asyncio.Future[FinishedWork]] = {}
        self.behaviour, self._leases = WorkerBehaviour(recipe), LeaseTable()

        def take_work(work: FinishedWork) -> None:
            loop.call_soon_threadsafe(self._finish, work)  # this is the generator's thread

        limits = WorkLimits(memory_mb=MEMORY_MB)
        self.generator = Generator(self.behaviour, self._leases, take_work, limits=limits, slots=SLOTS)
        self.tasks: list[asyncio.Task[None]] = []
        """its background tasks; they end only by failing"""

    async def write(self, order: LeaseOrder) -> FinishedWork:
        """The work for an order, with the newest allowed version; raises the engine's exception if it has ended."""
        self._orders[order.lease] = done = asyncio.get_running_loop().create_future()
        self._leases.hold(order)
        try:
            await asyncio.wait({done, *self.tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in self.tasks:
                if task.done():
                    task.result()
            return await done
        finally:
            self._orders.pop(order.lease)
            self._leases.end(order.lease)

    def _finish(self, work: FinishedWork) -> None:
        done = self._orders.get(work.order.lease)
        if done is not None and not done.done():
            done.set_result(work)


@asynccontextmanager
async def open_honest_engine(
    session: Session, recipe: Recipe, folder: Path, *, keep: int
) -> AsyncIterator[HonestEngine]:
    """An engine with the weights of a session's run, fetched into `folder`."""
    engine = HonestEngine(recipe)
    async with open_weights(session, folder, keep=keep) as weights:
        works = (_run_generator(engine.generator), _follow(engine.generator, weights))
        engine.tasks = [asyncio.create_task(work) for work in works]
        try:
            yield engine
        finally:
            for task in engine.tasks:
                task.cancel()
            await asyncio.gather(*engine.tasks, return_exceptions=True)


async def _run_generator(generator: Generator) -> None:
    """Run the generator's thread; waits for the thread whatever ends this task."""
    with ThreadPoolExecutor(1, "honest-engine") as pool:
        running = asyncio.get_running_loop().run_in_executor(pool, generator.run)
        try:
            await asyncio.shield(running)
        finally:
            generator.stop()


async def _follow(generator: Generator, weights: ShardcastClient) -> None:
    """Offer every new version to the generator."""
    async with aclosing(weights.follow()) as folders:
        async for folder in folders:
            generator.update_weights(number_version(folder), folder)
