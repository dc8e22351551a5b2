"""What holds for every family: demonstrations are correct, wrong answers are not, and scoring survives any text."""

import json
import random
import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.tasks.base import MAX_COMPLETION_CHARS, Family, Task
from shoal.tasks.registry import list_families, load_family
from shoal.tasks.split import train_task

VARIANTS: list[tuple[str, dict[str, bool | int | float | str]]] = [
    ("sort", {}),
    ("sort", {"items": "letters", "min_length": 1, "max_length": 64}),
    ("sort", {"items": "numbers", "min_length": 2}),
    ("reverse", {}),
    ("reverse", {"letters": 2, "min_length": 6, "max_length": 64}),
    ("arithmetic", {}),
    ("arithmetic", {"operators": "+-*", "min_digits": 1, "max_digits": 32}),
    ("arithmetic", {"operators": "-", "steps": False}),
    ("countdown", {}),
    ("countdown", {"exact": False, "operators": "+-*/"}),
    ("countdown", {"min_numbers": 6, "max_numbers": 6, "max_number": 99, "operators": "+-*/"}),
    ("countdown", {"min_numbers": 2, "max_numbers": 5, "operators": "+"}),
    ("chain", {}),
    ("chain", {"min_ops": 1, "max_ops": 16}),
    ("chain", {"operators": "-", "steps": False}),
    ("total", {}),
    ("total", {"min_length": 1, "max_length": 12, "passes": 3}),
    ("total", {"passes": 0}),
]
FAMILIES = [load_family(name, options) for name, options in VARIANTS]
variants = pytest.mark.parametrize("family", FAMILIES, ids=[f"{name}-{options}" for name, options in VARIANTS])

ANY_TEXT = st.one_of(
    st.text(),
    st.text(st.characters(codec=None)),  # lone surrogates and NUL included
    st.text(string.digits + "+-*/()=;, abcxyz"),
    st.builds(lambda text, times: text * times, st.text(max_size=8), st.integers(0, 10_000)),
)


def draw_tasks(family: Family, count: int) -> list[Task]:
    return [family.make_task(random.Random(seed)) for seed in range(count)]


@variants
def test_every_demonstration_scores_one(family: Family) -> None:
    for task in draw_tasks(family, 300):
        score = family.score(task, family.demonstrate(task))
        assert (score.value, score.reason) == (1.0, "correct"), task


@variants
def test_a_demonstration_is_judged_by_its_prompt_not_by_the_options(family: Family) -> None:
    plain = load_family(family.name, {})
    for task in draw_tasks(family, 50):
        assert plain.score(task, family.demonstrate(task)).value == 1.0


@variants
def test_the_alphabet_covers_prompts_and_demonstrations(family: Family) -> None:
    for task in draw_tasks(family, 100):
        assert set(task.prompt + family.demonstrate(task)) <= set(family.alphabet)


@variants
def test_equal_random_sources_give_equal_tasks_and_demonstrations(family: Family) -> None:
    for seed in range(50):
        first, second = (family.make_task(random.Random(seed)) for _ in range(2))
        assert first == second
        assert family.demonstrate(first) == family.demonstrate(second)


@variants
def test_tasks_survive_json(family: Family) -> None:
    for task in draw_tasks(family, 20):
        assert json.loads(json.dumps(task.info)) == task.info


@variants
def test_spoiled_demonstrations_score_zero(family: Family) -> None:
    for task in draw_tasks(family, 100):
        demonstration = family.demonstrate(task)
        for spoiled in (demonstration + "?", demonstration + ";", "", ";", " ", task.prompt, demonstration + ";zzz"):
            assert family.score(task, spoiled).value == 0.0, spoiled


@variants
def test_blanks_around_the_answer_do_not_matter(family: Family) -> None:
    for task in draw_tasks(family, 20):
        assert family.score(task, f" {family.demonstrate(task)}\n").value == 1.0


@variants
def test_work_before_the_answer_does_not_matter(family: Family) -> None:
    for task in draw_tasks(family, 20):
        assert family.score(task, f"wrong;;{family.demonstrate(task)}").value == 1.0


@variants
@settings(max_examples=60, deadline=None)
@given(completion=ANY_TEXT, seed=st.integers(0, 1000))
def test_scoring_never_raises_and_stays_in_bounds(family: Family, completion: str, seed: int) -> None:
    task = family.make_task(random.Random(seed))
    score = family.score(task, completion)
    assert 0.0 <= score.value <= 1.0
    assert score.reason.isascii() and score.reason.isprintable() and len(score.reason) <= 120
    assert score == family.score(task, completion)


@variants
def test_megabyte_completions_are_scored_at_once(family: Family) -> None:
    task = family.make_task(random.Random(0))
    for piece in ("(", "1", "1+", "9*", "(1)", ";", " ", "\0", "a", "((1+", "1/", "-"):
        for length in (MAX_COMPLETION_CHARS, 1_000_000):
            completion = (piece * length)[:length]
            start = time.process_time()
            assert family.score(task, completion).value == 0.0
            assert time.process_time() - start < 0.5


@variants
def test_an_overlong_completion_is_not_read(family: Family) -> None:
    task = family.make_task(random.Random(0))
    completion = " " * MAX_COMPLETION_CHARS + family.demonstrate(task)
    assert family.score(task, completion).reason == "too long"


GOLDEN = {
    "arithmetic": ("2086+4924=", "6+4+0=10,8+2+1=11,0+9+1=10,2+4+1=7;7010"),
    "chain": ("((3*(2+9))+2)=", "((3*1)+2);(3+2);5"),
    "countdown": ("10 from all 2 4 4=", "(4+4)+2"),
    "reverse": ("wfywtchg=", "ghctwyfw"),
    "sort": ("652551=", "125556"),
    "total": ("291332=", "0"),
}


@pytest.mark.parametrize("name", list_families())
def test_a_seed_gives_the_same_task_on_every_machine(name: str) -> None:
    family = load_family(name, {})
    task = train_task(family, seed=2026)
    assert (task.prompt, family.demonstrate(task)) == GOLDEN[name]
