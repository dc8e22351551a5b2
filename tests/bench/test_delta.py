"""Parts of the delta benchmark: weights after a step, files in the standard format, and small figures."""

import mmap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fixtures.benches import load_bench

delta = load_bench("delta")


def test_rounding_is_that_of_torch() -> None:
    values = delta.draw_weights(50_000, seed=0, lr=0.0)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, -0.0], dtype=np.float32)
    values = np.concatenate([values, ties])
    assert np.array_equal(delta.round_bf16(values), torch.from_numpy(values).bfloat16().view(torch.uint16).numpy())


def test_a_step_moves_weights_by_the_rate_times_what_adamw_would() -> None:
    before, after = (delta.draw_weights(200_000, seed=3, lr=lr).astype(np.float64) for lr in (0.0, 1e-2))
    assert before.std() == pytest.approx(0.02, rel=0.01)
    assert np.sqrt(np.mean((after - before) ** 2)) == pytest.approx(1e-2 * delta.UPDATE_RMS, rel=0.01)
    assert 0.54 < delta.UPDATE_RMS < 0.56


def test_written_weights_are_a_safetensors_file(tmp_path: Path) -> None:
    delta.write_weights(tmp_path / "w", 1000, lr=1e-3)
    (weights,) = load_file(tmp_path / "w").values()
    assert (weights.dtype, weights.shape) == (torch.bfloat16, (1000,))
    assert torch.equal(weights, torch.from_numpy(delta.draw_weights(1000, seed=0, lr=1e-3)).bfloat16())


def test_casting_a_file_is_casting_its_tensors(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(()), "c": torch.randn(70)}
    save_file(tensors, tmp_path / "m")
    delta.cast_file(tmp_path / "m")
    found = load_file(tmp_path / "m")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in tensors.items())


def test_figures_of_a_small_step_have_the_right_order(tmp_path: Path) -> None:
    delta.write_weights(tmp_path / "old", 300_000, lr=0.0)
    figures: dict[str, float] = {}
    for suffix, lr in delta.RATES.items():
        delta.write_weights(tmp_path / "new", 300_000, lr=lr)
        figures |= delta.measure_step(tmp_path, suffix)
    for name, rising in (("changed", True), ("delta_ratio", False), ("xor_ratio", False)):
        values = [figures[f"{name}{suffix}"] for suffix in delta.RATES]
        assert values == sorted(values, reverse=not rising)
    assert all(figures[f"delta_ratio{suffix}"] > 1.5 * figures[f"xor_ratio{suffix}"] for suffix in delta.RATES)


def test_rates_are_measured_on_results_that_were_compared(tmp_path: Path) -> None:
    delta.write_weights(tmp_path / "old", 50_000, lr=0.0)
    delta.write_weights(tmp_path / "new", 50_000, lr=1e-6)
    figures = delta.measure_rates(tmp_path, rounds=1)
    assert {name for name in figures if name.endswith("_gbs")} == {
        f"{name}{clock}_gbs" for name in ("encode", "xor", "zstd", "apply", "copy") for clock in ("", "_cpu")
    }
    assert min(figures.values()) > 0
    assert not (tmp_path / "out").exists()


def test_the_watcher_sees_memory_that_is_touched() -> None:
    with delta.watch_memory() as before:
        time.sleep(0.05)
    with (
        delta.watch_memory() as during,
        mmap.mmap(-1, 60_000_000, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block,
    ):  # its own pages, whatever freed memory the process kept
        block.write(b"1" * len(block))
        time.sleep(0.05)
    assert during[0] - before[0] > 50
