"""Write a submission: the results of a worker for a lease, as one file and the entries of its manifest."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.protocol.messages import RolloutEntry
from shoal.rollout import Group, Rollout, VersionRange
from shoal.submission.columns import COLUMNS, Row, encode_file
from shoal.util.files import write_atomic

Proofs = Mapping[str, Sequence[bytes]]
"""by rollout id"""
_TAG = b"shoal-tokens-1\x00"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSubmission:
    """A file and its manifest entries."""

    path: Path
    sha256: str
    size: int
    entries: tuple[RolloutEntry, ...]
    """in order of group, then sample"""


def write_submission(path: Path, groups: Sequence[Group], proofs: Proofs) -> WrittenSubmission:
    """Write the groups of a lease, in ascending order of index, atomically.

    Each rollout has a single version. The first 256 characters of a reason are kept.
    """
    return write_file(path, encode_groups(groups, proofs), groups)


def write_file(path: Path, data: bytes, groups: Sequence[Group]) -> WrittenSubmission:
    """Write the bytes of a submission of these groups, atomically."""
    write_atomic(path, data)
    entries = tuple(make_entry(rollout) for group in groups for rollout in group.rollouts)
    return WrittenSubmission(path=path, sha256=hashlib.sha256(data).hexdigest(), size=len(data), entries=entries)


def encode_groups(groups: Sequence[Group], proofs: Proofs) -> bytes:
    """Encode the bytes of a submission."""
    indices = [group.index for group in groups]
    assert indices == sorted(set(indices)), "groups must be in ascending order of index"
    rows = list(_list_rows(groups, proofs))
    return encode_file({column.name: [column.get(row) for row in rows] for column in COLUMNS})


def _list_rows(groups: Sequence[Group], proofs: Proofs) -> Iterator[Row]:
    for group in groups:
        for sample, (rollout, score) in enumerate(zip(group.rollouts, group.scores, strict=True)):
            assert rollout.id == f"g{group.index}.{sample}", "rollouts must be in order of sample, with planned names"
            assert rollout.versions == (VersionRange(rollout.version, 0, rollout.num_tokens),), "one version only"
            yield Row(group, sample, rollout, score, proofs[rollout.id])


def hash_tokens(token_ids: np.ndarray) -> str:
    """SHA-256 over the token ids as little-endian int32, in hex: equal for equal completions, whatever the prompt.

    Changing breaks: the search for copies across submissions.
    """
    return hashlib.sha256(_TAG + np.asarray(token_ids).astype("<i4", copy=False).tobytes()).hexdigest()


def make_entry(rollout: Rollout) -> RolloutEntry:
    """Build the manifest entry of a rollout: the hash of its completion, and its length."""
    return RolloutEntry(hash=hash_tokens(rollout.token_ids), tokens=rollout.num_tokens)
