"""Which weights a worker writes with: those that the coordinator has spoken of, and no others."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.node.spans import SpanLog
from shoal.node.waits import RoleWaits
from shoal.recipe import Recipe
from shoal.swarm.messages import HeartbeatAnswer, Lease, Standing
from shoal.worker import loop
from shoal.worker.author import Author
from shoal.worker.intake import WorkLimits
from shoal.worker.loop import Worker


def make_answer(newest: int) -> HeartbeatAnswer:
    return HeartbeatAnswer(
        cancelled=(),
        newest_version=newest,
        oldest_version=0,
        head=None,
        server_time_ms=0,
        next_s=1,
        standing=Standing.GOOD,
        finished=False,
        reasons=(),
    )


class FakeSession:
    """A session that hears of version `announced` with the next heartbeat but `late`."""

    def __init__(self, newest: int, announced: int, late: int = 0) -> None:
        self.answer, self._announced, self._late = make_answer(newest), announced, late
        self.waits, self.spans, self.problem = RoleWaits("worker"), SpanLog(None, "worker"), ""
        self.client = SimpleNamespace(clock_offset_ms=0)
        self.heard: Callable[[HeartbeatAnswer], None]
        self.describe: Any
        self.num_beats = 0

    def beat_soon(self) -> None:
        self.num_beats += 1
        if self.num_beats > self._late:
            self.answer = make_answer(self._announced)
            self.heard(self.answer)


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
    return Worker(session, weights, Author(recipe), folder, limits=WorkLimits(), slots=4)  # type: ignore[arg-type]


def test_a_version_is_written_with_once_it_is_announced(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer may die after the broadcast and before the announcement; what is written then nobody takes."""
    monkeypatch.setattr(loop, "ANNOUNCED_S", 0.001)
    session = FakeSession(newest=3, announced=4, late=3)

    async def run() -> None:
        worker = make_worker(session, recipe, tmp_path)

        def is_ahead() -> bool:
            assert worker._mill._offered is None or session.num_beats > 3
            return worker._mill._offered is not None

        await follow_weights(worker, is_ahead)
        assert worker._mill._offered == (4, tmp_path / "v4") and session.num_beats == 4

    asyncio.run(run())


def test_a_lease_announces_a_version_as_well(tmp_path: Path, recipe: Recipe, make_lease: Callable[..., Lease]) -> None:
    session = FakeSession(newest=3, announced=3)

    async def run() -> None:
        worker = make_worker(session, recipe, tmp_path)
        await follow_weights(worker, lambda: session.num_beats > 0)
        assert worker._mill._offered is None
        worker._supply._take(make_lease("l1", step=5, newest_version=4))
        assert worker._mill._offered == (4, tmp_path / "v4")

    asyncio.run(run())
