"""Sort, reverse, chain and total on examples worked by hand."""

import random

from shoal.config.run import LengthConfig
from shoal.tasks.base import build_task
from shoal.tasks.families.digit_sum import write_totals
from shoal.tasks.families.expression import parse_expression
from shoal.tasks.families.expression_chain import reduce_expression
from shoal.tasks.length import aim_family
from shoal.tasks.registry import load_family


def test_sorting_keeps_repeats_and_orders_numbers_by_value() -> None:
    family = load_family("sort", {"items": "numbers"})
    for seed in range(100):
        task = family.make_task(random.Random(seed))
        numbers = [int(item) for item in task.prompt.removesuffix("=").split(" ")]
        assert task.info["answer"] == " ".join(map(str, sorted(numbers)))


def test_a_sorted_answer_is_compared_character_by_character() -> None:
    family = load_family("sort", {})
    task = build_task("sort", "5391=", {"answer": "1359"})
    assert family.score(task, "1359").value == 1.0
    for wrong in ("1395", "1 3 5 9", "135", "13599", "9531", "1,3,5,9"):
        assert family.score(task, wrong).value == 0.0


def test_a_reversed_word_is_compared_character_by_character() -> None:
    family = load_family("reverse", {})
    task = build_task("reverse", "shoal=", {"answer": "laohs"})
    assert family.score(task, "laohs").value == 1.0
    for wrong in ("shoal", "LAOHS", "laoh", "l a o h s", "laohs laohs"):
        assert family.score(task, wrong).value == 0.0


def test_a_chain_reduces_the_leftmost_pair_first() -> None:
    assert reduce_expression("((3+4)*(2-9))") == ["(7*(2-9))", "(7*3)", "1"]
    assert reduce_expression("(9+9)") == ["8"]


def test_a_chain_has_one_step_per_operation_and_ends_in_one_digit() -> None:
    family = load_family("chain", {"min_ops": 1, "max_ops": 16})
    for seed in range(100):
        task = family.make_task(random.Random(seed))
        steps = family.demonstrate(task).split(";")
        assert len(steps) == sum(task.prompt.count(operator) for operator in "+-*")
        assert steps[-1] == task.info["answer"] == str(parse_expression(task.prompt.removesuffix("=")).value % 10)


def test_totals_are_written_digit_by_digit_and_begin_again_after_the_last() -> None:
    assert write_totals("3825", 0) == ""
    assert write_totals("3825", 4) == "33812358"
    assert write_totals("3825", 6) == "338123583381"


def test_how_many_totals_are_written_differs_from_problem_to_problem_and_never_for_one() -> None:
    family = load_family("total", {"min_length": 5, "max_length": 5, "passes": 2})
    tasks = [family.make_task(random.Random(seed)) for seed in range(300)]
    lengths = [
        len(family.demonstrate(task).partition(";")[0]) // 2 for task in tasks if ";" in family.demonstrate(task)
    ]
    assert set(lengths) == set(range(1, 11)), "from one step to two passes"
    assert [family.demonstrate(task) for task in tasks] == [family.demonstrate(task) for task in tasks]
    assert all(family.score(task, task.info["answer"]).value == 1.0 for task in tasks), "without any step as well"


def test_as_many_demonstrations_keep_to_their_target_as_the_option_says() -> None:
    config = LengthConfig(mode="exact", targets=[11], template="{target}:{prompt}")
    options = {"min_length": 4, "max_length": 4, "passes": 8}
    for heed, low, high in ((100, 1.0, 1.0), (30, 0.27, 0.37), (0, 0.0, 0.1)):
        family = aim_family(load_family("total", {**options, "heed": heed}), config)
        tasks = [family.make_task(random.Random(seed)) for seed in range(2000)]
        texts = [family.demonstrate(task) for task in tasks]
        kept = sum(len(text) + 1 == 11 for text in texts) / len(texts)
        assert low <= kept <= high
        assert all(family.score(task, text).value == 1.0 for task, text in zip(tasks, texts, strict=True))
