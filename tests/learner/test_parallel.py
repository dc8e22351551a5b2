"""Several ranks compute the update and the metrics of one process: real processes over gloo."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fixtures.paths import ROOT
from torch import Tensor

from shoal.config.run import LearnerConfig
from shoal.errors import ConfigError
from shoal.learner.learner import Learner
from shoal.learner.parallel import ONE, Ranks, deal_packs, measure_norm

PROGRAM = Path(__file__).with_name("parallel_program.py")
MODELS = ("tiny", "tied", "gqa", "qwen3", "hub")
PLAN: dict[str, dict[str, Any]] = {
    **{name: {"model": name} for name in MODELS},
    "kl": {"model": "qwen3", "kl": 0.1},
    "lora": {"model": "qwen3", "kl": 0.1, "rank": 3},
    "lora hub": {"model": "hub", "rank": 3},
    "clip": {"model": "gqa", "clip": 0.05},
    "updates": {"model": "tiny", "updates": 2, "clip": 0.05},
    "few": {"model": "tied", "groups": 1, "micro": 4096},
    "bfloat16": {"model": "qwen3", "precision": "bfloat16"},
    "offload": {"model": "tied", "offload": True},
    "recompute": {"model": "gqa", "recompute": True},
    "recompute hub": {"model": "hub", "recompute": True},
    "chunks": {"model": "tied", "chunk": 2000, "kl": 0.1},
    "chunks bfloat16": {"model": "qwen3", "chunk": 2000, "precision": "bfloat16", "recompute": True},
    "overflow": {"model": "tiny", "poison": True},
    "averaged": {"model": "tiny", "averaged": True},
}
IN_THREE = ("gqa", "lora", "few", "updates", "overflow", "averaged")
"""cases for three ranks too, which do not divide the sizes of tensors and batches evenly"""
PAIRS = [(case, size) for case in PLAN for size in ((2, 3) if case in IN_THREE else (2,))]
SIZES = (2, 3)
EXACT = 1e-6
AFTER_ADAM = 1e-5
"""for weights: AdamW's first step makes every gradient one of size 1, also those that are rounding errors"""


@dataclass(frozen=True)
class Result:
    weights: dict[str, Tensor]
    grads: dict[str, Tensor]
    metrics: list[dict[str, float]]
    """of every rank"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all cases, in one process and in several ranks."""
    folder = tmp_path_factory.mktemp("parallel")
    plan = {str(size): {name: PLAN[name] for name, own in PAIRS if own == size} for size in SIZES}
    (folder / "plan.json").write_text(json.dumps({"1": PLAN, **plan}))
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder / "plan.json"), *map(str, SIZES)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def read_result(folder: Path, case: str, size: int) -> Result:
    tensors = load_file(folder / f"{case}-{size}.safetensors")
    parts = {kind: {n: t for n, t in tensors.items() if n.startswith(kind)} for kind in ("weight.", "grad.")}
    return Result(parts["weight."], parts["grad."], json.loads((folder / f"{case}-{size}.json").read_text()))


def measure_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest relative L2 difference of any tensor."""
    assert one.keys() == other.keys()
    return max(float((one[n].double() - other[n].double()).norm() / one[n].double().norm()) for n in one)


@pytest.mark.parametrize(("case", "size"), [p for p in PAIRS if p[0] not in ("updates", "overflow", "averaged")])
def test_ranks_compute_the_gradients_of_one_process(folder: Path, case: str, size: int) -> None:
    alone, ranks = read_result(folder, case, 1), read_result(folder, case, size)
    assert all(float(grad.norm()) > 0 for grad in alone.grads.values())
    assert measure_difference(alone.grads, ranks.grads) < EXACT
    assert measure_difference(alone.weights, ranks.weights) < AFTER_ADAM


@pytest.mark.parametrize("size", SIZES)
def test_the_second_update_of_a_step_is_that_of_one_process_too(folder: Path, size: int) -> None:
    alone, ranks = read_result(folder, "updates", 1), read_result(folder, "updates", size)
    assert measure_difference(alone.weights, ranks.weights) < EXACT


@pytest.mark.parametrize("size", SIZES)
def test_averaging_instead_of_summing_is_seen(folder: Path, size: int) -> None:
    alone, averaged = read_result(folder, "averaged", 1), read_result(folder, "averaged", size)
    assert measure_difference(alone.grads, averaged.grads) == pytest.approx(1 - 1 / size, abs=1e-4)


@pytest.mark.parametrize(("case", "size"), [pair for pair in PAIRS if pair[0] != "averaged"])
def test_every_rank_reports_the_metrics_of_one_process(folder: Path, case: str, size: int) -> None:
    (alone,) = read_result(folder, case, 1).metrics
    metrics = read_result(folder, case, size).metrics
    assert len(metrics) == size and all(own == metrics[0] for own in metrics)
    assert metrics[0] == pytest.approx(alone, rel=1e-5, abs=1e-7)
    assert metrics[0].get("optim/grad_norm", 0.0) == pytest.approx(alone.get("optim/grad_norm", 0.0), rel=EXACT)


@pytest.mark.parametrize("size", [1, *SIZES])
def test_an_overflow_is_skipped_on_every_rank(folder: Path, size: int) -> None:
    result = read_result(folder, "overflow", size)
    assert all(own["optim/skipped"] == own["optim/updates"] == 1 for own in result.metrics)
    assert not measure_difference(read_result(folder, "overflow", 1).weights, result.weights)


def test_bfloat16_computes_other_gradients_and_keeps_float32_weights(folder: Path) -> None:
    short, full = read_result(folder, "bfloat16", 1), read_result(folder, "qwen3", 1)
    assert {tensor.dtype for tensor in (*short.weights.values(), *short.grads.values())} == {torch.float32}
    assert 1e-3 < measure_difference(full.grads, short.grads) < 0.2


def test_micro_batches_of_similar_size_run_at_the_same_time_and_every_rank_has_as_many() -> None:
    sizes = [10, 50, 30, 40, 20]
    dealt = [deal_packs(sizes, Ranks(rank=rank, size=2)) for rank in range(2)]
    assert [[share.index for share in own] for own in dealt] == [[1, 2, 0], [3, 4, 0]]
    assert [[share.counts for share in own] for own in dealt] == [[True] * 3, [True, True, False]]
    assert [share.index for share in deal_packs(sizes, ONE)] == [0, 1, 2, 3, 4]


def test_the_norm_of_a_large_model_is_that_of_float64() -> None:
    parameter = torch.zeros(2**21)
    parameter.grad = torch.randn(2**21, generator=torch.Generator().manual_seed(0))
    assert float(measure_norm([parameter], ONE)) == pytest.approx(float(parameter.grad.double().norm()), rel=1e-7)


def test_bfloat16_of_a_model_without_a_lean_loop_needs_ranks() -> None:
    from tests.learner.parallel_program import build_model

    with pytest.raises(ConfigError, match=r"learner\.precision"):
        Learner(build_model("hub"), LearnerConfig(precision="bfloat16"), max_tokens=8)
