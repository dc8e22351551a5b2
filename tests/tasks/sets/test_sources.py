"""Where tasks come from: every format gives records, and every fault names its file and line."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.config.tasks import FilterConfig
from shoal.tasks.sets.family import SetFamily
from shoal.tasks.sets.sources import open_set, read_place
from shoal.tasks.sets.taskset import SetError, TaskSet

OWN = [
    {"id": f"own-{number}", "task_type": "math", "prompt": f"{number}+1=", "info": {"answer": str(number + 1)}}
    for number in range(3)
]
GSM8K = {"question": "Two and two?", "answer": "2+2 = <<2+2=4>>4\n#### 4"}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def add(a, b):\n    """Sum."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}
INTELLECT2 = {
    "problem_id": "vfm_1",
    "task_type": "verifiable_math",
    "prompt": "What is 1+1?",
    "verification_info": '{"ground_truth": "2"}',
    "solve_rate_qwen_r1_distill_7b": 0.25,
}


def write_lines(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_files_that_say_the_same_have_the_same_hash(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", *OWN)
    turned = write_lines(tmp_path / "b.jsonl", *(dict(reversed(row.items())) for row in reversed(OWN)), "")
    table = pa.Table.from_pylist([row | {"info": json.dumps(row["info"])} for row in OWN])
    pq.write_table(table, tmp_path / "c.parquet")
    (tmp_path / "many").mkdir()
    for row in OWN:
        write_lines(tmp_path / "many" / f"{row['id']}.jsonl", row)
    sets = [open_set([place]) for place in (lines, turned, str(tmp_path / "c.parquet"), str(tmp_path / "many"))]
    assert len({tasks.hash for tasks in sets}) == 1
    assert sets[0].hash != open_set([write_lines(tmp_path / "d.jsonl", *OWN[:2])]).hash


def test_the_canonical_form_is_a_file_of_the_same_set(tmp_path: Path) -> None:
    tasks = open_set([write_lines(tmp_path / "a.jsonl", *OWN)])
    tasks.save(tmp_path / "saved.jsonl")
    assert open_set([str(tmp_path / "saved.jsonl")]).data == (tmp_path / "saved.jsonl").read_bytes() == tasks.data
    assert TaskSet.from_bytes(tasks.data, tasks.hash).records == tasks.records


def test_known_datasets_are_known_by_their_columns(tmp_path: Path) -> None:
    rows = enumerate((GSM8K, HUMANEVAL, INTELLECT2))
    places = [write_lines(tmp_path / f"{number}.jsonl", row) for number, row in rows]
    by_source = {record.source: record for record in open_set(places).records}
    assert by_source["gsm8k"].info == {"answer": "4"} and by_source["gsm8k"].task_type == "math"
    assert by_source["gsm8k"].metadata["solution"] == GSM8K["answer"]
    assert by_source["humaneval"].id == "HumanEval/0" and by_source["humaneval"].info["entry_point"] == "add"
    theirs = by_source["verifiable_math"]
    assert theirs.info == {"answer": "2"} and theirs.difficulty == {"qwen_r1_distill_7b": 0.25}
    assert theirs.messages[0].content == "What is 1+1?"


def test_known_datasets_are_scored_by_our_verifiers(tmp_path: Path) -> None:
    from shoal.config.tasks import FilterConfig
    from shoal.tasks.sets.family import SetFamily

    tasks = open_set([write_lines(tmp_path / "a.jsonl", GSM8K), write_lines(tmp_path / "b.jsonl", INTELLECT2)])
    family = SetFamily(tasks, FilterConfig(), {})
    family.check_tasks()
    scores = {task.id: family.score(task, "so\n#### 4").value for task in family.list_tasks()}
    assert scores["vfm_1"] == 0.0 and sum(scores.values()) == 1.0
    assert all(family.score(task, "\\boxed{2}").value == (task.id == "vfm_1") for task in family.list_tasks())


def test_a_code_task_of_intellect2_has_its_tests_inside_its_truth(tmp_path: Path) -> None:
    truth = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
    row = INTELLECT2 | {"task_type": "prime_rl_code", "verification_info": json.dumps({"ground_truth": truth})}
    (record,) = open_set([write_lines(tmp_path / "a.jsonl", row)]).records
    assert record.task_type == "code" and record.info == {"inputs": ["1\n"], "outputs": ["2\n"]}


def test_generated_tasks_are_the_same_each_time_and_a_longer_set_holds_the_shorter() -> None:
    short, long = list(read_place("family:sort:5")), list(read_place("family:sort:9"))
    assert long[:5] == short and len({record.id for record in long}) == 9
    assert all(record.info["family"] == "sort" for record in long)


def test_a_dataset_folder_is_read_with_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_lines(tmp_path / "train.jsonl", GSM8K)
    (record,) = open_set([f"hf:{tmp_path}"]).records
    assert record.source == "gsm8k"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([OWN[0], "{"], r"a.jsonl, line 2: not JSON .*; a task set has one JSON object per line, or is Parquet"),
        (["prompt,answer", "1+1=,2"], r"a.jsonl, line 1: not JSON .*\(a script for CSV is in docs/tutorial.md\)"),
        ([OWN[0], "", OWN[1] | {"answer": 1}], r"a.jsonl, line 3: answer: is both a column and a key of info"),
        ([{"text": "1+1=", "answer": 2}], r"a.jsonl, line 1: missing columns: prompt"),
        ([OWN[0], OWN[0]], r"a.jsonl: two tasks have the id own-0"),
        ([], r"a.jsonl: has no tasks"),
        ([GSM8K | {"answer": "4 ####"}], r"a.jsonl, line 1: answer: has no result after ####"),
        ([HUMANEVAL | {"test": None}], r"a.jsonl, line 1: column test is missing"),
        ([INTELLECT2 | {"verification_info": "[]"}], r"a.jsonl, line 1: not a JSON object"),
    ],
)
def test_a_fault_names_file_and_line(tmp_path: Path, lines: list[Any], reason: str) -> None:
    with pytest.raises(SetError, match=reason):
        open_set([write_lines(tmp_path / "a.jsonl", *lines)])


