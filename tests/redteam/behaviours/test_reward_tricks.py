"""No verifier accepts a trick as an answer; poisoned answers are correct and fit."""

import random

import pytest

from shoal.redteam.behaviours.reward_tricks import fill_length, list_tricks, plant_mark
from shoal.tasks.registry import list_families, load_family

FAMILIES = [
    *((name, {}) for name in list_families()),
    ("sort", {"items": "numbers"}),
    ("sort", {"items": "letters"}),
    ("countdown", {"exact": False}),
    ("arithmetic", {"steps": False}),
]


def draw_tasks(family):
    return [family.make_task(random.Random(seed)) for seed in range(40)]


@pytest.mark.parametrize(("name", "options"), FAMILIES)
def test_no_trick_is_worth_anything(name: str, options: dict) -> None:
    family = load_family(name, options)
    for task in draw_tasks(family):
        for trick in list_tricks(family, task):
            assert family.score(task, trick).value == 0.0, (task.prompt, trick)


@pytest.mark.parametrize(("name", "options"), FAMILIES)
@pytest.mark.parametrize("write", [plant_mark, fill_length])
def test_poison_is_right_and_fits(write, name: str, options: dict) -> None:
    family = load_family(name, options)
    for task in draw_tasks(family):
        text = write(family, task, 200)
        assert family.score(task, text).value == 1.0
        assert len(text) < 200 and set(text) <= set(family.alphabet)


@pytest.mark.parametrize("name", ["sort", "arithmetic", "countdown", "chain"])
def test_where_a_task_allows_it_poison_is_no_demonstration_and_fills_its_room(name: str) -> None:
    family = load_family(name, {})
    task = draw_tasks(family)[0]
    answer = family.demonstrate(task)
    assert plant_mark(family, task, 200) != answer
    assert len(fill_length(family, task, 200)) == 199


def test_without_room_the_plain_answer_is_left() -> None:
    family = load_family("sort", {})
    task = draw_tasks(family)[0]
    answer = family.demonstrate(task)
    assert plant_mark(family, task, len(answer) + 1) == fill_length(family, task, len(answer) + 1) == answer
