"""Versions of a run: the second opens faster than the first, with the same result."""

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.config.run import LoraConfig
from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.node import weights
from shoal.node.weights import WeightsOpener, open_version
from shoal.policy.adapter import save_adapter
from shoal.policy.lora import attach_adapters, find_adapted
from shoal.policy.model import Policy, open_policy
from shoal.recipe import Recipe
from shoal.shardcast.fetch.upstreams import GoneError
from shoal.shardcast.origin_service import open_origin
from shoal.util.waits import RoleWaits


def same(left: Policy, right: Policy) -> bool:
    own, other = left.model.state_dict(), right.model.state_dict()
    return own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)


def test_a_version_after_another_has_its_own_weights_and_leaves_those_of_the_other(
    recipe: Recipe, versions: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opener = WeightsOpener(recipe)
    first = opener.open(0, versions[0])
    monkeypatch.setattr(weights, "open_version", None)  # from here on the slow path must not be used
    second = opener.open(1, versions[1])
    monkeypatch.undo()
    assert same(first, open_version(0, versions[0], recipe)) and same(second, open_version(1, versions[1], recipe))
    assert not same(first, second) and not second.model.training


def test_a_version_may_take_the_memory_of_another(recipe: Recipe, versions: dict[int, Path]) -> None:
    opener = WeightsOpener(recipe)
    first = opener.open(0, versions[0])
    places = {tensor.data_ptr() for tensor in first.model.parameters()}
    second = opener.open(1, versions[1], over=first)
    assert second is first and {tensor.data_ptr() for tensor in second.model.parameters()} == places
    assert same(second, open_version(1, versions[1], recipe))
    third = opener.open(0, versions[0])
    assert third is not second and same(third, open_version(0, versions[0], recipe))
    assert same(second, open_version(1, versions[1], recipe))


def test_a_version_that_differs_in_more_than_weights_leaves_the_other_alone(
    recipe: Recipe, versions: dict[int, Path], tmp_path: Path
) -> None:
    opener, folder = WeightsOpener(recipe), tmp_path / "v1"
    first = opener.open(0, versions[0])
    shutil.copytree(versions[1], folder)
    (folder / "note.txt").write_text("another file")
    second = opener.open(1, folder, over=first)
    assert second is not first and same(first, open_version(0, versions[0], recipe))


def test_a_version_of_another_architecture_is_refused_after_a_good_one(
    recipe: Recipe, versions: dict[int, Path], tmp_path: Path
) -> None:
    opener, folder = WeightsOpener(recipe), tmp_path / "v1"
    opener.open(0, versions[0])
    shutil.copytree(versions[1], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(ConfigError, match="different architecture"):
        opener.open(1, folder)


@pytest.mark.parametrize("size", [0, 100, 2000])
def test_weights_that_are_not_all_there_are_refused_after_good_ones(
    recipe: Recipe, versions: dict[int, Path], tmp_path: Path, size: int
) -> None:
    opener, folder = WeightsOpener(recipe), tmp_path / "v1"
    opener.open(0, versions[0])
    shutil.copytree(versions[1], folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConfigError):
        opener.open(1, folder)


@pytest.fixture
def adapters(versions: dict[int, Path], tmp_path: Path) -> dict[int, Path]:
    """v0, and adapters over it, as a client leaves them."""
    shutil.copytree(versions[0], tmp_path / "v0")
    model = open_policy(versions[0]).model
    attach_adapters(model, LoraConfig(rank=2), seed=0)
    for version in (1, 2):
        for module in find_adapted(model).values():
            module.lora_B.data.add_(0.01 * version)
        save_adapter(model, tmp_path / f"v{version}")
    return {version: tmp_path / f"v{version}" for version in range(3)}


def test_adapters_are_opened_in_any_order_with_the_same_bits(recipe: Recipe, adapters: dict[int, Path]) -> None:
    alone = {version: open_version(version, folder, recipe) for version, folder in adapters.items()}
    assert not same(alone[0], alone[1]) and not same(alone[1], alone[2])
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 2), (2, 1, 0)):
        opener = WeightsOpener(recipe)
        for version in order:
            policy = opener.open(version, adapters[version])
            assert same(policy, alone[version]) and not find_adapted(policy.model)
            for tensor in policy.model.parameters():  # as an engine does, which takes the weights of others
                tensor.data.copy_(tensor * 1.0)


def test_adapters_take_the_memory_of_each_other_with_the_same_bits(recipe: Recipe, adapters: dict[int, Path]) -> None:
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 1, 0)):
        opener, policy = WeightsOpener(recipe), None
        for version in order:
            found = opener.open(version, adapters[version], over=policy)
            assert policy is None or found is policy
            policy = found
            assert same(policy, open_version(version, adapters[version], recipe))


def test_an_adapter_that_does_not_fit_or_has_no_base_is_refused(recipe: Recipe, adapters: dict[int, Path]) -> None:
    opener = WeightsOpener(recipe)
    opener.open(0, adapters[0])
    path = adapters[1] / "adapter_config.json"
    path.write_text(path.read_text().replace('"r": 2', '"r": 4'))
    with pytest.raises(ConfigError, match="does not fit the model"):
        opener.open(1, adapters[1])
    shutil.rmtree(adapters[0])
    with pytest.raises(ConfigError, match="its base model is not beside it"):
        opener.open(2, adapters[2])


def test_a_version_that_is_no_longer_followed_is_pulled_for_an_appeal(
    recipe: Recipe, versions: dict[int, Path], tmp_path: Path
) -> None:
    key = Key.generate()

    async def go() -> Policy | None:
        async with open_origin(tmp_path / "origin", run="reef", key=key, keep=1, keep_s=3600.0) as origin:
            for version in range(11):  # the newest anchor is v8
                folder = shutil.copytree(versions[min(version, 1)], tmp_path / f"v{version}")
                (folder / "note.txt").write_text(str(version))
                await origin.publish(folder, version)
            descriptor = SimpleNamespace(run="reef", publisher=key.public, relays=(str(origin.server.url),))
            session: Any = SimpleNamespace(descriptor=descriptor, authority=None, waits=RoleWaits("validator"))
            async with weights.open_weights(session, tmp_path / "weights", keep=1) as client:
                await client.pull()
                with pytest.raises(GoneError):
                    await client.pull(0)
                return await weights.PolicyCache(session, client, recipe, tmp_path).find(0)

    found = asyncio.run(go())
    assert found is not None and same(found, open_version(0, versions[0], recipe))
