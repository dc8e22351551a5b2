"""Leases that are held: what a heartbeat tells of them, and what it may take away."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.recipe import Recipe
from shoal.swarm.messages import HeartbeatAnswer, Lease, Standing
from shoal.worker.intake import WorkLimits
from shoal.worker.outbox import Outbox
from shoal.worker.supply import MAX_HELD, Supply


class FakeMill:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.ordered: list[str] = []
        self.cancelled: list[str] = []

    has_enough = is_starved = False
    version = 0

    def order(self, order: object) -> None:
        self.ordered.append(order.lease)  # type: ignore[attr-defined]

    def cancel(self, lease: str) -> None:
        self.cancelled.append(lease)

    def count_done(self) -> dict[str, int]:
        return dict.fromkeys(self.ordered, 3)


@pytest.fixture
def mill() -> FakeMill:
    return FakeMill()


@pytest.fixture
def supply(tmp_path: Path, recipe: Recipe, mill: FakeMill, make_lease: Callable[..., Lease]) -> Supply:
    """One that holds l1 and l2."""
    outbox = Outbox(tmp_path)
    supply = Supply(SimpleNamespace(), outbox, mill, recipe, WorkLimits())  # type: ignore[arg-type]
    for name in ("l1", "l2"):
        outbox.add_lease(make_lease(name))
        supply._take(make_lease(name))
    return supply


class FakeSession:
    """Passes calls on to a coordinator that remembers them."""

    def __init__(self) -> None:
        self.returned: list[str] = []
        self.notes: list[str] = []
        self.client, self.waits = self, self

    def note(self, text: str) -> None:
        self.notes.append(text)

    async def return_lease(self, lease: str) -> None:
        self.returned.append(lease)

    async def insist(self, name: str, call: Callable[[], Awaitable[None]], **_: object) -> None:
        await call()


def test_a_lease_that_cannot_be_scored_goes_back_and_nothing_of_it_is_kept(supply: Supply, tmp_path: Path) -> None:
    session = FakeSession()
    supply._session = session  # type: ignore[assignment]
    asyncio.run(supply.give_back("l1", "gave up: a fault of this machine: a zygote died"))
    asyncio.run(supply.give_back("nobody", "was cancelled before"))
    assert session.returned == ["l1"]
    assert list(supply.leases) == ["l2"] and not (tmp_path / "orders" / "l1.json").exists()
    assert "l1 is given back, nothing is claimed for it" in session.notes[0] and "a zygote died" in supply.fault
    supply.mark_written("l2")
    assert supply.fault == "", "the machine can score again"


def answer(*cancelled: str) -> HeartbeatAnswer:
    return HeartbeatAnswer(
        cancelled=cancelled,
        newest_version=0,
        oldest_version=0,
        head=None,
        server_time_ms=0,
        next_s=1,
        standing=Standing.GOOD,
        finished=False,
        reasons=(),
    )


def test_what_is_not_wanted_any_more_is_dropped(supply: Supply, mill: FakeMill, tmp_path: Path) -> None:
    supply.hear(answer("l1", "l9"))
    assert list(supply.leases) == ["l2"] and mill.cancelled == ["l1"]
    assert [path.name for path in (tmp_path / "orders").iterdir()] == ["l2.json"]


def test_a_file_on_its_way_is_not_dropped_because_its_lease_is_over(
    supply: Supply, mill: FakeMill, tmp_path: Path
) -> None:
    """To the coordinator a lease is over as soon as its manifest is there, and its file is still to come."""
    supply.mark_written("l1")
    (tmp_path / "outbox" / "l1.parquet").write_bytes(b"rollouts")
    supply.hear(answer("l1"))
    assert "l1" in supply.leases and mill.cancelled == []
    assert (tmp_path / "outbox" / "l1.parquet").exists()


def test_a_heartbeat_does_not_ask_about_what_is_on_its_way(supply: Supply) -> None:
    supply.mark_written("l1")
    assert [item.lease for item in supply.list_progress()] == ["l2"]


def test_a_lease_that_came_back_is_held_like_any_other(
    supply: Supply, mill: FakeMill, make_lease: Callable[..., Lease]
) -> None:
    supply.mark_written("l1")
    supply.end("l1")
    supply._take(make_lease("l1"))
    supply.hear(answer("l1"))
    assert mill.cancelled == ["l1"]


def test_a_coordinator_that_gives_leases_without_end_is_asked_for_no_more(
    supply: Supply, make_lease: Callable[..., Lease]
) -> None:
    """Those that no version may write would be kept for ever."""
    for number in range(3, MAX_HELD + 1):
        assert not supply._has_enough()
        supply._take(make_lease(f"l{number}"))
    assert supply._has_enough() and len(supply.list_progress()) == MAX_HELD
    supply.end("l7")
    assert not supply._has_enough()


def test_who_lost_a_lease_for_want_of_weights_asks_for_no_other_before_it_has_them(
    supply: Supply, mill: FakeMill, make_lease: Callable[..., Lease]
) -> None:
    supply._take(make_lease("l3", step=9, oldest_version=2))
    supply.hear(answer("l1"))
    assert not supply.is_barren, "v0 may write l1: it was not wanted, for whatever reason"
    supply.hear(answer("l3"))
    assert supply.is_barren and supply._has_enough()
    mill.version = 2
    assert not supply.is_barren and not supply._has_enough()


def test_a_lease_that_is_older_than_the_weights_is_no_want_of_them(
    supply: Supply, mill: FakeMill, make_lease: Callable[..., Lease]
) -> None:
    mill.version = 5
    supply.hear(answer("l1", "l2"))
    assert not supply._has_enough(), "nobody else may be there to write for the next version"


def test_a_lease_that_a_killed_worker_had_kept_is_not_taken_twice(
    tmp_path: Path, recipe: Recipe, mill: FakeMill, make_lease: Callable[..., Lease]
) -> None:
    """The kill came after the lease was on disk and before its key was dropped: the key brings it once more."""
    outbox, session = Outbox(tmp_path), SimpleNamespace(client=SimpleNamespace(clock_offset_ms=0))
    outbox.add_lease(make_lease("l1", deadline_ms=2**50))
    key = outbox.find_key()
    supply = Supply(session, outbox, mill, recipe, WorkLimits())  # type: ignore[arg-type]

    async def start() -> None:
        await supply.resume()
        await supply._accept(make_lease("l1", deadline_ms=2**50))
        supply.end("l1")  # delivered meanwhile
        await supply._accept(make_lease("l1", deadline_ms=2**50))
        await supply._accept(make_lease("l2"))

    asyncio.run(start())
    assert mill.ordered == ["l1", "l2"] and outbox.find_key() != key
