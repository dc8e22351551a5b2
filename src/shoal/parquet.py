"""Trained rollouts on disk: one Parquet file per step, one row per rollout."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.files import write_atomic
from shoal.rollout import Finish, Group, Rollout, Score, VersionRange

_SPAN = pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
SCHEMA = pa.schema(
    [
        ("group", pa.int32()),
        ("task_id", pa.string()),
        ("rollout_id", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("finish", pa.string()),
        ("versions", pa.list_(_SPAN)),
        ("temperature", pa.float64()),
        ("seed", pa.uint64()),
        ("reward", pa.float64()),
        ("reason", pa.string()),
    ]
)


def write_groups(path: Path, groups: Sequence[Group]) -> None:
    """Write the groups of one step, atomically."""
    rows = [
        _to_row(group, rollout, score)
        for group in groups
        for rollout, score in zip(group.rollouts, group.scores, strict=True)
    ]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), buffer, compression="zstd")
    write_atomic(path, buffer.getvalue())


def read_groups(path: Path) -> list[Group]:
    """The groups of a file of our own; what strangers send is read elsewhere, under limits."""
    parts: dict[int, list[dict[str, Any]]] = {}
    for row in pq.read_table(path, schema=SCHEMA).to_pylist():
        parts.setdefault(row["group"], []).append(row)
    return [_from_rows(index, rows) for index, rows in parts.items()]


def _to_row(group: Group, rollout: Rollout, score: Score) -> dict[str, Any]:
    return {
        "group": group.index,
        "task_id": group.task_id,
        "rollout_id": rollout.id,
        "prompt_ids": rollout.prompt_ids,
        "token_ids": rollout.token_ids,
        "logprobs": rollout.logprobs,
        "finish": rollout.finish.value,
        "versions": [{"version": s.version, "start": s.start, "end": s.end} for s in rollout.versions],
        "temperature": rollout.temperature,
        "seed": rollout.seed,
        "reward": score.value,
        "reason": score.reason,
    }


def _from_rows(index: int, rows: list[dict[str, Any]]) -> Group:
    rollouts = [
        Rollout(
            id=row["rollout_id"],
            prompt_ids=np.array(row["prompt_ids"], dtype=np.int32),
            token_ids=np.array(row["token_ids"], dtype=np.int32),
            logprobs=np.array(row["logprobs"], dtype=np.float32),
            finish=Finish(row["finish"]),
            versions=tuple(VersionRange(**span) for span in row["versions"]),
            temperature=row["temperature"],
            seed=row["seed"],
        )
        for row in rows
    ]
    scores = tuple(Score(row["reward"], row["reason"]) for row in rows)
    return Group(index=index, task_id=rows[0]["task_id"], rollouts=tuple(rollouts), scores=scores)
