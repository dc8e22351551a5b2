"""The state of leases: which transitions exist, and what is on disk after kills."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.identity.documents import Tag, sign_document
from shoal.identity.keys import Key
from shoal.node.receipts import SignedDocumentStore
from shoal.protocol.messages import Lease, RolloutEntry
from shoal.recipe import Recipe
from shoal.rollout import Group
from shoal.submission.write import Proofs, WrittenSubmission
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour
from shoal.worker.leases import LeaseRecord, LeaseState, LeaseTable
from shoal.worker.orders import LeaseOrder, WorkLimits, take_order

MakeOrder = Callable[..., LeaseOrder]


class KillError(Exception):
    """Simulates kill -9."""


class Writer(WorkerBehaviour):
    """Writes a placeholder instead of rollouts."""

    def write(self, path: Path, groups: Sequence[Group], proofs: Proofs) -> WrittenSubmission:
        path.write_bytes(b"work")
        return WrittenSubmission(path=path, sha256="ab" * 32, size=4, entries=(RolloutEntry(hash="cd" * 32, tokens=1),))


@pytest.fixture
def make_order(recipe: Recipe, make_lease: Callable[..., Lease]) -> MakeOrder:
    return lambda *args, **changes: take_order(make_lease(*args, **changes), recipe, WorkLimits())


@pytest.fixture
def writer(recipe: Recipe) -> Writer:
    return Writer(recipe)


def finish(order: LeaseOrder) -> FinishedWork:
    return FinishedWork(order=order, version=0, groups=(), proofs={}, seconds=0.0)


def write(table: LeaseTable, order: LeaseOrder, writer: Writer) -> LeaseRecord:
    table.hold(order, fence=7)
    assert table.start_next(0) == order
    record = table.write(finish(order), writer)
    assert record is not None
    return record


def state_of(table: LeaseTable, lease: str) -> LeaseState | None:
    record = table.find(lease)
    return None if record is None else record.state


def test_a_lease_goes_from_held_to_done(tmp_path: Path, make_order: MakeOrder, writer: Writer) -> None:
    table, order = LeaseTable(tmp_path), make_order("l1")
    table.hold(order, fence=7)
    assert state_of(table, "l1") is LeaseState.HELD
    table.start_next(0)
    assert state_of(table, "l1") is LeaseState.RUNNING and table.start_next(0) is None
    record = table.write(finish(order), writer)
    assert record is not None and record.manifest is not None
    assert (record.state, record.manifest.fence, record.manifest.blob) == (LeaseState.WRITTEN, 7, "ab" * 32)
    table.mark_committed("l1")
    assert state_of(table, "l1") is LeaseState.COMMITTED
    table.end("l1")
    assert table.find("l1") is None and len(table) == 0 and list((tmp_path / "leases").iterdir()) == []


def test_other_moves_are_refused(tmp_path: Path, make_order: MakeOrder, writer: Writer) -> None:
    table, order = LeaseTable(tmp_path), make_order("l1")
    table.hold(order)
    with pytest.raises(AssertionError, match="cannot move from held to written"):
        table.write(finish(order), writer)
    with pytest.raises(AssertionError, match="cannot move from held to committed"):
        table.mark_committed("l1")
    with pytest.raises(AssertionError, match="taken only once"):
        table.hold(order)
    table.end("l1")
    write(table, order, writer)
    with pytest.raises(AssertionError, match="cannot move from written to written"):
        table.write(finish(order), writer)


def test_a_lease_that_was_cancelled_meanwhile_is_not_written(
    tmp_path: Path, make_order: MakeOrder, writer: Writer
) -> None:
    table, order = LeaseTable(tmp_path), make_order("l1")
    table.hold(order)
    table.start_next(0)
    table.end("l1")
    assert table.write(finish(order), writer) is None
    assert list((tmp_path / "leases").iterdir()) == []


def test_a_restart_finds_each_lease_where_it_was_and_generates_again_what_was_running(
    tmp_path: Path, make_order: MakeOrder, writer: Writer
) -> None:
    table = LeaseTable(tmp_path)
    for name in ("l2", "l3"):
        write(table, make_order(name), writer)
    table.mark_committed("l3")
    table.hold(make_order("l10", step=1), fence=3)
    table.start_next(0)
    table.hold(make_order("l11", step=2))
    again = LeaseTable(tmp_path)
    states = {name: state_of(again, name) for name in ("l2", "l3", "l10", "l11")}
    assert states == {
        "l2": LeaseState.WRITTEN,
        "l3": LeaseState.COMMITTED,
        "l10": LeaseState.HELD,
        "l11": LeaseState.HELD,
    }
    assert again.find("l2") == table.find("l2") and again.path_of("l2").read_bytes() == b"work"
    again.mark_committed("l3")  # the coordinator is asked again, and answers as before


@pytest.mark.parametrize("survived", range(3))
def test_a_kill_while_a_lease_ends_never_has_it_written_again(
    tmp_path: Path, make_order: MakeOrder, writer: Writer, monkeypatch: Any, survived: int
) -> None:
    table = LeaseTable(tmp_path)
    write(table, make_order("l1"), writer)
    unlink, left = Path.unlink, list(range(survived))

    def unlink_or_die(path: Path, missing_ok: bool = False) -> None:
        if not left:
            raise KillError
        left.pop()
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_or_die)
        try:
            table.end("l1")
        except KillError:
            assert survived < 2
    again = LeaseTable(tmp_path)
    assert state_of(again, "l1") in (None, LeaseState.WRITTEN), "otherwise a second manifest would be signed for it"
    assert again.path_of("l1").exists() == (state_of(again, "l1") is LeaseState.WRITTEN)


def test_a_file_without_its_manifest_is_written_again(tmp_path: Path, make_order: MakeOrder) -> None:
    table = LeaseTable(tmp_path)
    table.hold(make_order("l1"))
    table.path_of("l1").write_bytes(b"hal")  # killed while it was written
    again = LeaseTable(tmp_path)
    assert state_of(again, "l1") is LeaseState.HELD and not again.path_of("l1").exists()


def test_a_key_is_asked_with_until_its_lease_is_held_and_not_again(tmp_path: Path, make_order: MakeOrder) -> None:
    table = LeaseTable(tmp_path)
    key = table.find_key()
    assert table.find_key() == LeaseTable(tmp_path).find_key() == key, "a grant whose answer was lost is granted again"
    table.hold(make_order("l1"), request_key=key)
    assert table.find_key() != key


def test_a_kill_between_the_lease_and_its_key_does_not_use_the_key_again(tmp_path: Path, make_order: MakeOrder) -> None:
    table = LeaseTable(tmp_path)
    key = table.find_key()
    asked = (tmp_path / "leases" / "asked.json").read_bytes()
    table.hold(make_order("l1"), request_key=key)
    (tmp_path / "leases" / "asked.json").write_bytes(asked)
    again = LeaseTable(tmp_path)
    assert again.find_key() != key and state_of(again, "l1") is LeaseState.HELD


def test_a_corrupt_file_is_named(tmp_path: Path, make_order: MakeOrder) -> None:
    LeaseTable(tmp_path).hold(make_order("l1"))
    (tmp_path / "leases" / "l1.json").write_text('{"state": "flying"}')
    with pytest.raises(ConfigError, match=r"l1\.json: corrupt; delete it"):
        LeaseTable(tmp_path)


def test_folders_of_an_earlier_version_are_dropped_with_a_warning(tmp_path: Path, log) -> None:
    for name in ("orders/l1.json", "orders/asking.json", "outbox/l2.json", "outbox/l2.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert len(LeaseTable(tmp_path)) == 0
    assert len(log.messages) == 1 and "earlier shoal version" in log.messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["leases"]
    LeaseTable(tmp_path)
    assert len(log.messages) == 1


def test_threads_share_the_table(make_order: MakeOrder) -> None:
    table, taken = LeaseTable(), []
    for number in range(100):
        table.hold(make_order(f"l{number}"))

    def take() -> None:
        while (order := table.start_next(0)) is not None:
            taken.append(order.lease)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(taken) == sorted(f"l{number}" for number in range(100))


def test_the_signed_lease_stays_on_disk_when_its_work_is_done(
    tmp_path: Path, make_order: MakeOrder, make_lease: Callable[..., Lease]
) -> None:
    key, lease = Key.generate(), make_lease("l1")
    documents, table = SignedDocumentStore(tmp_path, lease.run, key.public), LeaseTable(tmp_path)
    document = sign_document(key, Tag.LEASE, lease.model_dump(mode="json")).decode()
    documents.keep("l1", lease, document)
    table.hold(make_order("l1"))
    table.end("l1")
    assert document in [path.read_text() for path in tmp_path.glob("*/l1.json")]
