"""Drawing from a task set: only by seed, filter and weights."""

import random
from collections import Counter

import pytest

from shoal.config.tasks import FilterConfig
from shoal.seeds import derive_seed
from shoal.tasks.base import is_expensive
from shoal.tasks.sets.family import SetFamily
from shoal.tasks.sets.record import TaskRecord
from shoal.tasks.sets.taskset import SetError, TaskSet
from shoal.tasks.split import Split, heldout_tasks, split_task, train_task


def make_set(**counts: int) -> TaskSet:
    return TaskSet(
        TaskRecord(
            id=f"{source}-{number:04d}",
            source=source,
            task_type="family",
            prompt=f"{source}{number}=",
            info={"family": "sort", "info": {"answer": str(number)}},
            metadata={"solution": str(number)},
            difficulty={"m": number / counts[source]},
        )
        for source in counts
        for number in range(counts[source])
    )


def test_the_worked_example_of_the_docs() -> None:
    """docs/tasks.md: changing the rule breaks every run on a task set."""
    family = SetFamily(make_set(left=3, right=5), FilterConfig(), {"left": 1, "right": 2})
    rng = random.Random(derive_seed("task", "train", 7, 0))
    assert (rng.randrange(3), rng.randrange(5)) == EXAMPLE_DRAWS
    assert family.make_task(random.Random(derive_seed("task", "train", 7, 0))).id == EXAMPLE_ID


EXAMPLE_DRAWS, EXAMPLE_ID = (1, 1), "right-0001"


def test_the_order_in_which_tasks_came_does_not_matter() -> None:
    tasks = make_set(left=20, right=30)
    turned = TaskSet(reversed(tasks.records))
    first, second = (SetFamily(each, FilterConfig(), {}) for each in (tasks, turned))
    assert [train_task(first, seed).id for seed in range(50)] == [train_task(second, seed).id for seed in range(50)]


def test_without_weights_every_task_is_as_likely_as_any_other() -> None:
    family = SetFamily(make_set(left=30, right=90), FilterConfig(), {})
    counts = Counter(family.make_task(random.Random(seed)).id.split("-")[0] for seed in range(4000))
    assert 0.70 < counts["right"] / 4000 < 0.80


def test_weights_mix_sources_and_leave_out_those_without_one() -> None:
    tasks = make_set(left=30, right=90, third=5)
    family = SetFamily(tasks, FilterConfig(), {"left": 3, "right": 1})
    counts = Counter(family.make_task(random.Random(seed)).id.split("-")[0] for seed in range(4000))
    assert set(counts) == {"left", "right"} and 0.71 < counts["left"] / 4000 < 0.79
    with pytest.raises(SetError, match=r"tasks\.weights\.swim"):
        SetFamily(tasks, FilterConfig(), {"swim": 1})
    with pytest.raises(SetError, match="at least one source"):
        SetFamily(tasks, FilterConfig(), {"left": 0})


def test_a_filter_keeps_what_lies_within_its_bounds() -> None:
    family = SetFamily(make_set(left=8), FilterConfig(model="m", min=0.125, max=0.5), {})
    assert [task.id for task in family.list_tasks()] == ["left-0001", "left-0002", "left-0003", "left-0004"]
    assert SetFamily(make_set(left=11), FilterConfig(max_chars=6), {}).num_kept == 10
    with pytest.raises(SetError, match=r"keeps none of the 8 tasks of .*; they have pass rates of m, not of other"):
        SetFamily(make_set(left=8), FilterConfig(model="other"), {})
    with pytest.raises(SetError, match=r"keeps none of the 8 tasks of [^;]*$"):
        SetFamily(make_set(left=8), FilterConfig(model="m", min=0.99), {})


def test_the_sides_of_the_split_never_meet_and_equal_prompts_are_on_one_side() -> None:
    family = SetFamily(make_set(left=200), FilterConfig(), {})
    trained = {train_task(family, seed).id for seed in range(400)}
    held = heldout_tasks(family, 10, 0)
    assert {split_task(task) for task in held} == {Split.HELDOUT} and len({task.id for task in held}) == 10
    assert not trained & {task.id for task in held}
    twins = TaskSet(
        TaskRecord(id=name, source="s", task_type="family", prompt="5=", info={"family": "sort", "info": {}})
        for name in ("one", "two")
    )
    one, two = SetFamily(twins, FilterConfig(), {}).list_tasks()
    assert one.kin == two.kin


def test_a_set_scores_with_the_verifiers_of_its_types_and_names_their_versions() -> None:
    family = SetFamily(make_set(left=9), FilterConfig(), {})
    assert all(family.score(task, family.demonstrate(task)).value == 1.0 for task in family.list_tasks())
    assert family.score(family.list_tasks()[3], "4").value == 0.0
    assert family.stamp_verifiers() == {"family": "family/1"}
    assert set(family.alphabet) >= set("left=0")


def test_one_code_task_makes_no_other_task_of_its_set_expensive() -> None:
    """A validator scores all cheap completions again, whatever else the set contains."""
    program = TaskRecord(id="code", source="s", task_type="code", prompt="write", info={})
    family = SetFamily(TaskSet([*make_set(left=3).records, program]), FilterConfig(), {})
    dear = {task.id for task in family.list_tasks() if is_expensive(family, task)}
    assert dear == {"code"}


def test_a_task_that_nobody_could_solve_is_named() -> None:
    bad = TaskRecord(id="bad", source="s", task_type="family", prompt="5=", info={"family": "swim", "info": {}})
    with pytest.raises(SetError, match="task bad: info"):
        SetFamily(TaskSet([bad]), FilterConfig(), {}).check_tasks()
    odd = TaskRecord(id="odd", source="s", task_type="swim", prompt="5=", info={})
    with pytest.raises(SetError, match=r"task odd: .*no such verifier"):
        SetFamily(TaskSet([odd]), FilterConfig(), {}).check_tasks()
