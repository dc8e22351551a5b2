"""Versions computed again: equal on the same devices, and on others the first one stands."""

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoal.config.run import LearnerConfig, PolicyConfig, TinyConfig
from shoal.errors import TrainerError
from shoal.learner.learner import Learner
from shoal.learner.parallel import ONE, Ranks
from shoal.policy.model import load_policy, open_policy
from shoal.shardcast.origin import compute_root
from shoal.train.resume import TrainState
from shoal.trainer.versions import VersionRecord, Versions
from shoal.util.files import remove_dir

PAIR = replace(ONE, size=2)
"""a learner of two ranks, as far as versions are concerned"""


def make_state(shift: float = 0.0, ranks: Ranks = ONE) -> TrainState:
    tiny = TinyConfig(layers=1, width=16, heads=2, kv_heads=1, context=32)
    policy = load_policy(PolicyConfig(tiny=tiny, device="cpu"), alphabet="abc", seed=0)
    with torch.no_grad():
        policy.model.lm_head.weight.add_(shift)
    learner = Learner(policy.model, LearnerConfig(), max_tokens=8, ranks=ranks)
    return TrainState(1, policy, learner, OrderedDict())


def read_head(path: Path) -> torch.Tensor:
    return open_policy(path).model.lm_head.weight.detach()


def test_the_same_devices_must_compute_the_same_bits(tmp_path: Path) -> None:
    Versions(tmp_path).write(1, make_state())
    Versions(tmp_path).write(1, make_state())
    with pytest.raises(TrainerError, match="computed again with different weights"):
        Versions(tmp_path).write(1, make_state(1e-6))


def test_on_other_devices_the_first_version_stands_and_training_continues_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_state()
    Versions(tmp_path).write(1, first)
    other = make_state(1e-6, PAIR)
    versions = Versions(tmp_path)
    versions.write(1, other)
    assert torch.equal(other.policy.model.lm_head.weight, first.policy.model.lm_head.weight)
    assert torch.equal(read_head(versions.path_of(1)), first.policy.model.lm_head.weight)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "v1 was first computed on cpu x 1, which rounds differently than cpu x 2" in message
    with pytest.raises(TrainerError):
        versions.write(1, make_state(1e-6))


def test_an_announced_version_that_is_no_longer_kept_is_not_replaced(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    versions.write(1, make_state())
    path = versions.path_of(1)
    versions.record(VersionRecord(1, compute_root(path, 1 << 20), "m", "b", 1 << 20))
    remove_dir(path)
    other = make_state(1e-6, PAIR)
    kept = other.policy.model.lm_head.weight.clone()
    Versions(tmp_path).write(1, other)
    assert not path.exists() and torch.equal(other.policy.model.lm_head.weight, kept)
    Versions(tmp_path).write(1, make_state())
    assert path.exists()
