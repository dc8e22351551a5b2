"""Families by name, and mistakes in their options."""

import subprocess
import sys

import pytest

from shoal.errors import ConfigError
from shoal.tasks.registry import describe_family, list_families, load_family


def test_families_are_listed_in_order() -> None:
    assert list_families() == ("arithmetic", "chain", "countdown", "reverse", "sort", "total")
    assert all(load_family(name, {}).name == name for name in list_families())


@pytest.mark.parametrize("name", list_families())
def test_a_family_describes_its_options_and_shows_an_example(name: str) -> None:
    card = describe_family(name)
    family = load_family(name, {option.name: option.default for option in card.options})
    assert family == load_family(name, {})
    assert card.summary and all(option.doc and option.allowed for option in card.options)
    assert family.score(card.task, card.demonstration).value == 1.0


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        (
            "sorting",
            {},
            "tasks.name = 'sorting': no such family; allowed are arithmetic, chain, countdown, reverse, sort, total, "
            "and gym_NAME for those of reasoning-gym",
        ),
        ("sort", {"length": 4}, "tasks.options.length: no such option; allowed are items, min_length, max_length"),
        ("sort", {"min_length": 0}, "tasks.options.min_length = 0: allowed are whole numbers 1 to 64"),
        ("sort", {"max_length": 65}, "tasks.options.max_length = 65: allowed are whole numbers 1 to 64"),
        ("sort", {"min_length": True}, "tasks.options.min_length = True: allowed are whole numbers 1 to 64"),
        ("sort", {"min_length": 4.0}, "tasks.options.min_length = 4.0: allowed are whole numbers 1 to 64"),
        ("sort", {"min_length": "4"}, "tasks.options.min_length = '4': allowed are whole numbers 1 to 64"),
        ("sort", {"items": "words"}, "tasks.options.items = 'words': allowed are digits, letters, numbers"),
        ("sort", {"min_length": 9}, "tasks.options.min_length = 9 must be at most max_length = 8"),
        ("reverse", {"max_length": 3}, "tasks.options.min_length = 4 must be at most max_length = 3"),
        ("arithmetic", {"min_digits": 5}, "tasks.options.min_digits = 5 must be at most max_digits = 4"),
        ("arithmetic", {"operators": "/"}, "tasks.options.operators = '/': allowed are +, -, *, +-, +*, -*, +-*"),
        ("countdown", {"exact": 1}, "tasks.options.exact = 1: allowed are true, false"),
        ("countdown", {"min_numbers": 5}, "tasks.options.min_numbers = 5 must be at most max_numbers = 4"),
        ("chain", {"min_ops": 6}, "tasks.options.min_ops = 6 must be at most max_ops = 5"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_key(name: str, options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_family(name, options)
    assert str(error.value) == sentence


def test_tasks_do_not_import_torch() -> None:
    code = "import sys, shoal.tasks; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
