"""Tasks in chat form: what is asked, what is shown before it, and what must never be shown."""

import json
from pathlib import Path

import pytest

from shoal.config.tasks import FilterConfig
from shoal.errors import ConfigError
from shoal.tasks.base import ChatMessage
from shoal.tasks.sets.family import SetFamily, make_task
from shoal.tasks.sets.sources import open_set
from shoal.tasks.sets.taskset import SetError, TaskSet
from shoal.tasks.split import Split, split_task

SORT = "family:sort?items=numbers&min_length=3&max_length=3"


def ask(tasks: TaskSet) -> SetFamily:
    return SetFamily(tasks, FilterConfig(), {})


def test_a_prompt_becomes_the_message_of_a_user() -> None:
    plain, chat = open_set([f"{SORT}:20"]), open_set([f"chat:{SORT}:20"])
    assert [record.prompt for record in chat.records] == [(ChatMessage("user", r.text),) for r in plain.records]
    assert chat.hash != plain.hash


def test_shots_are_solved_tasks_that_score_full_marks() -> None:
    tasks = open_set([f"chat:2:{SORT}:40"])
    by_text = {record.messages[-1].content: make_task(record) for record in tasks.records}
    family = ask(tasks)
    for record in tasks.records:
        roles = [message.role for message in record.messages]
        assert roles == ["user", "assistant", "user", "assistant", "user"]
        for question, answer in (record.messages[0:2], record.messages[2:4]):
            assert family.score(by_text[question.content], answer.content).value == 1.0
        assert record.messages[-1].content not in (record.messages[0].content, record.messages[2].content)


def test_no_held_out_task_is_shown_with_its_answer() -> None:
    tasks = open_set([f"chat:2:{SORT}:200"])
    held_out = {
        record.messages[-1].content for record in tasks.records if split_task(make_task(record)) is Split.HELDOUT
    }
    shown = {message.content for record in tasks.records for message in record.messages[:-1]}
    assert len(held_out) > 10 and not held_out & shown


def test_a_problem_is_on_one_side_whatever_is_shown_before_it() -> None:
    plain = {record.id: make_task(record).kin for record in open_set([f"{SORT}:50"]).records}
    for place in (f"chat:{SORT}:50", f"chat:3:{SORT}:50"):
        assert {record.id: make_task(record).kin for record in open_set([place]).records} == plain


def test_the_side_of_a_task_without_kin_is_that_of_its_own_question(tmp_path: Path) -> None:
    rows = [
        {
            "id": f"t{n}",
            "task_type": "math",
            "prompt": f"{n}+1=",
            "info": {"answer": "1"},
            "metadata": {"solution": "x"},
        }
        for n in range(30)
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = {record.id: make_task(record).kin for record in open_set([str(path)]).records}
    assert {record.id: make_task(record).kin for record in open_set([f"chat:2:{path}"]).records} == plain


def test_equal_places_have_equal_shots_and_another_number_of_them_is_another_set() -> None:
    assert open_set([f"chat:2:{SORT}:30"]).hash == open_set([f"chat:2:{SORT}:30"]).hash
    assert open_set([f"chat:2:{SORT}:30"]).hash != open_set([f"chat:1:{SORT}:30"]).hash


def test_options_of_a_family_are_part_of_its_place() -> None:
    texts = [record.text for record in open_set(["family:sort?items=letters&min_length=2&max_length=2:20"]).records]
    assert all(len(text) == 3 and text[:2].isalpha() for text in texts)


@pytest.mark.parametrize(
    "place",
    [
        "chat:99:family:sort:10",
        "chat:2:",
        "family:sort?items:10",
        "family:sort?=3:10",
        "family:sort?min_length=[1]:10",
        "family:sort?colour=red:10",
        "family:sort?min_length=9&max_length=2:10",
    ],
)
def test_an_invalid_place_is_refused_with_one_sentence(place: str) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.") as caught:
        open_set([place])
    assert "\n" not in str(caught.value)


def test_a_source_with_too_few_solutions_cannot_show_any(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"id": "t", "task_type": "math", "prompt": "1+1=", "info": {"answer": "2"}}) + "\n")
    with pytest.raises(SetError, match="0 other solved tasks to show, 1 are needed"):
        open_set([f"chat:1:{path}"])
