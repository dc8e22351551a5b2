"""The arithmetic of the target-length and offline-filter benchmarks."""

from pathlib import Path

import pytest
from tests.fixtures.benches import load_bench

for _name in ("common", "length", "filter", "offline"):
    load_bench(_name)

from length import SHORT, best_constant, collect_figures, error_curve  # noqa: E402
from offline import KINDS, PER_KIND, measure_gain, write_tasks  # noqa: E402
from shoal.tasks.sets.sources import open_set  # noqa: E402


def evaluate(step: int, rate: float, errors: dict[int, float]) -> dict[str, float]:
    named = {f"eval/error_{target}": error for target, error in errors.items()}
    return {"step": step, "eval/pass_at_1": rate, "eval/greedy": rate, **named}


def test_the_best_constant_length_is_the_median_of_the_targets() -> None:
    assert best_constant([6, 12, 18, 24, 30]) == pytest.approx(7.2)
    assert best_constant([3, 6, 9, 12]) == pytest.approx(3.0)
    assert best_constant([7]) == 0.0


def test_targets_have_equal_weight_and_the_worst_seed_is_reported() -> None:
    first = [
        evaluate(0, 0.5, dict.fromkeys(SHORT, 4.0)),
        evaluate(5, 0.75, dict(zip(SHORT, (0.0, 1.0, 2.0, 3.0), strict=True))),
    ]
    second = [evaluate(0, 0.5, dict.fromkeys(SHORT, 4.0)), evaluate(5, 0.25, dict.fromkeys(SHORT, 2.5))]
    assert error_curve(first, SHORT) == ([0, 5], [4.0, 1.5])
    figures = collect_figures({"short": [first, second]})
    assert figures["short_error_after"] == 2.0 and figures["short_error_after_max"] == 2.5
    assert figures["short_sampled_before"] == figures["short_greedy_after"] == 0.5


def test_tokens_of_the_filter_are_taken_from_the_budget() -> None:
    lines = [
        {"step": 0, "eval/pass_at_1": 0.2},
        {"step": 1, "train/generated_tokens": 100_000.0},
        {"step": 1, "eval/pass_at_1": 0.4},
        {"step": 2, "train/generated_tokens": 100_000.0},
        {"step": 2, "eval/pass_at_1": 0.8},
    ]
    assert measure_gain(lines, 200.0) == pytest.approx(30.0), "60 points with 200k tokens"
    assert measure_gain(lines, 200.0, cost=100.0) == pytest.approx(10.0), "20 points, because half was spent before"


def test_the_mixed_set_has_as_many_tasks_of_each_kind(tmp_path: Path) -> None:
    write_tasks(tmp_path / "set.jsonl")
    tasks = open_set([str(tmp_path / "set.jsonl")])
    for kind, (low, high) in KINDS.items():
        own = [record for record in tasks.records if record.source == kind]
        assert len(own) == PER_KIND
        assert {len(record.text) - 1 for record in own} == set(range(low, high + 1))
