"""What a relay tells others of, on entries made by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.shardcast.sources import LOST_S, SourceBook
from shoal.shardcast.stock import Stock


def make_blob(name: str, total: int, *, complete: bool) -> Any:
    return SimpleNamespace(name=name, layout=SimpleNamespace(total=total), complete=complete, charged=complete)


class Shelf:
    """A store and sources, as far as a stock looks at them."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.now = 100.0
        self.book = SourceBook(["http://127.0.0.1:1"], clock=lambda: self.now)
        self.max_bytes = max_bytes
        self.held: dict[int, Any] = {}
        self.stock = Stock(self, self.book)  # type: ignore[arg-type]

    def entries(self) -> list[Any]:
        return [self.held[version] for version in sorted(self.held)]

    def find(self, version: int) -> Any:
        return self.held.get(version)

    @property
    def used_bytes(self) -> int:
        return sum(entry.disk_bytes for entry in self.held.values())

    def add(
        self, version: int, *, full: bool = False, delta: bool | None = None, ended: bool = True, told: bool = True
    ) -> Any:
        """A version of 100 bytes with a delta of 10 (None: without) on the version before, root 0 on every side."""
        parent_root = None if delta is None else "00"
        head = SimpleNamespace(parent=version - 1)
        log = SimpleNamespace(ended=ended, head=head, root="00", parent_root=parent_root)
        blobs = [make_blob("full", 100, complete=full)]
        blobs += [] if delta is None else [make_blob("delta", 10, complete=delta)]
        entry = SimpleNamespace(
            version=version, digest=f"d{version}", log=log, full=blobs[0], delta=blobs[1] if len(blobs) > 1 else None
        )
        entry.blobs = blobs
        entry.disk_bytes = sum(blob.layout.total for blob in blobs if blob.charged)
        self.held[version] = entry
        if told:
            self.book.sources[0].heads.add(entry.digest)
        return entry


def test_what_is_complete_is_told_of_whoever_announces_it() -> None:
    shelf = Shelf()
    assert shelf.stock.is_told(shelf.add(1, full=True, told=False))
    assert not shelf.stock.is_told(shelf.add(2, full=True, ended=False, told=False))
    assert not shelf.stock.is_told(shelf.add(3, told=False))


def test_what_a_source_announces_is_told_of_until_the_source_is_away_for_too_long() -> None:
    shelf = Shelf()
    entry = shelf.add(1, ended=False)
    assert shelf.stock.is_told(entry)
    shelf.book.sources[0].lost_at = shelf.now
    shelf.now += LOST_S - 0.1
    assert shelf.stock.is_told(entry)
    shelf.now += 0.1
    assert not shelf.stock.is_told(entry)
    shelf.book.sources[0].lost_at = None
    assert shelf.stock.is_told(entry)


@pytest.mark.parametrize(
    ("changes", "finished"),
    [({}, True), ({"delta": False}, False), ({"ended": False}, False), ({"delta": None}, False)],
)
def test_a_version_can_be_finished_by_deltas_from_one_that_is_complete(changes: Any, finished: bool) -> None:
    shelf = Shelf()
    shelf.add(1, full=True)
    shelf.add(2, **{"delta": True, **changes})
    assert shelf.stock.can_finish(shelf.add(3, delta=True)) == finished


def test_a_delta_on_a_parent_that_was_published_anew_or_is_not_here_finishes_nothing() -> None:
    shelf = Shelf()
    parent, entry = shelf.add(1, full=True), shelf.add(2, delta=True)
    assert shelf.stock.can_finish(entry)
    parent.log.root = "11"
    assert not shelf.stock.can_finish(entry)
    del shelf.held[1]
    assert not shelf.stock.can_finish(entry)


def test_room_is_what_newer_versions_leave_and_a_blob_that_is_there_has_its_room() -> None:
    shelf = Shelf(max_bytes=150)
    old, new = shelf.add(1, full=True), shelf.add(2)
    assert shelf.stock.has_room(new, new.full)
    newest = shelf.add(3, full=True)
    assert not shelf.stock.has_room(new, new.full) and not shelf.stock.is_told(new)
    assert shelf.stock.has_room(newest, newest.full) and shelf.stock.has_room(old, old.full)
    assert not shelf.stock.is_too_large(new.full)
    assert Shelf().stock.has_room(new, new.full)


def test_a_version_whose_delta_alone_has_room_is_told_of() -> None:
    shelf = Shelf(max_bytes=50)
    plain, with_delta = shelf.add(1), shelf.add(2, delta=False)
    assert shelf.stock.is_too_large(plain.full) and not shelf.stock.is_told(plain)
    assert shelf.stock.is_told(with_delta)
