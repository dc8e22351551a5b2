"""A curriculum that follows from the step: every node draws the same task for a step and index."""

from collections.abc import Sequence

import pytest

from shoal.config.run import FilterConfig, LengthConfig, TasksConfig, build_config
from shoal.config.tasks import ScheduleStage
from shoal.errors import ConfigError
from shoal.group import GroupShape, plan_groups
from shoal.policy.tokenizer import build_tokenizer
from shoal.protocol.beacon import number_beacon
from shoal.recipe import Recipe, SetTerms, dump_recipe, load_recipe
from shoal.tasks.base import Family, Task, at_step
from shoal.tasks.sets.family import SetFamily
from shoal.tasks.sets.record import TaskRecord
from shoal.tasks.sets.taskset import SetError, TaskSet
from shoal.tasks.split import Split, heldout_tasks, split_task, train_task
from shoal.validator.consistency import ConsistencyCheck
from shoal.worker.behaviour import WorkerBehaviour
from shoal.worker.orders import WorkLimits, take_order

EASY, HARD = ScheduleStage(step=1, min=0.75, max=1.0), ScheduleStage(step=11, min=0.0, max=0.5)
RATED = FilterConfig(model="m", min=0.125)
BEACON = "ab" * 32


def make_set(count: int = 64, sources: Sequence[str] = ("left", "right")) -> TaskSet:
    """Tasks whose pass rate is their number out of `count`, in turn of the sources."""
    return TaskSet(
        TaskRecord(
            id=f"t-{number:04d}",
            source=sources[number % len(sources)],
            task_type="family",
            prompt=f"{number}=",
            info={"family": "sort", "info": {"answer": str(number)}},
            difficulty={"m": number / count},
        )
        for number in range(count)
    )


def read_rate(task: Task) -> float:
    return int(task.prompt.rpartition(":")[2][:-1]) / 64


def draw_rates(family: Family, step: int) -> list[float]:
    """Pass rates of the tasks that are drawn for a step."""
    return [read_rate(train_task(at_step(family, step), seed)) for seed in range(60)]


def test_each_step_draws_from_its_stage_and_within_the_filter() -> None:
    family = SetFamily(make_set(), RATED, {}, [EASY, HARD])
    for step in (1, 10):
        assert all(0.75 <= rate <= 1.0 for rate in draw_rates(family, step))
    for step in (11, 10**6):
        rates = draw_rates(family, step)
        assert all(0.125 <= rate <= 0.5 for rate in rates), "the filter applies in addition to the schedule"
        assert min(rates) < 0.2 and max(rates) > 0.4
    assert draw_rates(family, 1) == draw_rates(family, 10) != draw_rates(family, 11)


def test_without_a_schedule_no_step_matters() -> None:
    family = SetFamily(make_set(), RATED, {}, [])
    assert at_step(family, 1) is at_step(family, 99) is family


def test_evaluation_has_the_same_tasks_whatever_the_schedule() -> None:
    plain, staged = (SetFamily(make_set(), RATED, {}, stages) for stages in ([], [EASY, HARD]))
    assert heldout_tasks(plain, 5, 0) == heldout_tasks(staged, 5, 0)


def test_worker_validator_and_train_derive_the_same_tasks(recipe: Recipe, make_lease) -> None:
    """Each from the recipe's bytes alone, with the task set loaded separately."""
    tasks = make_set()
    terms = SetTerms(hash=tasks.hash, size=len(tasks.data), filter=RATED, schedule=[EASY, HARD])
    length = LengthConfig(mode="exact", targets=[4, 8], template="{target}:{prompt}")
    update = {"family": "set", "options": {}, "set": terms, "verifiers": {"family": "family/1"}, "length": length}
    data = dump_recipe(recipe.model_copy(update=update))
    tokenizer = build_tokenizer(load_recipe(data).bring_set(tasks.data).open_family().alphabet)
    seen = {}
    for step in (3, 10, 11, 40):
        lease = make_lease("l1", step=step, first=5, count=6, beacon=BEACON)
        author = WorkerBehaviour(load_recipe(data).bring_set(tasks.data))
        worked = author.plan(take_order(lease, author.recipe, WorkLimits()), tokenizer)
        judged = ConsistencyCheck(load_recipe(data).bring_set(tasks.data), tokenizer).plan(lease)
        family = load_recipe(data).bring_set(tasks.data).open_family()
        shape = GroupShape(size=lease.group_size, max_tokens=lease.max_tokens, temperature=1.0)
        beacon = number_beacon(BEACON)
        trained = plan_groups(family, tokenizer, shape, step=step, beacon=beacon, first=5, count=6)
        assert [plan.task for plan in worked] == [plan.task for plan in judged] == [plan.task for plan in trained]
        assert all(plan.task.id.endswith(("@4", "@8")) for plan in worked)
        assert all((read_rate(plan.task) >= 0.75) == (step <= 10) for plan in worked)
        seen[step] = [plan.task.id for plan in worked]
    assert seen[3] == seen[10] != seen[11] == seen[40], "one beacon, so only the stage makes a difference"


def test_a_source_that_a_stage_leaves_out_is_not_missed_but_one_of_the_others_must_have_weight() -> None:
    easy = TaskRecord(id="x", source="top", task_type="family", prompt="x=", info={}, difficulty={"m": 1.0})
    tasks = TaskSet([*(record for record in make_set().records if record.difficulty["m"] < 0.5), easy])
    stages = [ScheduleStage(step=1, min=0.0, max=0.5)]
    assert SetFamily(tasks, RATED, {"left": 1, "top": 1}, stages).at_step(1).weights == {"left": 1}
    with pytest.raises(SetError, match=r"from step 1 on: tasks\.weights\.top: no task of this source is left"):
        SetFamily(tasks, RATED, {"top": 1}, stages)


def test_a_stage_of_held_out_tasks_alone_is_refused_at_the_start() -> None:
    tasks = make_set()
    listed = SetFamily(tasks, RATED, {}, []).list_tasks()
    rate = read_rate(next(task for task in listed if split_task(task) is Split.HELDOUT))
    with pytest.raises(SetError, match="from step 5 on no task is left to train on"):
        SetFamily(tasks, RATED, {}, [EASY, ScheduleStage(step=5, min=rate, max=rate)])


def test_settings_say_the_schedule_by_first_step() -> None:
    data = {"set": ["x.jsonl"], "filter": {"model": "m"}, "schedule": {"11": [0.0, 0.5], "1": [0.75, 1.0]}}
    assert build_config(TasksConfig, data, ()).stages == [EASY, HARD]


@pytest.mark.parametrize(
    ("schedule", "model", "text"),
    [
        ({"1": [0.0, 1.0]}, "", "filter.model"),
        ({"2": [0.0, 1.0]}, "m", "must begin with step 1"),
        ({"1": [0.6, 0.5]}, "m", "at most max"),
        ({"01": [0.0, 1.0]}, "m", "schedule"),
        ({"1": [0.0]}, "m", "schedule"),
        ({"1": [0.0, 1.5]}, "m", "schedule"),
        ({str(step): [0.0, 1.0] for step in range(1, 18)}, "m", "17 stages"),
    ],
)
def test_an_invalid_schedule_is_refused_with_a_reason(schedule, model: str, text: str) -> None:
    data = {"set": ["x.jsonl"], "filter": {"model": model}, "schedule": schedule}
    with pytest.raises(ConfigError, match=text):
        build_config(TasksConfig, data, ())
