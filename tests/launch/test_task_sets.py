"""A swarm on a task set with target lengths, made ready: settings, recipe and papers say the same."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.config.run import load_config
from shoal.coordinator.run import load_service
from shoal.coordinator.run_files import load_run_files
from shoal.errors import ConfigError
from shoal.launch.layout import SwarmPaths
from shoal.launch.prepare import PreparedSwarm, prepare_swarm
from shoal.launch.settings import LaunchConfig
from shoal.node.recipe import fetch_recipe, read_tasks
from shoal.node.session import Session
from shoal.recipe import load_recipe
from shoal.tasks.length import read_target
from shoal.tasks.sets.sources import open_set
from shoal.tasks.split import train_task
from shoal.util.files import hash_file
from shoal.util.waits import RoleWaits

SET = ["tasks.options={}", 'tasks.set=["family:sort:40", "family:reverse:40"]', "tasks.weights={sort = 3, reverse = 1}"]
LENGTH = ["length.mode=clip", "length.targets=[3, 6]", "length.template='{target}:{prompt}'"]
FEW = ["eval.tasks=4", "sft.heldout=4"]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory, load_tiny: Callable[..., LaunchConfig]) -> PreparedSwarm:
    config = load_tiny(tmp_path_factory.mktemp("runs"), *SET, *LENGTH, *FEW)
    return prepare_swarm(config, SwarmPaths.of(config))


def test_recipe_settings_and_papers_name_the_same_set(ready: PreparedSwarm) -> None:
    layout = ready.layout
    recipe = load_recipe(layout.recipe.read_bytes())
    tasks = open_set(["family:sort:40", "family:reverse:40"])
    assert recipe.set.hash == hash_file(layout.tasks) == tasks.hash and recipe.set.size == len(tasks.data)
    assert recipe.verifiers == {"family": "family/1"} and recipe.length == ready.config.length
    run = load_config(layout.run_settings)
    assert run.tasks.set == [str(layout.tasks)] and run.tasks.hash == tasks.hash
    service = load_service(layout.service, [], {})
    assert load_run_files(service.recipe, service.calibration, service.params, service.tasks).tasks == tasks.data


def test_a_coordinator_does_not_hand_out_another_set(ready: PreparedSwarm, tmp_path: Path) -> None:
    service = load_service(ready.layout.service, [], {})
    (tmp_path / "other.jsonl").write_bytes(open_set(["family:sort:3"]).data)
    with pytest.raises(ConfigError, match="not the task set that the recipe names"):
        load_run_files(service.recipe, service.calibration, service.params, str(tmp_path / "other.jsonl"))


class OneRun:
    """A session with a coordinator that has these papers."""

    def __init__(self, ready: PreparedSwarm, tasks: bytes) -> None:
        self.waits, self.client, self.asked = RoleWaits("worker"), self, 0
        self._recipe, self._tasks = ready.layout.recipe.read_bytes(), tasks
        self.descriptor = type("Descriptor", (), {"run": "tiny", "tasks": hash_file(ready.layout.recipe)})

    ask_coordinator = Session.ask_coordinator

    async def read_recipe(self) -> bytes:
        return self._recipe

    async def read_tasks(self, size: int) -> bytes:
        self.asked += 1
        return self._tasks[:size]


def test_a_node_gets_the_set_once_and_believes_its_hash_alone(ready: PreparedSwarm, tmp_path: Path) -> None:
    data = ready.layout.tasks.read_bytes()
    session = OneRun(ready, data)
    recipe = asyncio.run(fetch_recipe(session, tmp_path))  # type: ignore[arg-type]
    task = train_task(recipe.open_family(), 5)
    assert read_target(task.id) in (3, 6)
    again = asyncio.run(fetch_recipe(session, tmp_path))  # type: ignore[arg-type]
    assert train_task(again.open_family(), 5) == task and session.asked == 1
    (tmp_path / "tasks.jsonl").write_bytes(data[:-2] + b"!\n")
    asyncio.run(fetch_recipe(session, tmp_path))  # type: ignore[arg-type]
    assert session.asked == 2, "what was damaged on disk is fetched again"
    (tmp_path / "liar").mkdir()
    with pytest.raises(ConfigError, match="different task set"):
        asyncio.run(fetch_recipe(OneRun(ready, data[:-2] + b"!\n"), tmp_path / "liar"))  # type: ignore[arg-type]


def test_a_node_may_bring_the_set_in_another_spelling(ready: PreparedSwarm, tmp_path: Path) -> None:
    recipe = load_recipe(ready.layout.recipe.read_bytes())
    rows = [json.loads(line) for line in ready.layout.tasks.read_bytes().splitlines()]
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps(row, indent=None) + "\n" for row in reversed(rows)))
    assert read_tasks(own, recipe) == ready.layout.tasks.read_bytes()
    own.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(ConfigError, match="has different tasks"):
        read_tasks(own, recipe)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("tasks.reward=json:dumps", "tasks.reward: user code"),
        ("batch.curriculum=true", "batch.curriculum: a swarm's tasks"),
    ],
)
def test_a_swarm_takes_no_code_and_no_choice_of_tasks(
    tmp_path: Path, load_tiny: Callable[..., LaunchConfig], override: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_tiny(tmp_path, *SET, override)
