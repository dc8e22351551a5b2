"""Groups as bytes, from rank 0 to the others: a line of JSON, then the arrays of all rollouts. Nothing is pickled.

Rank 0 has read and checked the groups; the ranks trust each other, so nothing is checked again here.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.rollout import Finish, Group, Rollout, Score, VersionRange


def encode_groups(groups: Sequence[Group]) -> bytes:
    """All fields of the groups; floats keep their bits."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    head = [
        {
            "index": group.index,
            "task_id": group.task_id,
            "scores": [[score.value, score.reason] for score in group.scores],
            "rollouts": [_describe_rollout(rollout) for rollout in group.rollouts],
        }
        for group in groups
    ]
    ids = [array.astype("<i4").tobytes() for r in rollouts for array in (r.prompt_ids, r.token_ids)]
    logprobs = [r.logprobs.astype("<f4").tobytes() for r in rollouts]
    return json.dumps(head).encode() + b"\n" + b"".join(ids) + b"".join(logprobs)


def _describe_rollout(rollout: Rollout) -> dict[str, Any]:
    return {
        "id": rollout.id,
        "sizes": [len(rollout.prompt_ids), rollout.num_tokens],
        "finish": str(rollout.finish),
        "versions": [[span.version, span.start, span.end] for span in rollout.versions],
        "temperature": rollout.temperature,
        "seed": rollout.seed,
    }


def decode_groups(data: bytes) -> list[Group]:
    """What `encode_groups` encoded."""
    line, _, arrays = data.partition(b"\n")
    head = json.loads(line)
    if not head:
        return []
    sizes = [size for group in head for rollout in group["rollouts"] for size in rollout["sizes"]]
    num_ids = sum(sizes)
    ids = iter(np.split(np.frombuffer(arrays, "<i4", num_ids).astype(np.int32), np.cumsum(sizes)[:-1]))
    logprobs = np.frombuffer(arrays, "<f4", offset=4 * num_ids).astype(np.float32)
    parts = iter(np.split(logprobs, np.cumsum(sizes[1::2])[:-1]))
    return [
        Group(
            index=group["index"],
            task_id=group["task_id"],
            rollouts=tuple(_build_rollout(rollout, next(ids), next(ids), next(parts)) for rollout in group["rollouts"]),
            scores=tuple(Score(value, reason) for value, reason in group["scores"]),
        )
        for group in head
    ]


def _build_rollout(
    fields: dict[str, Any], prompt_ids: np.ndarray, token_ids: np.ndarray, logprobs: np.ndarray
) -> Rollout:
    return Rollout(
        id=fields["id"],
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        finish=Finish(fields["finish"]),
        versions=tuple(VersionRange(*span) for span in fields["versions"]),
        temperature=fields["temperature"],
        seed=fields["seed"],
    )
