"""The folder of a run's versions: several files, the published type, and what a dead writer leaves."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.config.run import LearnerConfig, PolicyConfig, TinyConfig
from shoal.errors import TrainerError
from shoal.learner import sharded
from shoal.learner.learner import Learner
from shoal.learner.parallel import ONE, Ranks
from shoal.policy import weights
from shoal.policy.model import Policy, load_policy, open_policy
from shoal.policy.weights import INDEX
from shoal.shardcast.growing import is_growing, read_plan
from shoal.shardcast.origin import SHARD_BYTES, compute_root
from shoal.train.resume import TrainState
from shoal.trainer.versions import VersionRecord, Versions, list_versions
from shoal.util.files import remove_dir

SMALL = TinyConfig(layers=2, width=16, heads=2, kv_heads=1, context=64)
SEVERAL = PolicyConfig(shard_bytes=4096)


def make_policy(seed: int = 0) -> Policy:
    return load_policy(PolicyConfig(tiny=SMALL), alphabet="abc", seed=seed)


PAIR = replace(ONE, size=2)
"""a learner of two ranks, as far as versions are concerned"""


def state_of(policy: Policy, ranks: Ranks = ONE) -> TrainState:
    return TrainState(0, policy, Learner(policy.model, LearnerConfig(), max_tokens=8, ranks=ranks), OrderedDict())


def moved_state(distance: float, ranks: Ranks = ONE) -> TrainState:
    policy = make_policy()
    move_weights(policy, distance)
    return state_of(policy, ranks)


def has_same_weights(one: Policy, other: Policy) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.model.parameters(), other.model.parameters(), strict=True))


def move_weights(policy: Policy, distance: float) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1 + distance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_in_several_files_opens_with_its_weights(tmp_path: Path, dtype: Any) -> None:
    policy = make_policy()
    versions = Versions(tmp_path, SEVERAL.model_copy(update={"publish_dtype": dtype}))
    versions.write(3, state_of(policy))
    path = versions.path_of(3)
    assert (path / INDEX).exists() and len(list(path.glob("*.safetensors"))) > 2
    opened = open_policy(path, dtype=getattr(torch, dtype)).model.state_dict()
    wanted = {name: tensor.to(getattr(torch, dtype)) for name, tensor in policy.model.state_dict().items()}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in opened.items())


def test_a_version_in_bfloat16_has_half_the_bytes(tmp_path: Path) -> None:
    policy, sizes = make_policy(), []
    for dtype in (torch.float32, torch.bfloat16):
        versions = Versions(tmp_path / str(dtype), PolicyConfig(publish_dtype=str(dtype).removeprefix("torch.")))
        versions.write(0, state_of(policy))
        tensors = load_file(versions.path_of(0) / weights.WEIGHTS)
        assert {tensor.dtype for tensor in tensors.values()} == {dtype}
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
    assert sizes[0] == 2 * sizes[1]


@pytest.mark.parametrize("config", [PolicyConfig(), SEVERAL], ids=["one file", "several"])
def test_a_step_that_is_computed_again_must_give_the_same_bits(tmp_path: Path, config: PolicyConfig) -> None:
    policy, versions = make_policy(), Versions(tmp_path, config)
    versions.write(1, state_of(policy))
    versions.write(1, state_of(policy))
    move_weights(policy, 1e-6)
    with pytest.raises(TrainerError, match="v1 was computed again with different weights"):
        versions.write(1, state_of(policy))


def test_published_bits_are_compared_after_rounding(tmp_path: Path) -> None:
    policy = make_policy()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.copy_(parameter.bfloat16())
    versions = Versions(tmp_path, SEVERAL.model_copy(update={"publish_dtype": "bfloat16"}))
    versions.write(1, state_of(policy))
    move_weights(policy, 1e-6)
    versions.write(1, state_of(policy))
    move_weights(policy, 1e-2)
    with pytest.raises(TrainerError, match="different weights"):
        versions.write(1, state_of(policy))


def test_the_same_weights_in_another_type_are_another_version(tmp_path: Path) -> None:
    policy = make_policy()
    Versions(tmp_path).write(1, state_of(policy))
    with pytest.raises(TrainerError, match="different weights"):
        Versions(tmp_path, PolicyConfig(publish_dtype="bfloat16")).write(1, state_of(policy))


def test_the_origin_can_begin_before_the_weights_are_written(tmp_path: Path) -> None:
    versions, seen = Versions(tmp_path, SEVERAL), []
    path = versions.path_of(2)

    def look() -> None:
        plan = read_plan(path)
        assert plan is not None and is_growing(path) and list_versions(tmp_path) == []
        seen.append((plan, {file.name: file.stat().st_size for file in path.iterdir()}))

    versions.write(2, state_of(make_policy()), look)
    (plan, early), *more = seen
    files = {file.name: file.stat().st_size for file in path.iterdir()}
    assert not more and plan == files and not is_growing(path) and list_versions(tmp_path) == [2]
    assert early.items() < files.items() and not any(name.endswith("safetensors") for name in early)


def test_a_version_that_was_handed_over_before_is_compared_before_it_is_published_again(tmp_path: Path) -> None:
    policy, versions = make_policy(), Versions(tmp_path / "first", SEVERAL)
    versions.write(1, state_of(policy))
    root = compute_root(versions.path_of(1), SHARD_BYTES)
    begun: list[int] = []
    for name, other, error in (("same", make_policy(), False), ("other", make_policy(1), True)):
        again = Versions(tmp_path / name, SEVERAL)
        again.record(VersionRecord(1, root, "", ""))
        if error:
            with pytest.raises(TrainerError, match=r"published\.jsonl"):
                again.write(1, state_of(other), lambda: begun.append(1))
        else:
            again.write(1, state_of(other), lambda: begun.append(0))
    assert begun == [0]


class DiedError(Exception):
    pass


@pytest.mark.parametrize("call", ["create_files", "finish_file"])
def test_nothing_is_left_of_a_version_whose_writing_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    versions, policy = Versions(tmp_path, SEVERAL), make_policy()
    calls: list[str] = []

    def fail_second(original: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            calls.append(call)
            if call == "create_files" or len(calls) == 2:
                raise DiedError(call)
            original(*args)

        return run

    monkeypatch.setattr(sharded, call, fail_second(getattr(weights, call)))
    with pytest.raises(DiedError):
        versions.write(1, state_of(policy))
    assert calls and [path.name for path in tmp_path.iterdir()] == ["written.jsonl"]
    monkeypatch.undo()
    versions.write(1, state_of(policy))
    assert list_versions(tmp_path) == [1]


def test_what_a_killed_writer_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    Versions(tmp_path).write(1, state_of(make_policy()))
    (tmp_path / "v000002").mkdir()
    (tmp_path / "v000002" / "config.json").write_text("{}")
    (tmp_path / "v000002.writing").write_text('{"config.json": 2}')
    assert list_versions(tmp_path) == [1]
    Versions(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000001", "written.jsonl"]


def test_on_other_devices_the_first_version_stands_and_training_continues_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, other, versions = moved_state(0.0), moved_state(1e-3, PAIR), Versions(tmp_path)
    versions.write(1, first)
    versions = Versions(tmp_path)
    versions.write(1, other)
    assert has_same_weights(other.policy, first.policy)
    assert has_same_weights(open_policy(versions.path_of(1)), first.policy)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "v1 was first computed on cpu x 1, which rounds differently than cpu x 2" in message
    with pytest.raises(TrainerError):
        versions.write(1, moved_state(1e-3))


def test_an_announced_version_that_is_no_longer_kept_is_not_replaced(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    versions.write(1, moved_state(0.0))
    path = versions.path_of(1)
    versions.record(VersionRecord(1, compute_root(path, 1 << 20), "m", "b", 1 << 20))
    remove_dir(path)
    other, kept = moved_state(1e-3, PAIR), moved_state(1e-3)
    Versions(tmp_path).write(1, other)
    assert not path.exists() and has_same_weights(other.policy, kept.policy)
    Versions(tmp_path).write(1, moved_state(0.0))
    assert path.exists()