def test_other_columns_are_kept_for_verifiers_and_reward_functions(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2", "level": 3, "note": None}, {"question": "2+2=", "gold": "4"}]
    first, second = sorted(open_set([write_lines(tmp_path / "a.jsonl", *rows)]).records, key=lambda one: one.text)
    assert (first.text, first.info, first.metadata) == ("1+1=", {"answer": "2"}, {"level": 3, "note": None})
    assert (second.text, second.info, second.metadata) == ("2+2=", {}, {"gold": "4"})


def test_a_task_without_an_id_is_named_by_its_contents(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", "answer": "two"}]
    there, back = (open_set([write_lines(tmp_path / "a.jsonl", *own)]) for own in (rows, rows[::-1]))
    assert there.hash == back.hash and len({record.id for record in there.records}) == 2
    with pytest.raises(SetError, match="equal rows without ids have equal ids"):
        open_set([write_lines(tmp_path / "a.jsonl", rows[0], rows[0])])


def test_a_task_without_a_type_needs_a_reward_function(tmp_path: Path) -> None:
    tasks = open_set([write_lines(tmp_path / "a.jsonl", {"prompt": "1+1=", "answer": "2"})])
    with pytest.raises(SetError, match=r"column task_type is missing.*math, text_exact.*set tasks\.reward"):
        SetFamily(tasks, FilterConfig(), {}).check_tasks()


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("no/such.jsonl", "cannot be read"),
        ("gsm8k:no/such.jsonl", "cannot be read"),
        ("zip:file", "is not a known format"),
        ("family:swim", "no such family"),
        ("family:sort:0", "number of tasks"),
        ("family:sort:x", "number of tasks"),
        ("gym:rubiks_cube:2", "no such family of reasoning-gym"),
    ],
)
def test_an_unknown_place_is_refused_with_one_sentence(place: str, reason: str) -> None:
    if place.startswith("gym"):
        pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=reason):
        open_set([place])


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(SetError, match=r"a\.parquet: not a readable Parquet file"):
        open_set([str(tmp_path / "a.parquet")])


def test_bytes_with_another_hash_are_not_the_set(tmp_path: Path) -> None:
    tasks = open_set([write_lines(tmp_path / "a.jsonl", *OWN)])
    with pytest.raises(SetError, match="has the hash"):
        TaskSet.from_bytes(tasks.data + b"\n", tasks.hash)


def test_families_of_reasoning_gym_are_deterministic_and_score_their_own_answers() -> None:
    pytest.importorskip("reasoning_gym")
    from shoal.tasks.registry import load_family
    from shoal.tasks.split import train_task

    family = load_family("gym_leg_counting", {"max_animals": 4})
    tasks = [train_task(family, seed) for seed in range(5)]
    assert tasks == [train_task(load_family("gym_leg_counting", {"max_animals": 4}), seed) for seed in range(5)]
    for task in tasks:
        answer = family.demonstrate(task)
        assert family.score(task, answer).value == 1.0
        assert family.score(task, f"<think>7</think> <answer>{answer}</answer> done").value == 1.0
        assert family.score(task, f"{answer}1").value < 1.0
        assert family.score(task, "").value == family.score(task, "x" * 70_000).value == 0.0
    with pytest.raises(ValueError, match="cannot make tasks"):
        load_family("gym_leg_counting", {"no_such_option": 4})
    with pytest.raises(ValueError, match="allowed are numbers"):
        load_family("gym_leg_counting", {"max_animals": 10**9})


def test_untrusted_options_that_are_too_expensive_are_refused_with_one_sentence(monkeypatch) -> None:
    pytest.importorskip("reasoning_gym")
    from shoal.tasks.families import reasoning_gym
    from shoal.tasks.registry import load_family

    with pytest.raises(ValueError, match="tasks of more than 65536 characters"):
        load_family("gym_rotate_matrix", {"min_n": 200, "max_n": 200})
    monkeypatch.setattr(reasoning_gym, "WALL_S", 0.01)
    with pytest.raises(ValueError, match="took more than 10 s of CPU time or 2 GiB"):
        load_family("gym_maze", {"max_grid_size": 9})
    assert load_family("gym_maze", {}), "defaults need no trial"
