"""Which weights a worker uses: only those that the coordinator has announced."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fixtures.answers import make_heartbeat_answer

from shoal.protocol.messages import HeartbeatAnswer, Lease
from shoal.recipe import Recipe
from shoal.util.aio import Backoff
from shoal.util.spans import SpanLog
from shoal.util.waits import RoleWaits
from shoal.worker import worker as loop
from shoal.worker.behaviour import WorkerBehaviour
from shoal.worker.orders import WorkLimits
from shoal.worker.worker import Worker


def make_answer(newest: int) -> HeartbeatAnswer:
    return make_heartbeat_answer(newest_version=newest)


class FakeSession:
    """A session in which version `announced` is announced after `late` heartbeats."""

    def __init__(self, newest: int, announced: int, late: int = 0) -> None:
        self.answer, self._announced, self._late = make_answer(newest), announced, late
        self.waits, self.spans, self.problem = RoleWaits("worker"), SpanLog(None, "worker"), ""
        self.client = SimpleNamespace(clock_offset_ms=0)
        self.on_heartbeat: Callable[[HeartbeatAnswer], None]
        self.read_state: Any
        self.num_beats = 0
        self.params = SimpleNamespace(steps=9)
        self.knows_end = False

    def note_finished(self) -> None:
        self.knows_end = True

    def note(self, text: str) -> None:
        pass

    def heartbeat_now(self) -> None:
        self.num_beats += 1
        if self.num_beats > self._late:
            self.answer = make_answer(self._announced)
            self.on_heartbeat(self.answer)


class FakeWeights:
    """Has one version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.progress = SimpleNamespace(sources=())

    async def follow(self) -> Any:
        yield self._folder
        await asyncio.Event().wait()


async def follow_weights(worker: Worker, until: Callable[[], bool]) -> None:
    following = asyncio.create_task(worker._follow_weights())
    try:
        async with asyncio.timeout(20):
            while not until():
                await asyncio.sleep(0.001)
    finally:
        following.cancel()


def make_worker(session: FakeSession, recipe: Recipe, folder: Path) -> Worker:
    weights: Any = FakeWeights(folder / "v4")
    return Worker(session, weights, WorkerBehaviour(recipe), folder, limits=WorkLimits(), slots=4)  # type: ignore[arg-type]


def test_a_version_is_written_with_once_it_is_announced(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer may die after the broadcast and before the announcement; rollouts generated then are refused."""
    monkeypatch.setattr(loop, "ANNOUNCEMENT", Backoff.steady(0.001, 0.01))
    session = FakeSession(newest=3, announced=4, late=3)

    async def run() -> None:
        worker = make_worker(session, recipe, tmp_path)

        def is_ahead() -> bool:
            assert worker._generator.newest == -1 or session.num_beats > 3
            return worker._generator.newest >= 0

        await follow_weights(worker, is_ahead)
        assert worker._generator.newest == 4 and session.num_beats == 4

    asyncio.run(run())


def test_the_last_version_ends_a_worker_before_the_coordinator_does(tmp_path: Path, recipe: Recipe) -> None:
    """The publisher signed it: nothing needs to be generated any more, even if the coordinator is gone by then."""
    session = FakeSession(newest=3, announced=3)
    session.params.steps = 4

    async def run() -> None:
        worker = make_worker(session, recipe, tmp_path)
        await follow_weights(worker, lambda: worker._requester.finished)

    asyncio.run(run())
    assert session.knows_end


def test_a_lease_announces_a_version_as_well(tmp_path: Path, recipe: Recipe, make_lease: Callable[..., Lease]) -> None:
    session = FakeSession(newest=3, announced=3)

    async def run() -> None:
        worker = make_worker(session, recipe, tmp_path)
        following = asyncio.create_task(follow_weights(worker, lambda: worker._generator.newest >= 0))
        while not session.num_beats:
            await asyncio.sleep(0.001)
        assert worker._generator.newest == -1
        await worker._requester._accept(make_lease("l1", step=5, version=4), "key")
        await following
        assert worker._generator.newest == 4

    asyncio.run(run())


def test_the_status_line_has_problems_first_and_names_whose_totals_it_shows(tmp_path: Path, recipe: Recipe) -> None:
    session = FakeSession(newest=3, announced=3)
    session.answer = make_heartbeat_answer(accepted=185, earned=179_000)

    async def run() -> None:
        worker = make_worker(session, recipe, tmp_path)
        counts = "0 leases  0 delivered  owner: 185 accepted, credit 0.179, standing good  0 tokens/s"
        assert worker.describe() == f"no weights yet  {counts}"
        session.problem = "the coordinator does not answer: refused"
        assert worker.describe() == f"no weights yet  the coordinator does not answer: refused  {counts}"

    asyncio.run(run())
