"""What a file claims, as records: every length and every value is checked here, in the parent, before it is used.

A claim is well-formed and bounded, and otherwise unproven: whether prompts, seeds, versions, rewards and proofs are
right is for the stages that follow.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

import numpy as np

from shoal.rollout import Finish, Group, Rollout, Score, VersionRange
from shoal.submission.bounds import FINISH_BYTES, MAX_NUMBER, PROOF_BYTES, REASON_BYTES, TASK_BYTES, Bounds, FormError
from shoal.submission.entry import make_entry
from shoal.submission.frame import Columns
from shoal.swarm.messages import RolloutEntry

_FINISHES = {finish.value: finish for finish in Finish}
_PRINTABLE = (0x20, 0x7E)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """What a submission claims."""

    groups: tuple[Group, ...]
    """in ascending order of index; rollouts are named as `plan_group` does"""
    proofs: dict[str, tuple[bytes, ...]]
    """by id of the rollout"""

    @property
    def rollouts(self) -> list[Rollout]:
        """In order of group, then sample, as in the manifest."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def entries(self) -> tuple[RolloutEntry, ...]:
        """What its manifest must say of the rollouts."""
        return tuple(make_entry(rollout) for rollout in self.rollouts)


def read_claims(columns: Columns, bounds: Bounds) -> Contents:
    """The records of a file; FormError if they are none."""
    _check_order(columns, bounds)
    _check_scalars(columns)
    _check_lists(columns, bounds)
    _check_values(columns, bounds)
    size = bounds.group_size
    texts = _Texts.cut(columns)
    rollouts = list(_build_rollouts(columns, texts))
    scores = [Score(*row) for row in zip(columns.reward.tolist(), texts.reasons, strict=True)]
    groups = []
    for start in range(0, columns.num_rows, size):
        rows = slice(start, start + size)
        if len(set(texts.tasks[rows])) > 1:
            _refuse_row(start, "a group of several tasks")
        groups.append(
            Group(
                index=int(columns.group[start]),
                task_id=texts.tasks[start],
                rollouts=tuple(rollouts[rows]),
                scores=tuple(scores[rows]),
            )
        )
    proofs = {rollout.id: own for rollout, own in zip(rollouts, _cut_proofs(columns), strict=True)}
    return Contents(groups=tuple(groups), proofs=proofs)


@dataclass(frozen=True, slots=True)
class _Texts:
    """The texts of each row."""

    tasks: list[str]
    finishes: list[str]
    reasons: list[str]

    @classmethod
    def cut(cls, columns: Columns) -> "_Texts":
        texts = cls(
            _cut_texts("task_id", columns.task_lengths, columns.task_bytes),
            _cut_texts("finish", columns.finish_lengths, columns.finish_bytes),
            _cut_texts("reason", columns.reason_lengths, columns.reason_bytes),
        )
        for row, finish in enumerate(texts.finishes):
            if finish not in _FINISHES:
                _refuse_row(row, f"finish is {finish}, allowed are {' and '.join(sorted(_FINISHES))}")
        return texts


