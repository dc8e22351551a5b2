"""Reports from metrics files."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.train.report import describe_gain, draw_curves, pick_series, read_metrics, write_report

needs_plots = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is an extra")


def write_lines(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def evaluated(step: int, value: float | None) -> dict[str, Any]:
    return {"step": step, "time": 100.0 + step, "eval/pass_at_1": value, "eval/greedy": 0.5}


def trained(step: int) -> dict[str, Any]:
    perf = {"perf/sample_s": 2.0, "perf/train_s": 3.0}
    return {"step": step, "time": 100.0 + step, "reward/mean": 0.1, "train/generated_tokens": 1000.0} | perf


def test_a_report_compares_the_first_evaluation_with_the_last(tmp_path: Path) -> None:
    write_lines(tmp_path, evaluated(0, 0.125), trained(1), trained(2), evaluated(2, 0.75))
    path = write_report(tmp_path)
    assert path == tmp_path / "report.md"
    lines = path.read_text().splitlines()
    assert lines[0] == f"# {tmp_path.name}"
    assert lines[2] == (
        "2 steps, 2,000 generated tokens; 4 s of sampling and 6 s of training, without SFT and evaluation."
    )
    assert lines[4:8] == ["| | before | after |", "|---|---|---|", "| eval/greedy | 0.500 | 0.500 |", lines[7]]
    assert lines[7] == "| eval/pass_at_1 | 0.125 | 0.750 |"


def test_the_time_between_two_sessions_does_not_count(tmp_path: Path) -> None:
    later = trained(2) | {"time": 1e9}
    write_lines(tmp_path, evaluated(0, 0.1), trained(1), later)
    assert "4 s of sampling and 6 s of training" in write_report(tmp_path).read_text()


def test_a_run_of_no_steps_has_a_report(tmp_path: Path) -> None:
    write_lines(tmp_path, evaluated(0, 0.25))
    text = write_report(tmp_path).read_text()
    assert "0 steps, 0 generated tokens" in text
    assert "| eval/pass_at_1 | 0.250 | 0.250 |" in text


def test_an_empty_metrics_file_has_a_report(tmp_path: Path) -> None:
    write_lines(tmp_path)
    assert "0 steps" in write_report(tmp_path).read_text()


def test_values_that_are_missing_are_left_out(tmp_path: Path) -> None:
    write_lines(tmp_path, evaluated(0, None), evaluated(1, None))
    assert "eval/pass_at_1" not in write_report(tmp_path).read_text()
    assert pick_series(read_metrics(tmp_path / "metrics.jsonl"), "eval/greedy") == ([0, 1], [0.5, 0.5])


def test_a_line_that_is_still_being_written_does_not_count(tmp_path: Path) -> None:
    write_lines(tmp_path, trained(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "ti')
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]


@needs_plots
def test_the_report_shows_a_picture(tmp_path: Path) -> None:
    write_lines(tmp_path, evaluated(0, 0.1), trained(1), evaluated(1, 0.2))
    assert write_report(tmp_path).read_text().endswith("\n![curve](curve.png)\n")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@needs_plots
def test_several_runs_share_a_picture(tmp_path: Path) -> None:
    lines = [evaluated(0, 0.1), trained(1), evaluated(1, 0.2)]
    draw_curves(tmp_path / "all.png", [("a", lines), ("b", lines), ("c", [])])
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


def test_the_gain_of_a_run_is_one_line(tmp_path: Path) -> None:
    first = {"step": 0, "time": 0, "eval/pass_at_1": 0.25, "eval/greedy": 0.5}
    last = {"step": 9, "time": 1, "eval/pass_at_1": 0.75, "eval/greedy": 1.0}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    assert describe_gain(tmp_path) == "held-out tasks that pass: sampled 0.250 -> 0.750, greedy 0.500 -> 1.000"
