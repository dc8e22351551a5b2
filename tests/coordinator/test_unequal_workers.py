"""Workers of very different speed, one that stalls for a while, one that joins late and leaves: nothing is lost.

A second of the run is one iteration. `bench/unequal.py` measures the same with processes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sqlalchemy import text

from shoal.net.api_error import ApiError
from shoal.protocol.messages import Lease

LONG_S, SHORT_S, TRAIN_S = 2, 1, 4
LAST_S = 200


def is_long(lease: Lease) -> bool:
    return (lease.step + lease.first) % 3 == 0


def has_signal(lease: Lease) -> bool:
    return (lease.step * 7 + lease.first * 3) % 4 != 0


@dataclass(slots=True)
class ScriptedWorker:
    """A worker with one lease at a time."""

    name: str
    slowness: int = 1
    pause: range = field(default_factory=lambda: range(0))
    here: range = field(default_factory=lambda: range(LAST_S))
    lease: Lease | None = None
    left_s: int = 0

    def work(self, world: Any, second: int, signals: dict[str, bool]) -> None:
        """One second of work."""
        if second in self.pause or second not in self.here:
            return
        if self.lease is None:
            self.lease = world.ask(self.name).lease
            if self.lease is not None:
                self.left_s = self.slowness * (LONG_S if is_long(self.lease) else SHORT_S)
            return
        self.left_s -= 1
        if self.left_s <= 0:
            lease, self.lease = self.lease, None
            self._deliver(world, lease, signals)

    def leave(self, world: Any) -> None:
        if self.lease is not None:
            world.run(world.coordinator.return_lease(world.id(self.name), self.lease.lease))
            self.lease = None

    def _deliver(self, world: Any, lease: Lease, signals: dict[str, bool]) -> None:
        try:
            signals[world.submit(self.name, lease)] = has_signal(lease)
        except ApiError as error:
            if error.status not in (409, 410):
                raise  # otherwise another worker was faster, and the ledger shows the loss


def run_course(world: Any, workers: list[ScriptedWorker]) -> list[int]:
    """Train to the last step; return the seconds at which versions were published."""
    signals: dict[str, bool] = {}
    times: list[int] = []
    under_way, ready_s = "", 0
    world.publish(0)
    for second in range(LAST_S):
        world.wait(1)
        for worker in workers:
            if second == worker.here.start:
                world.join(worker.name, worker.name)
            if second == worker.here.stop:
                worker.leave(world)
            worker.work(world, second, signals)
        while (job := world.claim("judge-a").job) is not None:
            world.post("judge-a", world.describe_verdict(job, signal=signals[job.submission]))
        step = len(times) + 1
        if not under_way and (batch := world.cut(step).batch) is not None:
            under_way, ready_s = batch.hash, second + TRAIN_S
        elif under_way and second >= ready_s:
            world.publish(step, under_way)
            times.append(second)
            under_way = ""
            if step == world.params.steps:
                return times
    raise AssertionError(f"only {len(times)} steps in {LAST_S} s")


def read_rows(world: Any, query: str) -> list[Any]:
    return world.query(lambda connection: list(connection.execute(text(query))))


def test_with_unequal_workers_no_group_is_lost_none_is_starved_and_training_continues(
    make_world: Callable[..., Any],
) -> None:
    world = make_world(steps=12, async_level=2, groups_per_batch=4, lease_min_s=12, lease_first_s=12, good_after=1000)
    pause = range(12, 42)
    workers = [
        ScriptedWorker("fast"),
        ScriptedWorker("slow", slowness=4),
        ScriptedWorker("pausing", pause=pause),
        ScriptedWorker("visitor", here=range(8, 50)),
    ]
    times = run_course(world, workers)

    assert sum(second in pause for second in times) >= 3, times
    assert max(after - before for before, after in pairwise(times)) < len(pause) / 2, times

    assert read_rows(world, "SELECT count(*) FROM span WHERE state <> 'accepted'") == [(0,)]
    groups = read_rows(world, "SELECT step, position, signal, batched FROM trained_group")
    assert len(groups) == read_rows(world, "SELECT sum(count) FROM span")[0][0]
    assert all(signal == batched for _, _, signal, batched in groups)
    assert sum(batched for *_, batched in groups) == 12 * 4

    lost = read_rows(world, "SELECT count(*) FROM lease WHERE state <> 'submitted'")[0][0]
    lost += read_rows(world, "SELECT count(*) FROM submission WHERE state <> 'accepted'")[0][0]
    assert lost <= 0.05 * (len(groups) + lost)

    slow = read_rows(world, f"SELECT l.step, l.first FROM lease l WHERE l.node = '{world.id('slow')}'")
    assert any((step + first) % 3 == 0 for step, first in slow), "the slow one had long problems too"
