"""Statistics of tasks survive a resumed run; a curriculum passes over what is too easy or too hard."""

from pathlib import Path

import pytest

from shoal.config.run import BatchConfig
from shoal.errors import ConfigError
from shoal.seeds import derive_seed
from shoal.tasks.registry import load_family
from shoal.tasks.split import train_task
from shoal.tasks.stats import Curriculum, TaskStats

FAMILY = load_family("sort", {"min_length": 1, "max_length": 1})
"""ten tasks"""


def draw(step: int, index: int) -> str:
    return train_task(FAMILY, derive_seed("task", step, index)).id


def test_statistics_are_of_tasks_without_their_targets_and_are_read_back(tmp_path: Path, make_group) -> None:
    stats = TaskStats(tmp_path / "tasks.jsonl", last=-1)
    stats.add(1, [make_group([1.0, 0.0], [3, 4], "a@4")], {0})
    stats.add(2, [make_group([1.0, 1.0], [3, 4], "a@8"), make_group([0.0, 0.0], [3, 4], "b")], set())
    (tmp_path / "tasks.jsonl").open("a").write('{"step": 3, "ta')  # killed in the middle of a line
    again = TaskStats(tmp_path / "tasks.jsonl", last=2)
    assert again.tasks == stats.tasks
    assert (again.tasks["a"].attempts, again.tasks["a"].solved, again.tasks["a"].last_step) == (4, 3, 2)
    assert again.tasks["b"].rate == 0.0


def test_what_a_resumed_run_repeats_is_forgotten(tmp_path: Path, make_group) -> None:
    stats = TaskStats(tmp_path / "tasks.jsonl", last=-1)
    for step in (1, 2, 3):
        stats.add(step, [make_group([1.0, 0.0], [3, 4], f"t{step}")], {0})
    assert set(TaskStats(tmp_path / "tasks.jsonl", last=2).tasks) == {"t1", "t2"}
    assert set(TaskStats(tmp_path / "tasks.jsonl", last=3).tasks) == {"t1", "t2"}
    assert not TaskStats(tmp_path / "tasks.jsonl", last=-1).tasks


def test_an_invalid_statistics_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("[]\n")
    with pytest.raises(ConfigError, match=r"tasks\.jsonl: line 1"):
        TaskStats(tmp_path / "tasks.jsonl", last=1)


def test_a_curriculum_draws_the_seeds_own_task_unless_it_is_too_easy_or_too_hard(tmp_path: Path, make_group) -> None:
    stats = TaskStats(tmp_path / "tasks.jsonl", last=-1)
    chosen = Curriculum(stats, BatchConfig(curriculum=True))
    assert [chosen.choose(FAMILY, 1, index).id for index in range(20)] == [draw(1, index) for index in range(20)]
    easy, fair = draw(1, 0), next(draw(1, index) for index in range(20) if draw(1, index) != draw(1, 0))
    stats.add(1, [make_group([1.0, 1.0], [3, 4], easy), make_group([1.0, 0.0], [3, 4], fair)], {1})
    assert chosen.num_passed == 0
    drawn = [chosen.choose(FAMILY, 1, index).id for index in range(20)]
    assert easy not in drawn and fair in drawn and chosen.num_passed > 0
    stats.add(2, [make_group([0.0], [3], train_task(FAMILY, seed).id) for seed in range(200)], set())
    for stat in stats.tasks.values():
        stat.solved = 0
    assert chosen.choose(FAMILY, 1, 0).id == easy, "if nothing is allowed, the first is drawn"
