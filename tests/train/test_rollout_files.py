"""Trained rollouts on disk."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from shoal.rollout import Finish, Group, Rollout, Score, VersionRange
from shoal.train.rollout_files import SCHEMA, read_groups, write_groups


def make_group(index: int, lengths: list[int]) -> Group:
    rng = np.random.default_rng(index)
    rollouts = tuple(
        Rollout(
            id=f"g{index}.{sample}",
            prompt_ids=np.array([1, 5, index], dtype=np.int32),
            token_ids=rng.integers(0, 50, length, dtype=np.int32),
            logprobs=-rng.random(length, dtype=np.float32),
            finish=Finish.LENGTH if sample % 2 else Finish.STOP,
            versions=(VersionRange(3, 0, 1), VersionRange(4, 1, length)) if length > 1 else (VersionRange(4, 0, 1),),
            temperature=0.7,
            seed=2**64 - 1 - sample,
        )
        for sample, length in enumerate(lengths)
    )
    scores = tuple(Score(sample / 3, f"reason {sample}") for sample in range(len(lengths)))
    return Group(index=index, task_id=f"reverse-{index}", rollouts=rollouts, scores=scores)


def spell(ids: np.ndarray) -> str:
    return " ".join(map(str, ids))


def assert_same_rollout(one: Rollout, other: Rollout) -> None:
    for name in ("prompt_ids", "token_ids", "logprobs"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.dtype == theirs.dtype
        assert mine.tobytes() == theirs.tobytes()
    for name in ("id", "finish", "versions", "temperature", "seed"):
        assert getattr(one, name) == getattr(other, name)


def test_groups_come_back_as_they_were(tmp_path: Path) -> None:
    groups = [make_group(2, [3, 1, 8]), make_group(7, [1, 1]), make_group(0, [40, 2])]
    write_groups(tmp_path / "a.parquet", groups, spell)
    read = read_groups(tmp_path / "a.parquet")
    assert [(group.index, group.task_id, group.scores) for group in read] == [
        (group.index, group.task_id, group.scores) for group in groups
    ]
    for one, other in zip(groups, read, strict=True):
        for mine, theirs in zip(one.rollouts, other.rollouts, strict=True):
            assert_same_rollout(mine, theirs)


def test_a_step_without_groups_has_a_file_without_rows(tmp_path: Path) -> None:
    write_groups(tmp_path / "a.parquet", [], spell)
    assert read_groups(tmp_path / "a.parquet") == []
    assert pq.read_schema(tmp_path / "a.parquet").equals(SCHEMA)


def test_others_read_one_row_per_rollout(tmp_path: Path) -> None:
    write_groups(tmp_path / "a.parquet", [make_group(2, [3, 1])], spell)
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [(row["group"], row["rollout_id"], row["reward"]) for row in rows] == [
        (2, "g2.0", 0.0),
        (2, "g2.1", pytest.approx(1 / 3)),
    ]
    assert rows[0]["prompt"] == "1 5 2" and rows[1]["completion"] == spell(make_group(2, [3, 1]).rollouts[1].token_ids)
    assert rows[0]["versions"] == [{"version": 3, "start": 0, "end": 1}, {"version": 4, "start": 1, "end": 3}]
