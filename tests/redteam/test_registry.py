"""The table of attacks and the modules that it names."""

import inspect
from pathlib import Path

import pytest

import shoal.redteam.attacks
from shoal.errors import ConfigError
from shoal.redteam.registry import ATTACKS, check_cheat, find_attack, list_cheats, load_attack, make_authors
from shoal.worker.author import Author


def test_every_module_is_in_the_table_and_every_row_has_a_module():
    (folder,) = shoal.redteam.attacks.__path__
    assert {path.stem for path in Path(folder).glob("*.py")} - {"__init__"} == set(ATTACKS)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_has_the_entry_that_its_row_says_and_no_other(name, recipe):
    module = load_attack(name)
    assert module.__doc__ and module.__doc__.isascii()
    assert hasattr(module, "attack") is ATTACKS[name].scripted
    assert hasattr(module, "make_authors") is not ATTACKS[name].scripted
    if ATTACKS[name].scripted:
        assert inspect.iscoroutinefunction(module.attack)
        assert list(inspect.signature(module.attack).parameters) == ["camp"]
        return
    authors = make_authors(name, recipe)
    assert authors and all(isinstance(author, Author) for author in authors)
    assert authors != make_authors(name, recipe)  # who cheats twice begins anew


def test_only_attacks_of_authors_are_for_workers():
    assert set(list_cheats()) == {name for name, attack in ATTACKS.items() if not attack.scripted}
    for name, attack in ATTACKS.items():
        if attack.scripted:
            with pytest.raises(ConfigError, match=f"--attack {name}: no way for a worker to work"):
                check_cheat(name)


def test_an_attack_that_there_is_none_of_is_a_mistake():
    with pytest.raises(ConfigError, match="--attack politeness: no such attack; there are adapter, "):
        find_attack("politeness")
