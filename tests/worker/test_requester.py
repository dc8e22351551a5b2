"""Leases that are requested and held: what a heartbeat reports about them, and what it may cancel."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fixtures.answers import make_heartbeat_answer

from shoal.protocol.messages import HeartbeatAnswer, Lease, LeaseAnswer, RolloutEntry
from shoal.recipe import Recipe
from shoal.worker.behaviour import FinishedWork
from shoal.worker.leases import LeaseState, LeaseTable
from shoal.worker.orders import LeaseOrder, WorkLimits
from shoal.worker.requester import LONG_POLL_S, MAX_HELD, LeaseRequester
from shoal.worker.submitter import Submitter

FAR_MS = 2**50


class FakeGenerator:
    """A generator that has loaded v0 and finished three rollouts of every lease."""

    has_enough = False
    newest = 0
    unusable: tuple[LeaseOrder, ...] = ()
    """leases of versions that are gone, until they are listed"""

    @property
    def lacks_weights(self) -> bool:
        return bool(self.unusable)

    def list_unusable(self) -> tuple[LeaseOrder, ...]:
        found, self.unusable = self.unusable, ()
        return found

    def count_done(self) -> dict[str, int]:
        return {f"l{number}": 3 for number in range(1, 100)}


class FakeSession:
    """Forwards calls to a coordinator that records them."""

    def __init__(self) -> None:
        self.returned: list[str] = []
        self.client = self
        self.clock_offset_ms = 0

    async def return_lease(self, lease: str) -> None:
        self.returned.append(lease)

    async def ask_coordinator(self, name: str, call: Callable[[], Awaitable[None]], **_: object) -> None:
        await call()


class RequesterSetup:
    """A requester with its table, holding l1 and l2."""

    def __init__(self, folder: Path, recipe: Recipe, make_lease: Callable[..., Lease]) -> None:
        self._recipe, self._make_lease = recipe, make_lease
        self.folder, self.generator, self.session = folder, FakeGenerator(), FakeSession()
        self.open()

    def open(self) -> None:
        self.leases = LeaseTable(self.folder)
        generator: Any = self.generator
        session: Any = self.session
        self.requester = LeaseRequester(session, self.leases, generator, self._recipe, WorkLimits())

    def accept(self, name: str, **changes: object) -> None:
        key = self.leases.find_key()
        asyncio.run(self.requester._accept(self._make_lease(name, **changes), key))

    def write(self, name: str) -> None:
        record = self.leases.find(name)
        assert record is not None
        while (order := self.leases.start_next(0)) is not None and order.lease != name:
            pass
        work = FinishedWork(order=record.order, version=0, groups=(), proofs={}, seconds=0.0)
        written = SimpleNamespace(sha256="ab" * 32, size=4, entries=(RolloutEntry(hash="cd" * 32, tokens=1),))
        behaviour: Any = SimpleNamespace(write=lambda path, *_: path.write_bytes(b"work") and written)
        self.leases.write(work, behaviour)

    @property
    def held(self) -> list[str]:
        states = (LeaseState.HELD, LeaseState.RUNNING)
        return [record.order.lease for record in self.leases.list_records(*states)]


@pytest.fixture
def setup(tmp_path: Path, recipe: Recipe, make_lease: Callable[..., Lease]) -> RequesterSetup:
    setup = RequesterSetup(tmp_path, recipe, make_lease)
    for name in ("l1", "l2"):
        setup.accept(name, deadline_ms=FAR_MS)
    return setup


def answer(*cancelled: str) -> HeartbeatAnswer:
    return make_heartbeat_answer(cancelled=cancelled)


def test_a_lease_that_cannot_be_scored_goes_back_and_nothing_of_it_is_kept(setup: RequesterSetup, log) -> None:
    asyncio.run(setup.requester.give_back("l1", "a fault of this machine: a sandbox died"))
    asyncio.run(setup.requester.give_back("nobody", "was cancelled before"))
    assert setup.session.returned == ["l1"]
    assert setup.held == ["l2"] and not (setup.folder / "leases" / "l1.json").exists()
    assert "returning lease l1, nothing is submitted for it" in log.messages[0]
    assert "a sandbox died" in setup.requester.failure
    setup.requester.note_written()
    assert setup.requester.failure == "", "the machine can score again"


def test_what_is_not_wanted_any_more_is_dropped(setup: RequesterSetup) -> None:
    setup.requester.take_answer(answer("l1", "l9"))
    assert setup.held == ["l2"]
    assert [path.name for path in (setup.folder / "leases").iterdir()] == ["l2.json"]


def test_a_file_on_its_way_is_not_dropped_because_its_lease_is_over(setup: RequesterSetup) -> None:
    """For the coordinator a lease ends with its manifest, while its file is still to be uploaded."""
    setup.write("l1")
    setup.requester.take_answer(answer("l1"))
    record = setup.leases.find("l1")
    assert record is not None and record.state is LeaseState.WRITTEN
    assert setup.leases.path_of("l1").exists()


def test_a_heartbeat_does_not_ask_about_what_is_on_its_way(setup: RequesterSetup) -> None:
    setup.write("l1")
    assert [(item.lease, item.done) for item in setup.requester.list_progress()] == [("l2", 3)]


def test_a_lease_that_came_back_is_held_like_any_other(setup: RequesterSetup) -> None:
    setup.write("l1")
    setup.leases.end("l1")
    setup.accept("l1")
    assert setup.held == ["l2", "l1"]
    setup.requester.take_answer(answer("l1"))
    assert setup.held == ["l2"]


def test_a_coordinator_that_gives_leases_without_end_is_asked_for_no_more(setup: RequesterSetup) -> None:
    """Leases that no version may be used for would be kept forever."""
    for number in range(3, MAX_HELD + 1):
        assert not setup.requester._has_enough()
        setup.accept(f"l{number}")
    assert setup.requester._has_enough() and len(setup.requester.list_progress()) == MAX_HELD
    setup.leases.end("l7")
    assert not setup.requester._has_enough()


def request_leases(setup: RequesterSetup, ask_lease: Callable[..., Awaitable[LeaseAnswer]], **session: Any) -> None:
    """Run the requester with a coordinator that answers so, until the run is finished."""

    async def run() -> None:
        client: Any = SimpleNamespace(ask_lease=ask_lease, clock_offset_ms=0, return_lease=setup.session.return_lease)
        own: Any = SimpleNamespace(client=client, ask_coordinator=lambda name, call, **_: call(), **session)
        setup.requester._session = own
        async with asyncio.timeout(LONG_POLL_S / 2):
            await setup.requester.run()

    asyncio.run(run())


def test_a_version_that_no_step_accepts_is_asked_for_once_and_a_newer_one_as_soon_as_it_is_there(
    setup: RequesterSetup,
) -> None:
    asked: list[int] = []

    async def ask_lease(key: str, *, version: int, **_: object) -> LeaseAnswer:
        asked.append(version)
        if len(asked) == 1:
            asyncio.get_running_loop().call_later(0.2, setattr, setup.generator, "newest", 2)
            return LeaseAnswer(lease=None, code="version")
        return LeaseAnswer(lease=None, code="finished")

    request_leases(setup, ask_lease)
    assert asked == [0, 2]


def test_a_request_is_repeated_under_its_key_when_newer_weights_arrive(setup: RequesterSetup) -> None:
    asked: list[tuple[str, int]] = []

    def bring_weights() -> None:
        setup.generator.newest = 1
        setup.requester.note_weights()

    async def ask_lease(key: str, *, version: int, **_: object) -> LeaseAnswer:
        asked.append((key, version))
        if len(asked) == 1:
            asyncio.get_running_loop().call_later(0.1, bring_weights)
            await asyncio.sleep(3600)
        return LeaseAnswer(lease=None, code="finished")

    request_leases(setup, ask_lease)
    assert [version for _, version in asked] == [0, 1] and len({key for key, _ in asked}) == 1


def test_a_worker_that_must_does_its_proof_of_work_again(setup: RequesterSetup) -> None:
    done: list[str] = []

    async def join_again() -> None:
        done.append("work")

    async def ask_lease(key: str, **_: object) -> LeaseAnswer:
        return LeaseAnswer(lease=None, code="finished" if done else "work", retry_after_s=1)

    request_leases(setup, ask_lease, join_again=join_again)
    assert done == ["work"]


def test_a_lease_whose_version_is_gone_is_returned_and_not_waited_for(setup: RequesterSetup) -> None:
    record = setup.leases.find("l1")
    assert record is not None
    setup.generator.unusable = (record.order,)

    async def ask_lease(key: str, **_: object) -> LeaseAnswer:
        return LeaseAnswer(lease=None, code="finished")

    request_leases(setup, ask_lease)
    assert setup.session.returned == ["l1"] and setup.held == ["l2"]


def test_a_lease_that_is_granted_twice_is_held_once(setup: RequesterSetup) -> None:
    key = setup.leases.find_key()
    setup.accept("l1")
    assert setup.held == ["l1", "l2"] and setup.leases.find_key() != key


def test_a_restart_drops_leases_whose_time_is_over(setup: RequesterSetup) -> None:
    setup.accept("l3", deadline_ms=1)
    setup.open()
    asyncio.run(setup.requester.resume())
    assert setup.held == ["l1", "l2"]


def test_a_node_at_its_limit_asks_again_as_soon_as_its_work_is_delivered(setup: RequesterSetup) -> None:
    """Not at the next heartbeat: with a limit of one lease that would be most of a new worker's time."""
    asked: list[str] = []
    answers = [
        LeaseAnswer(lease=None, code="busy", reason="at the limit", retry_after_s=3600),
        LeaseAnswer(lease=None, code="finished"),
    ]

    async def ask_lease(key: str, **_: object) -> LeaseAnswer:
        asked.append(key)
        return answers[len(asked) - 1]

    async def accept(*_: object) -> None:
        """The coordinator takes the commit and the file."""

    async def run() -> None:
        client: Any = SimpleNamespace(ask_lease=ask_lease, commit=accept, upload=accept, clock_offset_ms=0)
        session: Any = SimpleNamespace(client=client, ask_coordinator=lambda name, call, **_: call())
        setup.requester._session = session
        submitter = Submitter(session, setup.leases, setup.requester.note_ended)
        async with asyncio.timeout(LONG_POLL_S / 2), asyncio.TaskGroup() as tasks:
            requesting = tasks.create_task(setup.requester.run())
            while not asked:
                await asyncio.sleep(0.01)
            submitting = tasks.create_task(submitter.run())
            await requesting
            submitting.cancel()

    setup.write("l1")
    asyncio.run(run())
    assert len(asked) == 2 and setup.requester.finished
