"""The arithmetic of the asynchrony benchmarks."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.benches import load_bench

for _name in ("swarms", "overlap_chart", "overlap", "unequal"):
    load_bench(_name)

import overlap  # noqa: E402
from overlap import collect_figures, find_crossing, format_tables  # noqa: E402
from swarms import Summary, hash_settings, list_silent, load_swarm  # noqa: E402
from unequal import compare_samples  # noqa: E402


def make_summary(**changes: Any) -> Summary:
    """Two steps of one second each, in the third and the sixth second since v0."""
    values: dict[str, Any] = {
        "level": 0,
        "seed": 0,
        "written": [3.0, 6.0],
        "train_s": [1.0, 1.0],
        "ages": [0.0, 0.0],
        "age_max": 0.0,
        "rewards": [0.5, 0.5],
        "evals": [(0, 0.2, 0.3), (1, 0.4, 0.5), (2, 0.8, 0.9)],
        "broadcasts": [2.0, 2.0],
        "busy": {
            "trainer": [(2.0, 3.0), (5.0, 6.0)],
            "worker-1": [(0.0, 2.5), (3.0, 4.0)],
            "validator-1": [(0.0, 9.0)],
        },
        "waits": {"trainer": [(0.0, 2.0), (3.0, 5.0)], "worker-1": [], "validator-1": []},
        "window": (2.0, 6.0),
        "cpu_s": {"trainer": 2.0, "worker-1": 3.0, "validator-1": 1.0},
        "version_bytes": 100,
        "ledger": "the ledger holds",
    }
    return Summary(**values | changes)


def test_busy_shares_are_of_the_time_between_the_first_and_the_last_training() -> None:
    summary = make_summary()
    assert summary.share_of("trainer") == 0.5
    assert summary.share_of("worker-1") == (0.5 + 1.0) / 4
    assert summary.share_of("validator-1") == 1.0


def test_a_target_is_reached_between_two_evaluations_on_a_straight_line() -> None:
    summary = make_summary()
    assert find_crossing(summary, 0.2) == 0.0
    assert find_crossing(summary, 0.3) == pytest.approx(1.5)
    assert find_crossing(summary, 0.6) == pytest.approx(4.5)
    assert find_crossing(summary, 0.9) is None


def test_the_speed_up_is_that_of_mean_times_and_is_not_stated_where_one_run_does_not_get_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overlap, "SHARES", (0.5, 0.75, 1.0))
    monkeypatch.setattr(overlap, "SHARE", 0.75)
    fast = make_summary(level=2, written=[1.5, 3.0], window=(1.0, 3.0), ages=[1.0, 2.0], age_max=2.0)
    slow = make_summary()
    figures = collect_figures({0: [slow, slow], 2: [fast, fast]})
    assert figures["speedup_k2"] == pytest.approx(2.0)
    assert figures["step_speedup_k2"] == pytest.approx(2.0)
    assert figures["trainer_idle_k0"] == 0.5
    assert figures["broadcast_over_train_k0"] == 2.0
    assert figures["age_k2"] == 1.5
    lame = make_summary(level=2, evals=[(0, 0.2, 0.3), (2, 0.55, 0.6)])
    figures = collect_figures({0: [slow, slow], 2: [fast, lame]})
    assert "speedup_k2" not in figures and "speedup_to_0.5_k2" in figures
    assert "| 2 | 2 5 | 2 - | 3 - | 1.5 |" in format_tables({0: [slow, slow], 2: [fast, lame]}).splitlines()


def test_the_time_before_the_first_training_step_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "SHARES", (0.75,))
    monkeypatch.setattr(overlap, "SHARE", 0.75)
    figures = collect_figures({0: [make_summary()], 2: [make_summary(level=2, window=(3.0, 7.0))]})
    assert figures["speedup_k2"] == 1.0
    assert figures["speedup_from_first_step_k2"] == pytest.approx(2.875 / 1.875)


def test_a_part_that_did_nothing_at_the_end_is_reported() -> None:
    assert list_silent(make_summary()) == ["worker-1"], "4.0 of 6.0 seconds is before the last third"
    busy = {"trainer": [(2.0, 3.0)], "worker-1": [(0.0, 2.5), (5.0, 6.0)], "validator-1": [(0.0, 9.0)]}
    assert list_silent(make_summary(busy=busy)) == []


def test_a_summary_is_the_same_after_it_was_kept() -> None:
    summary = make_summary()
    kept = Summary(**json.loads(json.dumps(asdict(summary))))
    assert collect_figures({0: [kept]}) == collect_figures({0: [summary]})


def test_runs_are_distinguished_by_settings_and_not_by_name_or_folder(tmp_path: Path) -> None:
    one = load_swarm("one", 0, tmp_path, ["async_level=2"])
    assert hash_settings(one) == hash_settings(load_swarm("two", 0, tmp_path / "x", ["async_level=2"]))
    others = [load_swarm("one", 1, tmp_path, ["async_level=2"]), load_swarm("one", 0, tmp_path, ["async_level=1"])]
    assert hash_settings(one) not in {hash_settings(other) for other in others}


def test_equal_samples_have_no_distance_and_the_limit_law_is_the_one_of_the_books() -> None:
    assert compare_samples([1, 2, 3], [1, 2, 3]) == (0.0, 1.0)
    distance, chance = compare_samples([1, 2, 3, 4], [3, 4, 5, 6])
    assert distance == 0.5
    assert chance == pytest.approx(0.534, abs=0.002)  # 2 (exp(-2 x^2) - exp(-8 x^2) + ...) at x = 0.806
    assert compare_samples(list(range(100)), list(range(50, 150)))[1] < 1e-9
