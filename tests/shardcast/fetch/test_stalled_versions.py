"""When a version is abandoned, and when it is tried again."""

from types import SimpleNamespace
from typing import Any

from shoal.shardcast.fetch.plan import MAX_PAUSE_S, StallDetector, StallTable
from shoal.shardcast.fetch.upstream_stats import UNREACHABLE_S, UpstreamTable


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_detector_fires_when_nothing_new_comes_and_restarts_with_every_new_maximum() -> None:
    clock = FakeClock()
    detector = StallDetector(10.0, clock)
    assert not detector.is_over("v1", 5)
    clock.now += 9
    assert not detector.is_over("v1", 6)
    clock.now += 9
    assert not detector.is_over("v1", 6)
    clock.now += 1
    assert detector.is_over("v1", 6)


def test_bytes_that_come_again_after_they_were_wrong_are_no_progress() -> None:
    clock = FakeClock()
    detector = StallDetector(10.0, clock)
    for seconds, count in ((0, 8), (4, 0), (3, 8), (2, 3)):
        clock.now += seconds
        assert not detector.is_over("v1", count)
    clock.now += 1
    assert detector.is_over("v1", 8)


def test_the_detector_restarts_with_another_object_and_after_it_fired() -> None:
    clock = FakeClock()
    detector = StallDetector(10.0, clock)
    detector.is_over("v1", 50)
    clock.now += 9
    assert not detector.is_over("v2", 1)
    clock.now += 9
    assert not detector.is_over("v2", 1)
    clock.now += 1
    assert detector.is_over("v2", 1)
    assert not detector.is_over("v2", 1)


def make_book() -> tuple[FakeClock, UpstreamTable, StallTable, Any]:
    clock = FakeClock()
    table = UpstreamTable(["http://127.0.0.1:1", "http://127.0.0.1:2"], clock=clock)
    entry = SimpleNamespace(digest="ab", log=SimpleNamespace(lines=[b"head"]))
    table.all[0].announced.add("ab")
    return clock, table, StallTable(table, 10.0), entry


def test_a_stalled_version_is_retried_after_a_pause_that_doubles() -> None:
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


def test_a_stalled_version_is_retried_with_another_line_or_another_source() -> None:
    _, table, stalls, entry = make_book()
    stalls.add(entry)
    entry.log.lines.append(b"hashes")
    assert not stalls.is_stalled(entry)
    stalls.add(entry)
    assert stalls.is_stalled(entry)
    table.all[1].announced.add("ab")
    assert not stalls.is_stalled(entry)


def test_a_source_that_was_away_when_a_version_stalled_counts_as_another_when_it_is_back() -> None:
    clock, table, stalls, entry = make_book()
    table.all[0].unreachable_since = clock.now
    clock.now += UNREACHABLE_S
    stalls.add(entry)
    assert stalls.is_stalled(entry)
    table.all[0].unreachable_since = None
    assert not stalls.is_stalled(entry)