def _check_order(columns: Columns, bounds: Bounds) -> None:
    """Whole groups in ascending order, and in each its samples from 0 on."""
    size = bounds.group_size
    if columns.num_rows % size:
        raise FormError(f"{columns.num_rows} rollouts, which are no whole groups of {size}")
    samples = np.tile(np.arange(size), columns.num_rows // size)
    _require_rows(columns.sample == samples, "sample out of order")
    _require_rows(columns.group == np.repeat(columns.group[::size], size), "group out of order")
    _require_rows((columns.group >= 0) & (columns.group <= MAX_NUMBER), "group out of range")
    firsts = columns.group[::size]
    if not (firsts[:-1] < firsts[1:]).all():
        raise FormError("groups out of order")


def _check_scalars(columns: Columns) -> None:
    _require_rows((columns.version >= 0) & (columns.version <= MAX_NUMBER), "version out of range")
    _require_rows(np.isfinite(columns.temperature) & (columns.temperature >= 0), "temperature is no temperature")
    _require_rows((columns.reward >= 0) & (columns.reward <= 1), "reward outside of 0 to 1")


def _check_lists(columns: Columns, bounds: Bounds) -> None:
    """Lengths first: everything after relies on them."""
    _check_lengths("prompt_ids", columns.prompt_lengths, len(columns.prompt_ids), 1, bounds.max_prompt_tokens)
    _check_lengths("token_ids", columns.token_lengths, len(columns.token_ids), 1, bounds.max_tokens)
    _check_lengths("logprobs", columns.logprob_lengths, len(columns.logprobs), 1, bounds.max_tokens)
    _require_rows(columns.logprob_lengths == columns.token_lengths, "logprobs are not one per token")
    _check_lengths("proofs", columns.proof_lengths, len(columns.proof_sizes), 0, bounds.max_proofs)
    _check_lengths("task_id", columns.task_lengths, len(columns.task_bytes), 1, TASK_BYTES)
    _check_lengths("finish", columns.finish_lengths, len(columns.finish_bytes), 1, FINISH_BYTES)
    _check_lengths("reason", columns.reason_lengths, len(columns.reason_bytes), 0, REASON_BYTES)
    _check_lengths("proofs", columns.proof_sizes, len(columns.proof_bytes), 0, PROOF_BYTES, what="proof")


def _check_values(columns: Columns, bounds: Bounds) -> None:
    for name, lengths, ids in (
        ("prompt_ids", columns.prompt_lengths, columns.prompt_ids),
        ("token_ids", columns.token_lengths, columns.token_ids),
    ):
        good = (ids >= 0) & (ids < bounds.vocab_size)
        if not good.all():
            _refuse_row(_find_row(lengths, good), f"{name} outside of the vocabulary of {bounds.vocab_size}")
    good = np.isfinite(columns.logprobs)
    if not good.all():
        _refuse_row(_find_row(columns.logprob_lengths, good), "logprobs that are not finite")


def _check_lengths(name: str, lengths: np.ndarray, total: int, least: int, most: int, what: str = "rollout") -> None:
    good = (lengths >= least) & (lengths <= most)
    if not good.all():
        place = int(good.argmin())
        raise FormError(f"{what} {place}: {name} of length {lengths[place]}, allowed are {least} to {most}")
    if int(lengths.sum(dtype=np.int64)) != total:
        raise FormError(f"{name}: lengths that do not add up")


def _build_rollouts(columns: Columns, texts: _Texts) -> Iterator[Rollout]:
    prompts = _cut_array(columns.prompt_ids.astype(np.int32, copy=False), columns.prompt_lengths)
    tokens = _cut_array(columns.token_ids.astype(np.int32, copy=False), columns.token_lengths)
    logprobs = _cut_array(columns.logprobs.astype(np.float32, copy=False), columns.logprob_lengths)
    groups, samples, versions = columns.group.tolist(), columns.sample.tolist(), columns.version.tolist()
    temperatures, seeds = columns.temperature.tolist(), columns.seed.tolist()
    for row in range(columns.num_rows):
        yield Rollout(
            id=f"g{groups[row]}.{samples[row]}",
            prompt_ids=prompts[row],
            token_ids=tokens[row],
            logprobs=logprobs[row],
            finish=_FINISHES[texts.finishes[row]],
            versions=(VersionRange(versions[row], 0, len(tokens[row])),),
            temperature=temperatures[row],
            seed=seeds[row],
        )


def _cut_proofs(columns: Columns) -> list[tuple[bytes, ...]]:
    data, ends = columns.proof_bytes.tobytes(), np.cumsum(columns.proof_sizes, dtype=np.int64).tolist()
    single = [data[start:end] for start, end in pairwise([0, *ends])]
    ends = np.cumsum(columns.proof_lengths, dtype=np.int64).tolist()
    return [tuple(single[start:end]) for start, end in pairwise([0, *ends])]


def _cut_texts(name: str, lengths: np.ndarray, data: np.ndarray) -> list[str]:
    good = (data >= _PRINTABLE[0]) & (data <= _PRINTABLE[1])
    if not good.all():
        _refuse_row(_find_row(lengths, good), f"{name} with other than printable ASCII characters")
    text, ends = data.tobytes().decode("ascii"), np.cumsum(lengths, dtype=np.int64).tolist()
    return [text[start:end] for start, end in pairwise([0, *ends])]


def _cut_array(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [values[start:end] for start, end in pairwise([0, *ends])]


def _find_row(lengths: np.ndarray, good: np.ndarray) -> int:
    """The row of the first value that is not good."""
    return int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), int(good.argmin()), side="right"))


def _require_rows(good: np.ndarray, text: str) -> None:
    if not good.all():
        _refuse_row(int(good.argmin()), text)


def _refuse_row(row: int, text: str) -> NoReturn:
    raise FormError(f"rollout {row}: {text}")
