"""Write a submission: what a worker computed for a lease, as one file and the entries of its manifest."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.files import write_atomic
from shoal.rollout import Group, Rollout, Score, VersionRange
from shoal.submission.bounds import REASON_BYTES
from shoal.submission.entry import make_entry
from shoal.submission.frame import Columns
from shoal.submission.layout import encode_file
from shoal.swarm.messages import RolloutEntry

Proofs = Mapping[str, Sequence[bytes]]
"""by id of the rollout"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file, and what its manifest says of it."""

    path: Path
    sha256: str
    size: int
    entries: tuple[RolloutEntry, ...]
    """in order of group, then sample"""


def write_submission(path: Path, groups: Sequence[Group], proofs: Proofs) -> Written:
    """Write the groups of a lease, in ascending order of index, atomically.

    Each rollout is of one version. Of a reason the first 256 characters are kept.
    """
    data = encode_groups(groups, proofs)
    write_atomic(path, data)
    entries = tuple(make_entry(rollout) for group in groups for rollout in group.rollouts)
    return Written(path=path, sha256=hashlib.sha256(data).hexdigest(), size=len(data), entries=entries)


def encode_groups(groups: Sequence[Group], proofs: Proofs) -> bytes:
    """The bytes of such a file."""
    indices = [group.index for group in groups]
    assert indices == sorted(set(indices)), "groups in ascending order of index"
    return encode_file(_gather_columns(list(_list_rows(groups)), proofs))


@dataclass(frozen=True, slots=True)
class _Row:
    group: Group
    sample: int
    rollout: Rollout
    score: Score


def _list_rows(groups: Sequence[Group]) -> Iterator[_Row]:
    for group in groups:
        for sample, (rollout, score) in enumerate(zip(group.rollouts, group.scores, strict=True)):
            assert rollout.id == f"g{group.index}.{sample}", "rollouts in order of sample, named by their plan"
            assert rollout.versions == (VersionRange(rollout.version, 0, rollout.num_tokens),), "written by one version"
            yield _Row(group, sample, rollout, score)


def _gather_columns(rows: Sequence[_Row], proofs: Proofs) -> Columns:
    rollouts = [row.rollout for row in rows]
    own = [list(proofs[rollout.id]) for rollout in rollouts]
    tasks = [row.group.task_id.encode("ascii") for row in rows]
    finishes = [rollout.finish.value.encode("ascii") for rollout in rollouts]
    reasons = [row.score.reason[:REASON_BYTES].encode("ascii") for row in rows]
    tokens = [rollout.token_ids for rollout in rollouts]
    prompts = [rollout.prompt_ids for rollout in rollouts]
    logprobs = [rollout.logprobs for rollout in rollouts]
    single = [proof for proofs in own for proof in proofs]
    return Columns(
        group=np.array([row.group.index for row in rows], np.int64),
        version=np.array([rollout.version for rollout in rollouts], np.int64),
        seed=np.array([rollout.seed for rollout in rollouts], np.uint64),
        temperature=np.array([rollout.temperature for rollout in rollouts], np.float64),
        reward=np.array([row.score.value for row in rows], np.float64),
        sample=np.array([row.sample for row in rows], np.int32),
        prompt_lengths=_measure_parts(prompts),
        token_lengths=_measure_parts(tokens),
        logprob_lengths=_measure_parts(logprobs),
        proof_lengths=_measure_parts(own),
        task_lengths=_measure_parts(tasks),
        finish_lengths=_measure_parts(finishes),
        reason_lengths=_measure_parts(reasons),
        prompt_ids=np.concatenate(prompts),
        token_ids=np.concatenate(tokens),
        logprobs=np.concatenate(logprobs),
        proof_sizes=_measure_parts(single),
        task_bytes=_join_bytes(tasks),
        finish_bytes=_join_bytes(finishes),
        reason_bytes=_join_bytes(reasons),
        proof_bytes=_join_bytes(single),
    )


def _measure_parts(parts: Sequence[Sized]) -> np.ndarray:
    return np.array([len(part) for part in parts], np.int32)


def _join_bytes(parts: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(parts), np.uint8)
