"""Where a role's time went."""

import itertools
import json
import threading
from pathlib import Path

import pytest

from shoal.util.spans import SpanLog


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_span_is_written_when_it_ends_however_it_ends(tmp_path: Path) -> None:
    ticks = itertools.count()
    spans = SpanLog(tmp_path / "a", "trainer", wall=lambda: 1000.0, monotonic=lambda: float(next(ticks)))
    with spans.span("train", step=3):
        pass
    with pytest.raises(ValueError, match="x"), spans.span("write"):
        raise ValueError("x")
    first, second = read_lines(tmp_path / "a")
    assert first == {
        "role": "trainer",
        "name": "train",
        "kind": "busy",
        "start_ms": 1_001_000,
        "end_ms": 1_002_000,
        "step": 3,
    }
    assert (second["name"], second["start_ms"], second["end_ms"]) == ("write", 1_003_000, 1_004_000)


def test_a_torn_line_of_an_earlier_process_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"name": "old"}\n{"na')
    spans = SpanLog(tmp_path / "a", "trainer")
    with spans.span("new"):
        pass
    assert [line["name"] for line in read_lines(tmp_path / "a")] == ["old", "new"]


def test_lines_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    spans = SpanLog(tmp_path / "a", "trainer")

    def work(number: int) -> None:
        for _ in range(50):
            with spans.span("x" * 100, thread=number):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["thread"] for line in read_lines(tmp_path / "a")) == sorted([0, 1, 2, 3] * 50)


def test_without_a_path_and_after_the_end_nothing_is_kept(tmp_path: Path) -> None:
    with SpanLog(None, "trainer").span("a"):
        pass
    spans = SpanLog(tmp_path / "a", "trainer")
    spans.close()
    spans.close()
    with spans.span("late"):
        pass
    assert (tmp_path / "a").read_text() == ""
