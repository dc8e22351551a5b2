"""When a version is given up, and when it is worth another try."""

from types import SimpleNamespace
from typing import Any

from shoal.shardcast.patience import MAX_PAUSE_S, Patience, StallBook
from shoal.shardcast.sources import LOST_S, SourceBook


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_patience_ends_when_nothing_new_comes_and_begins_anew_with_every_record() -> None:
    clock = FakeClock()
    patience = Patience(10.0, clock)
    assert not patience.is_over("v1", 5)
    clock.now += 9
    assert not patience.is_over("v1", 6)
    clock.now += 9
    assert not patience.is_over("v1", 6)
    clock.now += 1
    assert patience.is_over("v1", 6)


def test_bytes_that_come_again_after_they_were_wrong_are_no_record() -> None:
    clock = FakeClock()
    patience = Patience(10.0, clock)
    for seconds, count in ((0, 8), (4, 0), (3, 8), (2, 3)):
        clock.now += seconds
        assert not patience.is_over("v1", count)
    clock.now += 1
    assert patience.is_over("v1", 8)


def test_patience_with_another_thing_and_after_it_ended_begins_anew() -> None:
    clock = FakeClock()
    patience = Patience(10.0, clock)
    patience.is_over("v1", 50)
    clock.now += 9
    assert not patience.is_over("v2", 1)
    clock.now += 9
    assert not patience.is_over("v2", 1)
    clock.now += 1
    assert patience.is_over("v2", 1)
    assert not patience.is_over("v2", 1)


def make_book() -> tuple[FakeClock, SourceBook, StallBook, Any]:
    clock = FakeClock()
    book = SourceBook(["http://127.0.0.1:1", "http://127.0.0.1:2"], clock=clock)
    entry = SimpleNamespace(digest="ab", log=SimpleNamespace(lines=[b"head"]))
    book.sources[0].heads.add("ab")
    return clock, book, StallBook(book, 10.0), entry


def test_a_version_that_stalled_is_worth_a_try_after_a_pause_that_doubles() -> None:
    clock, _, stalls, entry = make_book()
    assert not stalls.is_stalled(entry)
    for pause in (40.0, 80.0, 160.0):
        stalls.add(entry)
        clock.now += pause - 0.1
        assert stalls.is_stalled(entry)
        clock.now += 0.1
        assert not stalls.is_stalled(entry)
    for _ in range(20):
        stalls.add(entry)
    clock.now += MAX_PAUSE_S
    assert not stalls.is_stalled(entry)


def test_a_version_that_stalled_is_worth_a_try_with_another_line_or_another_source() -> None:
    _, book, stalls, entry = make_book()
    stalls.add(entry)
    entry.log.lines.append(b"hashes")
    assert not stalls.is_stalled(entry)
    stalls.add(entry)
    assert stalls.is_stalled(entry)
    book.sources[1].heads.add("ab")
    assert not stalls.is_stalled(entry)


def test_a_source_that_was_away_when_a_version_stalled_counts_as_another_when_it_is_back() -> None:
    clock, book, stalls, entry = make_book()
    book.sources[0].lost_at = clock.now
    clock.now += LOST_S
    stalls.add(entry)
    assert stalls.is_stalled(entry)
    book.sources[0].lost_at = None
    assert not stalls.is_stalled(entry)
