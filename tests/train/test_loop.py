"""What a training run rejects or fixes before it starts."""

import re
from pathlib import Path

import pytest
from tests.fixtures.paths import TINY

from shoal.config.run import load_config
from shoal.errors import ConfigError
from shoal.train.loop import run_training


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
        ("engine.max_tokens=510", "engine.max_tokens: must be at most"),
        ("eval.tasks=100000", "distinct held-out tasks"),
    ],
)
def test_a_mistake_is_found_before_anything_is_moved(tmp_path: Path, override: str, reason: str) -> None:
    run = train(tmp_path, "steps=1")
    kept = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ConfigError, match=re.escape(reason)):
        run_training(load_config(TINY, [f"out={tmp_path}", "seed=1", override]), fresh=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    assert (tmp_path / "latest").resolve() == run.resolve()


def test_a_policy_may_be_named_through_the_latest_run(tmp_path: Path) -> None:
    run = train(tmp_path, "steps=1")
    folder = "latest/checkpoints/step-000001/policy"
    run_training(load_config(TINY, [f"out={tmp_path}", "steps=0", "name=second", f"policy.path={tmp_path / folder}"]))
    second = load_config(tmp_path / "second-seed0" / "config.toml")
    assert second.policy.path == str((run / folder.removeprefix("latest/")).resolve())


def test_the_run_of_a_swarm_is_not_resumed_by_shoal_train(tmp_path: Path) -> None:
    """Its checkpoints would become those of a run without a ledger."""
    (tmp_path / "tiny-seed0" / "versions").mkdir(parents=True)
    with pytest.raises(ConfigError, match="tiny-seed0: holds the run of a swarm"):
        train(tmp_path)
