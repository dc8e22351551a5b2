"""Which versions a relay announces, tested on handmade entries."""

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.shardcast.fetch.upstream_stats import UNREACHABLE_S, UpstreamTable
from shoal.shardcast.relay import RelayInventory
from shoal.shardcast.store.store import VersionStore


def make_blob(name: str, total: int, *, complete: bool) -> Any:
    return SimpleNamespace(name=name, layout=SimpleNamespace(total=total), complete=complete, charged=complete)


class FakeStore:
    """The parts of a store and its upstreams that `RelayInventory` uses."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.now = 100.0
        self.table = UpstreamTable(["http://127.0.0.1:1"], clock=lambda: self.now)
        self.max_bytes = max_bytes
        self.held: dict[int, Any] = {}
        self.inventory = RelayInventory(self, self.table)  # type: ignore[arg-type]

    def entries(self) -> list[Any]:
        return [self.held[version] for version in sorted(self.held)]

    def find(self, version: int) -> Any:
        return self.held.get(version)

    find_parent = VersionStore.find_parent

    @property
    def used_bytes(self) -> int:
        return sum(entry.disk_bytes for entry in self.held.values())

    def add(
        self, version: int, *, full: bool = False, delta: bool | None = None, ended: bool = True, announces: bool = True
    ) -> Any:
        """A version of 100 bytes with a delta of 10 (None: without) on the previous version, with root 0 everywhere."""
        parent_root = None if delta is None else "00"
        head = SimpleNamespace(parent=version - 1)
        log = SimpleNamespace(
            ended=ended, head=head, root="00", parent_root=parent_root, delta_settled=True, delta=parent_root
        )
        blobs = [make_blob("full", 100, complete=full)]
        blobs += [] if delta is None else [make_blob("delta", 10, complete=delta)]
        entry = SimpleNamespace(
            version=version, digest=f"d{version}", log=log, full=blobs[0], delta=blobs[1] if len(blobs) > 1 else None
        )
        entry.blobs = blobs
        for blob in blobs:
            blob.entry = entry
        entry.disk_bytes = sum(blob.layout.total for blob in blobs if blob.charged)
        self.held[version] = entry
        if announces:
            self.table.all[0].announced.add(entry.digest)
        return entry


def test_complete_versions_are_announced_whether_or_not_an_upstream_announces_them() -> None:
    fake = FakeStore()
    assert fake.inventory.is_announced(fake.add(1, full=True, announces=False))
    assert not fake.inventory.is_announced(fake.add(2, full=True, ended=False, announces=False))
    assert not fake.inventory.is_announced(fake.add(3, announces=False))


def test_what_a_source_announces_is_announced_until_the_source_is_unreachable_for_too_long() -> None:
    fake = FakeStore()
    entry = fake.add(1, ended=False)
    assert fake.inventory.is_announced(entry)
    fake.table.all[0].unreachable_since = fake.now
    fake.now += UNREACHABLE_S - 0.1
    assert fake.inventory.is_announced(entry)
    fake.now += 0.1
    assert not fake.inventory.is_announced(entry)
    fake.table.all[0].unreachable_since = None
    assert fake.inventory.is_announced(entry)


@pytest.mark.parametrize(
    ("changes", "finished"),
    [({}, True), ({"delta": False}, False), ({"ended": False}, False), ({"delta": None}, False)],
)
def test_a_version_can_be_finished_by_deltas_from_one_that_is_complete(changes: Any, finished: bool) -> None:
    fake = FakeStore()
    fake.add(1, full=True)
    fake.add(2, **{"delta": True, **changes})
    assert fake.inventory.can_finish(fake.add(3, delta=True)) == finished


def test_a_delta_on_a_parent_that_was_republished_or_is_missing_finishes_nothing() -> None:
    fake = FakeStore()
    parent, entry = fake.add(1, full=True), fake.add(2, delta=True)
    assert fake.inventory.can_finish(entry)
    parent.log.root = "11"
    assert not fake.inventory.can_finish(entry)
    del fake.held[1]
    assert not fake.inventory.can_finish(entry)


def test_space_is_what_newer_versions_leave_and_an_allocated_blob_has_its_space() -> None:
    fake = FakeStore(max_bytes=150)
    old, new = fake.add(1, full=True), fake.add(2)
    assert fake.inventory.has_room(new.full)
    newest = fake.add(3, full=True)
    assert not fake.inventory.has_room(new.full) and not fake.inventory.is_announced(new)
    assert fake.inventory.has_room(newest.full) and fake.inventory.has_room(old.full)
    assert not fake.inventory.is_too_large(new.full)
    assert FakeStore().inventory.has_room(new.full)


def test_a_version_with_space_for_its_delta_alone_is_announced() -> None:
    fake = FakeStore(max_bytes=50)
    plain, with_delta = fake.add(1), fake.add(2, delta=False)
    assert fake.inventory.is_too_large(plain.full) and not fake.inventory.is_announced(plain)
    assert fake.inventory.is_announced(with_delta)
