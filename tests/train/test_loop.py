"""What a training run rejects or fixes before it starts."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.fixtures.paths import TINY

from shoal.config.run import load_config
from shoal.errors import ConfigError
from shoal.learner.checkpoint import list_checkpoints, read_state
from shoal.policy.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from shoal.policy.model import open_policy, save_policy
from shoal.train.loop import run_training
from shoal.train.report import read_metrics


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step; tests only read it."""
    return train(tmp_path_factory.mktemp("trained"), "steps=1")


@pytest.fixture
def out(tmp_path: Path, trained: Path) -> Path:
    """A folder in which the SFT is done."""
    shutil.copytree(trained.parent / "sft", tmp_path / "sft")
    return tmp_path


def train(out: Path, *overrides: str) -> Path:
    """Train, and return the run directory."""
    assert run_training(load_config(TINY, [f"out={out}", *overrides])) == 0
    return out / "tiny-seed0"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("tasks.name=swim", "tasks.name"),
        ("policy.path=no/such/place", "policy.path: no such folder 'no/such/place'"),
        ("policy.dtype=bfloat16", "policy.dtype: training needs float32"),
        ("policy.dtype=bfloat16 policy.lora.rank=2", "policy.dtype: training needs float32"),  # SFT trains all weights
        (
            "policy.dtype=bfloat16 policy.lora.rank=2 sft.steps=0 learner.precision=bfloat16",
            "policy.dtype: bfloat16 needs policy.publish_dtype=bfloat16, got float32",
        ),
        (
            "policy.dtype=bfloat16 policy.lora.rank=2 sft.steps=0 policy.publish_dtype=bfloat16",
            "policy.dtype: bfloat16 needs learner.precision=bfloat16, got float32",
        ),
        ("engine.max_tokens=510", "engine.max_tokens: must be at most"),
        ("policy.tiny.context=4", "policy.tiny.context: must be larger, since prompts take up to "),
        ("eval.tasks=100000", "eval.tasks: is 100000, but reverse has only"),
    ],
)
def test_a_mistake_is_found_before_anything_is_moved(trained: Path, override: str, reason: str) -> None:
    out = trained.parent
    kept = sorted(path.name for path in out.iterdir())
    with pytest.raises(ConfigError, match=re.escape(reason)):
        run_training(load_config(TINY, [f"out={out}", "seed=1", *override.split()]), fresh=True)
    assert sorted(path.name for path in out.iterdir()) == kept
    assert (out / "latest").resolve() == trained.resolve()


def test_a_policy_may_be_named_through_the_latest_run(tmp_path: Path, trained: Path) -> None:
    folder = "latest/checkpoints/step-000001/policy"
    path = trained.parent / folder
    run_training(load_config(TINY, [f"out={tmp_path}", "steps=0", "name=second", f"policy.path={path}"]))
    second = load_config(tmp_path / "second-seed0" / "config.toml")
    assert second.policy.path == str((trained / folder.removeprefix("latest/")).resolve())


def test_the_run_of_a_swarm_is_not_resumed_by_shoal_train(tmp_path: Path) -> None:
    """Its checkpoints would become those of a run without a ledger."""
    (tmp_path / "tiny-seed0" / "versions").mkdir(parents=True)
    with pytest.raises(ConfigError, match="tiny-seed0: holds the run of a swarm"):
        train(tmp_path)


LORA = ("policy.lora.rank=2", "learner.lr=1e-2", "learner.loss.kl=0.01")


def test_fixed_weights_in_bfloat16_give_the_adapters_of_float32_weights_with_the_same_values(
    tmp_path: Path, trained: Path
) -> None:
    start = tmp_path / "start"
    save_policy(open_policy(trained / "checkpoints" / "step-000000" / "policy"), start, dtype=torch.bfloat16)
    half = ("sft.steps=0", "learner.precision=bfloat16", "policy.publish_dtype=bfloat16", f"policy.path={start}")
    found = {
        dtype: train(tmp_path / dtype, *LORA, *half, f"policy.dtype={dtype}", "steps=2")
        for dtype in ("float32", "bfloat16")
    }
    own, other = (load_file(run / "checkpoints/step-000002/policy/adapter_model.safetensors") for run in found.values())
    assert any(tensor.any() for name, tensor in own.items() if "lora_B" in name)
    assert all(torch.equal(tensor, other[name]) and tensor.dtype == torch.float32 for name, tensor in own.items())
    base = load_file(found["bfloat16"] / "checkpoints/v000000/model.safetensors")
    assert {tensor.dtype for tensor in base.values()} == {torch.bfloat16}


@pytest.mark.parametrize("level", [0, 2])
def test_a_resumed_run_with_adapters_has_the_same_bits(tmp_path: Path, trained: Path, level: int) -> None:
    """Adapters, optimizer and the older versions that are sampled with."""
    common = (*LORA, f"async_level={level}", "checkpoint.every=1")
    for name in ("whole", "parts"):
        shutil.copytree(trained.parent / "sft", tmp_path / name / "sft")
    whole = train(tmp_path / "whole", *common, "steps=4")
    for steps in (1, 3, 4):
        parts = train(tmp_path / "parts", *common, f"steps={steps}")
    (_, one), (_, other) = (list_checkpoints(run / "checkpoints")[-1] for run in (whole, parts))
    assert read_state(one).sha256 == read_state(other).sha256
    assert sorted(path.name for path in (one / "policy").iterdir()) == [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    rates = [
        {line["step"]: line["eval/pass_at_1"] for line in read_metrics(run / "metrics.jsonl") if "eval/greedy" in line}
        for run in (whole, parts)
    ]
    assert rates[0].keys() == {0, 4} and rates[0].items() <= rates[1].items()


def test_a_run_with_another_base_is_not_resumed(out: Path) -> None:
    run = train(out, *LORA, "steps=1")
    path = run / "checkpoints" / "v000000" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    with pytest.raises(ConfigError, match=r"v000000/model\.safetensors: does not match its hash"):
        train(out, *LORA, "steps=2")
