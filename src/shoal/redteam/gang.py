"""The nodes of one attempt: real workers with a cheat for an author, side by side in this process.

Each joins, takes leases, computes and hands in as `shoal redteam work` does, by the same code. What is added is a look
at what became of their work, to know when the attempt is over.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from shoal.node.recipe import fetch_recipe
from shoal.node.session import Role, Session, SessionError, open_session
from shoal.node.weights import open_weights
from shoal.recipe import Recipe
from shoal.redteam.crew import Limits, Trial
from shoal.redteam.registry import make_authors
from shoal.redteam.sleeper import Sleeper
from shoal.swarm.asking import UnreachableError
from shoal.swarm.messages import Standing, SubmissionState
from shoal.worker.author import Author
from shoal.worker.intake import WorkLimits
from shoal.worker.loop import Worker

LOOK_S = 1.0
START_S = 300.0
"""how long there may be nothing to do before an attempt's time begins"""
FAREWELL_S = 20.0
"""how long its workers have to return their leases"""
_OPEN = (SubmissionState.COMMITTED, SubmissionState.RECEIVED)
_ENDS = {Standing.BANNED: "banned", Standing.LIMITED: "limited"}


class Gang:
    """Those who try one attack together."""

    def __init__(self, trial: Trial, url: str, folder: Path, *, limits: Limits, slots: int, memory_mb: int) -> None:
        self._trial, self._url, self._folder, self._limits, self._slots = trial, url, folder, limits, slots
        self._work_limits = WorkLimits(memory_mb=memory_mb)
        self._judged: dict[str, SubmissionState] = {}
        self._seen = False
        """something was handed in"""
        self._spared: set[str] = set()
        """handed in before the attack had what it needs"""
        self.owners: list[str] = []
        self.num_trials, self.taken = 0, list[str]()

    async def run(self) -> tuple[str, str]:
        """Why it ended, in a word and a sentence. Raises what a worker raised that no coordinator could cause."""
        async with AsyncExitStack() as stack:
            first = await self._open(stack, 1)
            authors = self._make_authors(first, await fetch_recipe(first, self._folder))
            others = [await self._open(stack, number) for number in range(2, len(authors) + 1)]
            sessions = [first, *others]
            tasks = [
                asyncio.create_task(self._work(number, session, author))
                for number, (session, author) in enumerate(zip(sessions, authors, strict=True), start=1)
            ]
            try:
                return await self._watch(first, authors[0], tasks)
            finally:
                await _dismiss(sessions, tasks)

    def _make_authors(self, first: Session, recipe: Recipe) -> tuple[Author, ...]:
        authors = make_authors(self._trial.attack, recipe)
        if self._trial.share == 1.0:
            return authors
        return Sleeper(authors[0], self._trial.share, lambda: first.answer.standing is Standing.GOOD), *authors[1:]

    async def _open(self, stack: AsyncExitStack, number: int) -> Session:
        session = await stack.enter_async_context(open_session(self._url, self._place(number), role=Role.WORKER))
        self.owners.append(session.identity.owner)
        return session

    def _place(self, number: int) -> Path:
        return self._folder / f"node-{number}"

    async def _work(self, number: int, session: Session, author: Author) -> None:
        folder = self._place(number)
        async with open_weights(session, folder / "weights", keep=session.params.async_level + 2) as weights:
            worker = Worker(session, weights, author, folder, limits=self._work_limits, slots=self._slots)
            await session.keep(worker.run())

    async def _watch(self, first: Session, author: Author, tasks: Sequence["asyncio.Task[None]"]) -> tuple[str, str]:
        entered = begun = time.monotonic()
        while time.monotonic() < begun + self._limits.seconds:
            for task in tasks:
                if task.done() and (ended := _read_end(task)) and task is tasks[0]:
                    return ended
            if word := _ENDS.get(first.answer.standing):
                return word, ""
            await self._look(first, is_honest=is_honest_yet(author))
            if not self._seen and time.monotonic() < entered + START_S:
                begun = time.monotonic()  # a swarm that is still starting has nothing to hand out
            if len(self._judged.keys() - self._spared) >= self._limits.submissions:
                return "judged", f"{len(self._judged)} submissions"
            await asyncio.sleep(LOOK_S)
        return "late", ""

    async def _look(self, first: Session, *, is_honest: bool) -> None:
        """What became of the first one's submissions; a coordinator that is away is asked again."""
        for path in sorted((self._place(1) / "receipts").glob("s*.json")):
            name = str(json.loads(path.read_bytes())["body"]["submission"])
            self._seen = True
            if is_honest:
                self._spared.add(name)
            if name in self._judged:
                continue
            try:
                state = (await first.client.explain(name)).state
            except UnreachableError:
                return
            if state not in _OPEN:
                self._judged[name] = state


def is_honest_yet(author: Author) -> bool:
    """Whether a cheat still waits for what it needs, and works honestly until then: it says so by `is_honest`."""
    return bool(getattr(author, "is_honest", False))


def _read_end(task: "asyncio.Task[None]") -> tuple[str, str]:
    """Of a worker that has ended: that it is not wanted any more, or that the run is over."""
    try:
        task.result()
    except SessionError as error:
        return "unwanted", str(error)
    return "done", "the run is finished"


async def _dismiss(sessions: Sequence[Session], tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Let workers deliver what is written and return the rest, then end them."""
    for session in sessions:
        session.stopping.set()
    await asyncio.wait(tasks, timeout=FAREWELL_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
