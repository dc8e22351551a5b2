"""Trained rollouts on disk: one Parquet file per step, one row per rollout, token ids and their text.

`prompt` and `completion` are for readers; training uses the ids.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.rollout import Finish, Group, Rollout, Score, VersionRange
from shoal.util.files import write_atomic
from shoal.util.logs import clean_text

MAX_CHARS = 400
"""most characters of a text that is shown"""
Decode = Callable[[Any], str | list[str]]
"""token ids of one sequence as text; the type is that of transformers, which can also decode several"""

_SPAN = pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
SCHEMA = pa.schema(
    [
        ("group", pa.int32()),
        ("task_id", pa.string()),
        ("rollout_id", pa.string()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
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


def write_groups(path: Path, groups: Sequence[Group], decode: Decode) -> None:
    """Write the groups of one step, atomically."""
    rows = [
        _to_row(group, rollout, score, decode)
        for group in groups
        for rollout, score in zip(group.rollouts, group.scores, strict=True)
    ]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), buffer, compression="zstd")
    write_atomic(path, buffer.getvalue())


def read_groups(path: Path) -> list[Group]:
    """The groups in a file of our own; untrusted files are read elsewhere, under limits."""
    parts: dict[int, list[dict[str, Any]]] = {}
    for row in pq.read_table(path, schema=SCHEMA).to_pylist():
        parts.setdefault(row["group"], []).append(row)
    return [_from_rows(index, rows) for index, rows in parts.items()]


def list_steps(folder: Path) -> dict[int, Path]:
    """The rollout files of a run by step."""
    return {int(path.stem.partition("-")[2]): path for path in sorted(folder.glob("step-*.parquet"))}


def show_groups(path: Path, *, groups: Sequence[int] = (), num_groups: int, num_rollouts: int) -> str:
    """Format groups of a step as text, one rollout per line; `groups` are indices, by default the first ones."""
    columns = ["group", "task_id", "prompt", "completion", "reward", "versions"]
    found: dict[int, list[dict[str, Any]]] = {}
    for row in pq.read_table(path, columns=columns).to_pylist():
        found.setdefault(row["group"], []).append(row)
    shown = [found[index] for index in groups if index in found] if groups else list(found.values())[:num_groups]
    return "\n\n".join("\n".join(_show_group(rows, num_rollouts)) for rows in shown)


def _show_group(rows: list[dict[str, Any]], num_rollouts: int) -> list[str]:
    prompt = rows[0]["prompt"]
    cut = f"... {prompt[-MAX_CHARS:]}" if len(prompt) > MAX_CHARS else prompt
    passed = sum(row["reward"] >= 1.0 for row in rows)
    first = "" if len(rows) <= num_rollouts else f", the first {num_rollouts}"
    lines = [f"group {rows[0]['group']}, task {_quote(rows[0]['task_id'])}: {passed} of {len(rows)} pass{first}"]
    lines.append(f"  prompt  {_quote(cut)}")
    for row in rows[:num_rollouts]:
        text = _quote(row["completion"][:MAX_CHARS])
        lines.append(f"  v{row['versions'][0]['version']:<4}  reward {row['reward']:.2f}  {text}")
    return lines


def _quote(text: str) -> str:
    """Quote a text on one line, whatever a model wrote."""
    return clean_text(text.replace("\\", "\\\\").replace("\n", "\\n"))


def _to_row(group: Group, rollout: Rollout, score: Score, decode: Decode) -> dict[str, Any]:
    return {
        "group": group.index,
        "task_id": group.task_id,
        "rollout_id": rollout.id,
        "prompt": decode(rollout.prompt_ids),
        "completion": decode(rollout.token_ids),
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
