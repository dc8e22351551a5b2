"""Spans put side by side: what was busy, what waited, when a version arrived."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.timeline import find_broadcasts, find_period, merge_intervals, read_tracks, subtract_intervals

SIZE = 30
intervals = st.lists(
    st.tuples(st.integers(0, SIZE - 1), st.integers(0, SIZE)).filter(lambda pair: pair[0] < pair[1]), max_size=8
)


def cover(found: list[tuple[float, float]]) -> set[int]:
    return {moment for start, end in found for moment in range(int(start), int(end))}


@given(intervals, intervals)
def test_intervals_are_sets_of_moments(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> None:
    merged, holes = merge_intervals(left), merge_intervals(right)
    assert cover(merged) == cover(left)
    assert all(a[1] < b[0] for a, b in pairwise(merged))
    rest = subtract_intervals(merged, holes)
    assert cover(rest) == cover(left) - cover(right)
    assert sum(end - start for start, end in rest) == len(cover(rest))


def write_spans(folder: Path, *spans: dict[str, object]) -> Path:
    folder.mkdir()
    lines = [json.dumps({"role": "x", "kind": "busy"} | span) for span in spans]
    (folder / "spans.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_busy_is_the_union_and_waiting_what_is_left(tmp_path: Path) -> None:
    folder = write_spans(
        tmp_path / "trainer",
        {"name": "train", "start_ms": 1000, "end_ms": 3000},
        {"name": "write", "start_ms": 2000, "end_ms": 4000},
        {"name": "batch", "kind": "wait", "start_ms": 0, "end_ms": 6000},
        {"name": "publish", "lane": "publish", "start_ms": 4000, "end_ms": 9000},
    )
    (track,) = read_tracks({"trainer": folder, "absent": tmp_path / "absent"})
    assert (track.busy_s, track.wait_s) == (3.0, 3.0)
    assert track.wait == [(0.0, 1.0), (4.0, 6.0)]
    assert find_period([track]) == (0.0, 9.0)


def test_a_line_that_a_kill_cut_is_left_out(tmp_path: Path) -> None:
    folder = write_spans(tmp_path / "worker", {"name": "generate", "start_ms": 0, "end_ms": 5})
    with (folder / "spans.jsonl").open("a") as file:
        file.write('{"name": "gen')
    assert len(read_tracks({"worker": folder})[0].spans) == 1


def test_a_broadcast_lasts_from_its_publishing_until_it_is_there(tmp_path: Path) -> None:
    folders = {
        "origin": write_spans(
            tmp_path / "origin",
            {"name": "publish", "version": 3, "start_ms": 1000, "end_ms": 1500},
            {"name": "publish", "version": 4, "start_ms": 9000, "end_ms": 9100},
        ),
        "worker-1": write_spans(
            tmp_path / "one",
            {"name": "have", "version": 3, "start_ms": 2000, "end_ms": 2000},
            {"name": "have", "version": 3, "start_ms": 8000, "end_ms": 8000},  # after a restart
            {"name": "have", "version": 7, "start_ms": 2000, "end_ms": 2000},
        ),
        "worker-2": write_spans(tmp_path / "two", {"name": "have", "version": 4, "start_ms": 9300, "end_ms": 9300}),
    }
    third, fourth = find_broadcasts(read_tracks(folders))
    assert (third.version, third.published_s, third.reached_s) == (3, 0.5, {"worker-1": 1.0})
    assert fourth.version == 4 and fourth.reached_s == {"worker-2": pytest.approx(0.3)}


def test_of_a_version_that_was_published_twice_the_first_time_counts(tmp_path: Path) -> None:
    folder = write_spans(
        tmp_path / "origin",
        {"name": "publish", "version": 0, "start_ms": 1000, "end_ms": 1200},
        {"name": "publish", "version": 0, "start_ms": 50_000, "end_ms": 51_000},
    )
    assert [item.published_s for item in find_broadcasts(read_tracks({"origin": folder}))] == [pytest.approx(0.2)]
