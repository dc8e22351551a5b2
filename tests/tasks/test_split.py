"""Training and held-out tasks never meet."""

import random
from dataclasses import dataclass

import pytest

from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.base import Task, build_task
from shoal.tasks.registry import list_families, load_family
from shoal.tasks.split import Split, draw_task, heldout_tasks, split_task, train_task

EASY = {
    "sort": {"min_length": 2, "max_length": 3},
    "reverse": {"min_length": 2, "max_length": 4, "letters": 3},
    "arithmetic": {"min_digits": 1, "max_digits": 2},
    "countdown": {"min_numbers": 2, "max_numbers": 2},
    "chain": {"min_ops": 1, "max_ops": 2},
    "total": {"min_length": 2, "max_length": 3},
}


@dataclass(frozen=True)
class Few:
    """A family of `size` problems."""

    size: int
    name: str = "few"
    alphabet: str = "0123456789="

    def make_task(self, rng: random.Random) -> Task:
        return build_task(self.name, f"{rng.randrange(self.size)}=", {})

    def demonstrate(self, task: Task) -> str:
        return ""

    def score(self, task: Task, completion: str) -> Score:
        return Score(0.0, "no answer")


@pytest.mark.parametrize("name", list_families())
def test_training_and_heldout_tasks_never_overlap(name: str) -> None:
    easy, hard = load_family(name, EASY[name]), load_family(name, {})
    trained = {train_task(family, seed).prompt for family in (easy, hard) for seed in range(3000)}
    heldout = {task.prompt for task in heldout_tasks(hard, 256, seed=0)}
    heldout |= {draw_task(family, Split.HELDOUT, seed).prompt for family in (easy, hard) for seed in range(300)}
    assert not trained & heldout


@pytest.mark.parametrize("name", list_families())
def test_one_task_in_eight_is_held_out(name: str) -> None:
    family, rng = load_family(name, {}), random.Random(0)
    tasks = {task.id: task for task in (family.make_task(rng) for _ in range(8000))}
    share = sum(split_task(task) is Split.HELDOUT for task in tasks.values()) / len(tasks)
    assert 0.105 < share < 0.145


def test_a_drawn_task_is_on_the_side_asked_for() -> None:
    family = load_family("sort", {})
    for split in Split:
        for seed in range(200):
            task = draw_task(family, split, seed)
            assert split_task(task) is split
            assert task == draw_task(family, split, seed)


def test_seeds_give_different_tasks() -> None:
    family = load_family("sort", {"min_length": 8})
    assert len({train_task(family, seed).id for seed in range(500)}) > 490


def test_heldout_tasks_are_distinct_and_deterministic() -> None:
    family = load_family("arithmetic", {"min_digits": 1, "max_digits": 2})
    tasks = heldout_tasks(family, 400, seed=5)
    assert len({task.id for task in tasks}) == 400
    assert tasks == heldout_tasks(family, 400, seed=5)
    assert tasks != heldout_tasks(family, 400, seed=6)


def test_a_longer_heldout_list_begins_with_the_shorter_one() -> None:
    family = load_family("chain", {})
    assert heldout_tasks(family, 50, seed=1)[:10] == heldout_tasks(family, 10, seed=1)
    assert heldout_tasks(family, 0, seed=1) == []


def test_equal_prompts_have_equal_ids() -> None:
    assert build_task("sort", "sort 2 1=", {}).id == build_task("sort", "sort 2 1=", {"answer": "1 2"}).id
    assert build_task("sort", "sort 2 1=", {}).id != build_task("sort", "sort 1 2=", {}).id
    assert build_task("sort", "x=", {}).id != build_task("reverse", "x=", {}).id


def test_a_family_with_one_problem_has_nothing_on_the_other_side() -> None:
    present = split_task(Few(1).make_task(random.Random(0)))
    absent = Split.TRAIN if present is Split.HELDOUT else Split.HELDOUT
    assert draw_task(Few(1), present, 0).prompt == "0="
    with pytest.raises(ConfigError, match=rf"few has too few problems, none of 2000 draws was a {absent} task"):
        draw_task(Few(1), absent, 0)


def test_if_there_are_fewer_heldout_tasks_than_wanted_all_are_found() -> None:
    tasks = [build_task("few", f"{index}=", {}) for index in range(100)]
    there = {task.id for task in tasks if split_task(task) is Split.HELDOUT}
    found = heldout_tasks(Few(100), 256, seed=0)
    assert {task.id for task in found} == there
    assert found[:3] == heldout_tasks(Few(100), 3, seed=0)


def test_the_last_heldout_tasks_of_a_list_are_found_without_being_drawn() -> None:
    class Listed(Few):
        def list_tasks(self) -> list[Task]:
            return [build_task(self.name, f"{index}=", {}) for index in range(self.size)]

        def make_task(self, rng: random.Random) -> Task:
            return self.list_tasks()[0]  # draws never find another one

    there = {task.id for task in Listed(100).list_tasks() if split_task(task) is Split.HELDOUT}
    assert {task.id for task in heldout_tasks(Listed(100), 256, seed=0)} == there
    assert len(heldout_tasks(Listed(100), 4, seed=0)) == 4


def test_shuffles_of_one_list_are_on_one_side() -> None:
    family = load_family("sort", {"min_length": 6, "max_length": 6})
    sides: dict[str, set[Split]] = {}
    for seed in range(300):
        task = family.make_task(random.Random(seed % 30))
        items = list(task.prompt.removesuffix("="))
        random.Random(seed).shuffle(items)
        shuffled = build_task("sort", "".join(items) + "=", task.info, kin=task.info["answer"])
        sides.setdefault(task.info["answer"], set()).update((split_task(task), split_task(shuffled)))
    assert all(len(found) == 1 for found in sides.values())


def _canonical(task: Task) -> str:
    """What reorderings of one problem have in common."""
    info = task.info
    if task.verifier == "countdown":
        return f"{info['target']} {sorted(info['numbers'])}"
    return f"{sorted((info['left'], info['right']))}" if info["operator"] == "+" else task.prompt


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("countdown", {"max_number": 4, "max_target": 12, "max_numbers": 3}),
        ("arithmetic", {"max_digits": 2, "operators": "+-*"}),
    ],
)
def test_reorderings_of_one_problem_are_on_one_side(name: str, options: dict[str, int | str]) -> None:
    family = load_family(name, options)
    sides: dict[str, set[Split]] = {}
    prompts: dict[str, set[str]] = {}
    for seed in range(3000):
        task = family.make_task(random.Random(seed))
        sides.setdefault(_canonical(task), set()).add(split_task(task))
        prompts.setdefault(_canonical(task), set()).add(task.prompt)
    assert sum(len(found) > 1 for found in prompts.values()) > 20
    assert all(len(found) == 1 for found in sides.values())
