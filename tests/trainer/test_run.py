"""What a trainer rejects before it starts."""

import asyncio
from pathlib import Path

import pytest
from fake_swarm import BEACON, FakeSwarm, hash_state, make_config, run_life, train_reference

from shoal.errors import ConfigError
from shoal.group import GroupShape, plan_group
from shoal.policy.tokenizer import build_tokenizer
from shoal.protocol.beacon import BeaconChain, derive_group
from shoal.protocol.params import RunParams
from shoal.recipe import Recipe
from shoal.tasks.registry import load_family
from shoal.train.loop import run_training
from shoal.train.rollout_files import read_groups
from shoal.train.sampler import open_beacons
from shoal.trainer.run import TrainerPaths, check_config, check_params, check_recipe, run_trainer


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("steps", "steps"),
        ("async_level", "async_level"),
        ("groups_per_batch", "batch.groups"),
        ("group_size", "batch.group_size"),
        ("max_tokens", "engine.max_tokens"),
    ],
)
def test_settings_that_contradict_the_run_are_refused_by_name(tmp_path: Path, name: str, key: str) -> None:
    config = make_config(tmp_path)
    right = RunParams(steps=4, async_level=0, groups_per_batch=4, group_size=4, max_tokens=8)
    check_params(config, right)
    check_params(config, right.model_copy(update={"max_groups": 16}))
    with pytest.raises(ConfigError, match="max_oversample: the run has 17, got 16"):
        check_params(config, right.model_copy(update={"max_groups": 17}))
    with pytest.raises(ConfigError, match=f"^{key}: the run has 7, got"):
        check_params(config, right.model_copy(update={name: 7}))


def test_a_setting_that_means_nothing_to_a_trainer_is_refused(tmp_path: Path) -> None:
    override = f"beacon={BEACON}"
    with pytest.raises(ConfigError, match=r"^beacon: "):
        check_config(make_config(tmp_path, override))
    with pytest.raises(ConfigError, match=r"^beacon: "):
        asyncio.run(run_trainer(make_config(tmp_path, override), TrainerPaths(coordinator="x", origin=tmp_path)))
    assert not (tmp_path / "tiny-seed0").exists()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("batch.filter=false", "^batch.filter: false here and true in the run's recipe"),
        ("length.mode=exact length.targets=[4]", "^length: the run's recipe has different target lengths"),
    ],
)
def test_a_trainer_keeps_to_the_recipe(tmp_path: Path, recipe: Recipe, override: str, sentence: str) -> None:
    check_recipe(make_config(tmp_path), recipe)
    with pytest.raises(ConfigError, match=sentence):
        check_recipe(make_config(tmp_path, *override.split()), recipe)


def test_a_beacon_gives_the_groups_that_a_swarm_of_this_secret_leases(reference: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, f"beacon={BEACON}")
    chain = BeaconChain(bytes.fromhex(BEACON), config.steps)
    family = load_family(config.tasks.name, config.tasks.options)
    shape = GroupShape(size=4, max_tokens=8, temperature=1.0)
    for step in range(1, config.steps + 1):
        for group in read_groups(reference / "rollouts" / f"step-{step:06d}.parquet"):
            beacon = open_beacons(config)(step)
            plan = plan_group(
                family, build_tokenizer(family.alphabet), shape, step=step, beacon=beacon, index=group.index
            )
            assert plan.task.id == group.task_id
            seeds = derive_group(chain.reveal_step(step), group.index, 4).rollouts
            assert tuple(rollout.seed for rollout in group.rollouts) == seeds


def test_a_beacon_is_another_run_and_its_length_is_fixed(tmp_path: Path, reference: Path) -> None:
    plain = make_config(tmp_path / "plain")
    assert run_training(plain) == 0
    assert hash_state(tmp_path / "plain" / "tiny-seed0") != hash_state(reference)
    secret = make_config(tmp_path / "secret", "steps=1", f"beacon={BEACON}")
    assert run_training(secret) == 0
    with pytest.raises(ConfigError, match="steps = 1"):
        run_training(make_config(tmp_path / "secret", "steps=2", f"beacon={BEACON}"))
    with pytest.raises(ConfigError, match="beacon: must be nothing, or 64"):
        make_config(tmp_path, "beacon=abc")


def test_batches_that_ran_out_of_groups_give_the_same_bits(tmp_path: Path) -> None:
    few = ["batch.max_oversample=1.0", "batch.groups=8"]
    swarm = FakeSwarm(tmp_path / "swarm", train_reference(make_config(tmp_path / "reference", *few)))
    sizes = [len(batch.groups) for batch in swarm.batches.values()]
    assert min(sizes) < 8 and max(sizes) > 0
    run = run_life(make_config(tmp_path, *few), swarm).run.path
    assert hash_state(run) == hash_state(swarm.reference)
