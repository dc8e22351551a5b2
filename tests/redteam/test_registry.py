"""The attacks that the family modules declare."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

import shoal.redteam.attacks
from shoal.errors import ConfigError
from shoal.redteam.registry import (
    SCRIPTED_FAMILIES,
    WORKER_FAMILIES,
    Expected,
    attack,
    check_worker_attack,
    find_attack,
    list_attacks,
    list_names,
    make_behaviours,
    read_attacks,
)
from shoal.worker.behaviour import WorkerBehaviour

FAMILIES = (*WORKER_FAMILIES, *SCRIPTED_FAMILIES)


def test_every_family_module_is_loaded_and_declares_attacks():
    (folder,) = shoal.redteam.attacks.__path__
    assert {path.stem for path in Path(folder).glob("*.py")} - {"__init__"} == set(FAMILIES)
    declared = {(found.behave or found.script).__module__ for found in list_attacks().values()}
    assert declared == {import_module(f"shoal.redteam.attacks.{family}").__name__ for family in FAMILIES}


def test_all_attacks_are_there_in_the_order_of_what_is_expected():
    found = list_attacks()
    assert len(found) == 58
    assert [each.expect for each in found.values()] == sorted(
        (each.expect for each in found.values()), key=list(Expected).index
    )


@pytest.mark.parametrize("name", list_attacks())
def test_an_attack_is_a_script_or_makes_behaviours(name, recipe):
    found = find_attack(name)
    assert found.name == name and found.text and found.text.isascii()
    assert (found.script is None) is not (found.behave is None)
    if found.scripted:
        assert inspect.iscoroutinefunction(found.script)
        assert list(inspect.signature(found.script).parameters) == ["session"]
        return
    behaviours = make_behaviours(name, recipe)
    assert behaviours and all(isinstance(behaviour, WorkerBehaviour) for behaviour in behaviours)
    assert behaviours != make_behaviours(name, recipe)  # each attempt starts with a fresh state


def test_attacks_read_from_the_source_are_those_that_are_declared():
    read, declared = read_attacks(), list_attacks()
    assert [(each.name, each.expect, each.text) for each in read.values()] == [
        (each.name, each.expect, each.text) for each in declared.values()
    ]
    found = declared.values()
    assert list_names(WORKER_FAMILIES) == sorted(each.name for each in found if not each.scripted)
    assert list_names(SCRIPTED_FAMILIES) == sorted(each.name for each in found if each.scripted)


def test_only_attacks_that_make_behaviours_are_for_workers():
    for name, found in list_attacks().items():
        if found.scripted:
            with pytest.raises(ConfigError, match=f"--attack {name}: not a worker attack"):
                check_worker_attack(name)


def test_an_unknown_attack_is_answered_with_all():
    with pytest.raises(ConfigError, match="--attack politeness: unknown attack; available: adapter, "):
        find_attack("politeness")


def test_a_name_is_declared_once():
    with pytest.raises(AssertionError, match="duplicate attack name int8"):
        attack("int8", expect=Expected.HARD, text="again")(WorkerBehaviour)
