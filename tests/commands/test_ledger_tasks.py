"""`shoal ledger tasks` lists every accepted group, with a signal or without, and no other."""

import json
from pathlib import Path

import pytest
from tests.fixtures.world import SECRET

from shoal.audit.database import read_groups
from shoal.cli import main
from shoal.protocol.beacon import BeaconChain, read_seeds
from shoal.protocol.messages import Verdict
from shoal.recipe import Recipe, dump_recipe
from shoal.tasks.split import train_task


@pytest.fixture
def told(make_world):
    """A run with accepted groups of two kinds and a rejected submission: its world, and the leases by outcome."""
    world = make_world()
    world.publish(0)
    world.join("worker", "owner")
    leases = {}
    for name, verdict, changes in (
        ("signal", Verdict.ACCEPTED, {"numbers": (250_000, 1_000_000), "signal": True}),
        ("flat", Verdict.ACCEPTED, {"numbers": (1_000_000, 1_000_000), "signal": False}),
        ("rejected", Verdict.FORM, {}),
    ):
        leases[name] = world.lease("worker")
        world.submit("worker", leases[name])
        world.judge("judge-a", verdict, **changes)
    assert read_groups(world.url)[0] == [], "the tasks of a step are known once its batch is cut"
    world.wait(100)
    world.work("worker")
    world.cut(1)
    return world, leases


def test_groups_without_a_signal_are_among_them_and_rejected_ones_are_not(told) -> None:
    world, leases = told
    groups, _ = read_groups(world.url)
    expected = {
        (lease.step, lease.first + place): (reward, name == "signal")
        for name, reward in (("signal", 0.25), ("flat", 1.0))
        for lease in [leases[name]]
        for place in range(lease.count)
    }
    assert {(group.step, group.index): (group.reward, group.signal) for group in groups} == expected
    assert {group.beacon for group in groups} == {BeaconChain(SECRET, world.params.steps).reveal_step(1)}


def test_the_command_names_the_tasks_that_beacon_and_index_give(told, recipe: Recipe, tmp_path: Path, capsys) -> None:
    world, leases = told
    path, out = tmp_path / "recipe.json", tmp_path / "tasks.jsonl"
    path.write_bytes(dump_recipe(recipe))
    assert main(["ledger", "tasks", world.url, "--recipe", str(path), "--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    first = leases["signal"]
    assert lines[0]["task"] == train_task(recipe.open_family(), read_seeds(first.seeds[0]).task).id
    assert lines[0]["reward"] == 0.25 and lines[0]["attempts"] == recipe.group_size
    assert f"{len(lines)} accepted groups" in capsys.readouterr().out


def test_a_recipe_of_another_run_is_refused(told, recipe: Recipe, tmp_path: Path, monkeypatch, capsys) -> None:
    world, _ = told
    path = tmp_path / "recipe.json"
    path.write_bytes(dump_recipe(recipe))
    monkeypatch.setattr("shoal.audit.database.read_groups", lambda url: ([], "ab" * 32))
    assert main(["ledger", "tasks", world.url, "--recipe", str(path)]) != 0
    assert "not the recipe of this ledger" in capsys.readouterr().err
