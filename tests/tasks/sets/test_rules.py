"""Sentences under rules: every task can be solved, every rule can be broken, and held-out topics are never trained."""

from collections import Counter

import pytest

from shoal.config.tasks import FilterConfig
from shoal.tasks.sets.family import SetFamily, make_task
from shoal.tasks.sets.sources import open_set
from shoal.tasks.sets.taskset import SetError
from shoal.tasks.split import Split, split_task

BREAKS = {
    "change_case:english_lowercase": "Rain falls.",
    "keywords:existence": "Nothing of it.",
    "punctuation:no_comma": "rain, snow",
    "length_constraints:number_words": "one two three four five six seven eight nine ten",
    "keywords:letter_frequency": "aaaa eeee iiii oooo ssss tttt",
}
TASKS = open_set(["rules:2300"])


def test_every_task_has_a_solution_and_can_be_failed() -> None:
    family = SetFamily(TASKS, FilterConfig(), {})
    family.check_tasks()
    for record in TASKS.records:
        task, rule = make_task(record), record.info["instruction_id_list"][0]
        assert family.score(task, str(record.metadata["solution"])).value == 1.0, record
        assert family.score(task, BREAKS[rule]).value == 0.0, record
        assert family.score(task, "").value == 0.0
        # A word or two would satisfy nearly every rule, and a model rewarded for that learns it.
        assert family.score(task, "rum").value == family.score(task, "a sentence").value == 0.0


def test_all_rules_are_as_frequent_and_the_prompt_says_what_is_checked() -> None:
    counts = Counter(record.info["instruction_id_list"][0] for record in TASKS.records)
    assert set(counts) == set(BREAKS) and len(set(counts.values())) == 1
    for record in TASKS.records:
        for settings in record.info["kwargs"]:
            limits = [*settings.get("keywords", []), settings.get("num_words"), settings.get("let_frequency")]
            assert all(str(value) in record.text for value in limits if value is not None), record


def test_a_topic_is_on_one_side_of_the_split_under_all_rules() -> None:
    sides: dict[Split, set[object]] = {side: set() for side in Split}
    for record in TASKS.records:
        sides[split_task(make_task(record))].add(record.metadata["kin"])
    assert len(sides[Split.HELDOUT]) >= 8 and not sides[Split.HELDOUT] & sides[Split.TRAIN]


def test_a_longer_set_holds_the_shorter_one() -> None:
    short, long = ({record.id for record in open_set([f"rules:{count}"]).records} for count in (50, 200))
    assert len(short) == 50 and short < long


def test_requesting_more_tasks_than_exist_is_an_error() -> None:
    with pytest.raises(SetError, match="has only 2300"):
        open_set(["rules:2301"])
    with pytest.raises(SetError, match="number of tasks"):
        open_set(["rules:many"])
