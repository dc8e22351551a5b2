"""Figures of the benchmark of adapters."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lora import format_runs, list_rates, measure_delta


def make_lines(sampled: float, greedy: float) -> list[dict[str, float]]:
    return [
        {"step": 0, "eval/pass_at_1": 0.1, "eval/greedy": 0.2},
        {"step": 9, "eval/pass_at_1": sampled, "eval/greedy": greedy},
    ]


RUNS = {
    "full": [make_lines(0.6, 0.8), make_lines(0.5, 0.6)],
    "adapter": [make_lines(0.5, 0.9), make_lines(0.5, 0.5)],
}


def test_rates_are_means_of_the_last_and_gaps_of_the_same_seed() -> None:
    expected = {"full_sampled": 0.55, "adapter_sampled": 0.5, "sampled_gap_max": 0.1}
    expected |= {"full_greedy": 0.7, "adapter_greedy": 0.7, "greedy_gap_max": 0.1}
    assert list_rates(RUNS) == pytest.approx(expected)
    assert format_runs(RUNS).splitlines()[2] == "| 0 | 0.600 | 0.800 | 0.500 | 0.900 |"


def test_a_delta_that_saves_nothing_counts_as_the_whole_version(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        values = torch.randint(0, 2**62, (25_000,), generator=torch.Generator().manual_seed(seed))
        save_file({"w": values}, tmp_path / name / "model.safetensors")
    assert measure_delta(tmp_path / "a", tmp_path / "b", 200_000) < 2000
    assert measure_delta(tmp_path / "a", tmp_path / "c", 200_000) == 200_000
