"""Checkpoints: exact, checked when read, and never half-written."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal.config.run import LearnerConfig, PolicyConfig
from shoal.errors import ConfigError
from shoal.learner.checkpoint import (
    find_newest,
    list_checkpoints,
    load_checkpoint_policy,
    load_optimizer,
    load_versions,
    prune_checkpoints,
    read_state,
    restore_learner,
    save_checkpoint,
    save_optimizer,
)
from shoal.learner.learner import Learner
from shoal.policy.model import Policy
from shoal.rollout import Group
from shoal.util.files import hash_file

MakePolicy = Callable[[int], Policy]


@pytest.fixture
def trained(make_policy: MakePolicy, groups: list[Group]) -> tuple[Policy, Learner]:
    """A policy and its learner after one step."""
    policy = make_policy(0)
    learner = build_learner(policy)
    learner.train_step(groups)
    return policy, learner


def build_learner(policy: Policy) -> Learner:
    return Learner(policy.model, LearnerConfig(weight_decay=0.1), max_tokens=16)


def save(folder: Path, step: int, trained: tuple[Policy, Learner], num_versions: int = 0) -> Path:
    versions = {step - back: make_version(step - back) for back in range(1, num_versions + 1)}
    save_checkpoint(folder, step, *trained, versions)
    return folder / f"step-{step:06d}"


def make_version(version: int) -> dict[str, Tensor]:
    return {"weight": torch.full((2, 3), float(version)), "bias": torch.arange(3) / 7}


def bits_of(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_a_restored_learner_continues_bit_for_bit(
    tmp_path: Path, trained: tuple[Policy, Learner], groups: list[Group]
) -> None:
    path = save(tmp_path, 1, trained)
    policy = load_checkpoint_policy(path, PolicyConfig(device="cpu"))
    learner = build_learner(policy)
    restore_learner(learner, path, read_state(path))
    assert learner.num_updates == trained[1].num_updates == 2
    assert bits_of(policy.model.state_dict()) == bits_of(trained[0].model.state_dict())
    for _ in range(2):
        assert learner.train_step(groups) == trained[1].train_step(groups)
    assert bits_of(policy.model.state_dict()) == bits_of(trained[0].model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_comes_back_in_its_own_precision(
    tmp_path: Path, make_policy: MakePolicy, dtype: torch.dtype
) -> None:
    def take_step(learner: Learner, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in learner.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        learner.optimizer.step()

    # bfloat16 without a forward pass: some virtual machines advertise instructions for it that they lack.
    policy = make_policy(0)
    policy.model.to(dtype)
    learner = build_learner(policy)
    take_step(learner, 1)
    save_optimizer(learner.model, learner.optimizer, tmp_path / "optimizer.safetensors")
    other = build_learner(Policy(deepcopy(policy.model), policy.tokenizer))
    load_optimizer(other.model, other.optimizer, tmp_path / "optimizer.safetensors")
    for each in (learner, other):
        take_step(each, 2)
    for one, two in zip(learner.model.parameters(), other.model.parameters(), strict=True):
        assert one.dtype == two.dtype == dtype
        assert torch.equal(one, two)


def test_the_random_state_of_torch_is_restored(tmp_path: Path, trained: tuple[Policy, Learner]) -> None:
    torch.manual_seed(5)
    path = save(tmp_path, 1, trained)
    expected = torch.rand(3)
    restore_learner(build_learner(load_checkpoint_policy(path, PolicyConfig(device="cpu"))), path, read_state(path))
    assert torch.equal(torch.rand(3), expected)


def test_a_learner_that_never_trained_can_be_saved(
    tmp_path: Path, make_policy: MakePolicy, groups: list[Group]
) -> None:
    policy = make_policy(0)
    path = save(tmp_path, 0, (policy, build_learner(policy)))
    other = load_checkpoint_policy(path, PolicyConfig(device="cpu"))
    learner = build_learner(other)
    restore_learner(learner, path, read_state(path))
    assert learner.train_step(groups) == build_learner(policy).train_step(groups)


def test_older_versions_come_back_in_order(tmp_path: Path, trained: tuple[Policy, Learner]) -> None:
    versions = load_versions(save(tmp_path, 12, trained, num_versions=3))
    assert list(versions) == [9, 10, 11]
    for version, weights in versions.items():
        assert bits_of(weights) == bits_of(make_version(version))


def test_the_policy_folder_has_one_weights_file_which_names_the_version(
    tmp_path: Path, trained: tuple[Policy, Learner]
) -> None:
    path = save(tmp_path, 3, trained)
    weights = path / "policy" / "model.safetensors"
    assert read_state(path).sha256["policy/model.safetensors"] == hash_file(weights)
    assert bits_of(load_file(weights)) == bits_of(trained[0].model.state_dict())


def test_nothing_in_a_checkpoint_is_pickled(tmp_path: Path, trained: tuple[Policy, Learner]) -> None:
    path = save(tmp_path, 3, trained, num_versions=2)
    suffixes = {file.suffix for file in path.rglob("*") if file.is_file()}
    assert suffixes <= {".safetensors", ".json", ".jinja", ".txt"}


def test_every_file_but_the_state_is_hashed(tmp_path: Path, trained: tuple[Policy, Learner]) -> None:
    path = save(tmp_path, 3, trained, num_versions=1)
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert set(read_state(path).sha256) == files - {"state.json"}


@pytest.mark.parametrize("name", ["policy/model.safetensors", "optimizer.safetensors", "versions/v000002.safetensors"])
def test_a_flipped_bit_is_refused_by_the_name_of_its_file(
    tmp_path: Path, trained: tuple[Policy, Learner], name: str
) -> None:
    path = save(tmp_path, 3, trained, num_versions=1)
    data = bytearray((path / name).read_bytes())
    data[-5] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_state(path)
    assert f"{path / name}: does not match its hash; remove {path}" in str(caught.value)


@pytest.mark.parametrize("name", ["policy/model.safetensors", "policy/config.json", "optimizer.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, trained: tuple[Policy, Learner], name: str) -> None:
    path = save(tmp_path, 3, trained)
    (path / name).unlink()
    with pytest.raises(ConfigError, match="is missing"):
        read_state(path)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"step": 4, "num_updates": 2, "sha256": {}}', "\xff"])
def test_a_damaged_state_is_refused_by_name(tmp_path: Path, trained: tuple[Policy, Learner], text: str | None) -> None:
    path = save(tmp_path, 3, trained)
    if text is None:
        (path / "state.json").unlink()
    else:
        (path / "state.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"state\.json: is missing or damaged; remove"):
        read_state(path)


def test_checkpoints_are_listed_by_step_and_other_names_ignored(tmp_path: Path) -> None:
    for name in ("step-000010", "step-000002", "step-1000000", ".step-000012.new-1-abcdef01", "step-x", "notes"):
        (tmp_path / name).mkdir()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2, 10, 1_000_000]
    assert find_newest(tmp_path) == tmp_path / "step-1000000"


def test_without_checkpoints_there_is_no_newest(tmp_path: Path) -> None:
    assert find_newest(tmp_path) is None
    assert find_newest(tmp_path / "none") is None


@pytest.mark.parametrize("keep", [1, 2, 9])
def test_pruning_keeps_the_newest(tmp_path: Path, keep: int) -> None:
    for step in (9, 10, 11):
        (tmp_path / f"step-{step:06d}").mkdir()
    prune_checkpoints(tmp_path, keep)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [9, 10, 11][-keep:]
    assert len(list(tmp_path.iterdir())) == min(keep, 3)


def test_an_interrupted_save_leaves_no_visible_checkpoint(tmp_path: Path, trained: tuple[Policy, Learner]) -> None:
    save(tmp_path, 3, trained)
    overlapping = torch.zeros(4)
    with pytest.raises(RuntimeError):  # safetensors refuses tensors that share memory, halfway through the folder
        save_checkpoint(tmp_path, 4, *trained, {3: {"a": overlapping, "b": overlapping}})
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000003"]
    assert read_state(tmp_path / "step-000003").step == 3


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path, trained: tuple[Policy, Learner]) -> None:
    save(tmp_path, 3, trained, num_versions=2)
    path = save(tmp_path, 3, trained)
    assert load_versions(path) == {}
    assert json.loads((path / "state.json").read_text())["step"] == 3
