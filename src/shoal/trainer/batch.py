"""From the coordinator's batch n to the groups of step n, in a fixed order.

    cut or read the batch -> check it -> fetch its files, several at a time -> read each in a sandbox -> pick -> groups

Invariants:
- the batch is signed by the coordinator: its hash is that of its entries, they are in order of their indices, and no
  version is older than allowed. Any other batch is a `TrainerError`, never trained;
- a file is identified by its hash and read in a sandbox, as a validator reads it: what `submission/read.py` checks
  (sizes, ids below the vocabulary size, finite log-probs, rewards from 0 to 1) is not checked again here;
- `pick_group` checks the rest of what could end the trainer or poison its weights if a validator were wrong or bribed;
- a group whose file is lost, unreadable, or does not match its entry, is left out alone. Which groups and why is on
  disk before the step is trained, and is binding: a repeated step leaves out the same groups.

    <run>/batches/step-000012.json        {"step", "hash", "left_out": {"<index>": reason}, "document"}
    <run>/batches/files/step-000012/      files of the current batch; removed when its version is written
"""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.errors import TrainerError, UnreachableError
from shoal.identity.documents import DocumentError, Tag, open_document
from shoal.net.retry import RefusedError
from shoal.node.client import NodeClient
from shoal.node.receipts import InvalidDocumentError
from shoal.protocol.messages import MAX_ROLLOUTS, Batch, BatchAnswer, BatchEntry
from shoal.protocol.params import RunParams, hash_batch, is_allowed
from shoal.rollout import Group, Rollout
from shoal.submission.limits import FormError, SubmissionLimits
from shoal.submission.read import ParserPool, ParserPoolError, read_submission
from shoal.tasks.length import read_target
from shoal.util.files import hash_file, write_atomic
from shoal.util.waits import RoleWaits

MAX_LOGPROB = 1e-3
"""a probability is at most 1, except for rounding"""
MAX_FILE_BYTES = 1 << 29
"""largest file of a submission; a limit of this machine, not of the run"""
BATCH_S, FETCH_S, READ_S = 600.0, 600.0, 600.0
POLL_S = 20
"""how long the coordinator may hold a request while there is no batch yet"""
NUM_FETCHES = 8
"""concurrent downloads"""
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
"""pause between two requests for a batch that does not exist yet"""
_LOST = frozenset({"not_found", "no_file"})
"""codes of refusals that mean that a file is gone"""


class UnreadableError(Exception):
    """A file or group that cannot be trained on; the reason in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Properties that every group of a run has."""

    vocab_size: int
    context: int
    """longest prompt plus completion"""
    temperature: float
    targets: frozenset[int] = frozenset()
    """target lengths; empty if tasks have no target"""


def pick_group(groups: Sequence[Group], entry: BatchEntry, expected: GroupSpec) -> Group:
    """The group that an entry of a batch names, from the groups of its file."""
    if not entry.place < len(groups):
        raise UnreadableError(f"the file has {len(groups)} groups, not the one at place {entry.place}")
    group = groups[entry.place]
    if group.index != entry.index:
        raise UnreadableError(f"the file has group {group.index} where group {entry.index} should be")
    if read_target(group.task_id) not in (expected.targets or {0}):
        raise UnreadableError("a task with an unknown target length")
    prompt = group.rollouts[0].prompt_ids
    for rollout in group.rollouts:
        if not np.array_equal(rollout.prompt_ids, prompt):
            raise UnreadableError("rollouts of different prompts")
        _check_rollout(rollout, entry, expected)
    return group


def _check_rollout(rollout: Rollout, entry: BatchEntry, expected: GroupSpec) -> None:
    if {span.version for span in rollout.versions} != {entry.version}:
        raise UnreadableError(f"a rollout of a different version than v{entry.version}")
    length = len(rollout.prompt_ids) + rollout.num_tokens
    if length > expected.context:
        raise UnreadableError(f"prompt and completion of {length} tokens (context size {expected.context})")
    if rollout.logprobs.max() > MAX_LOGPROB:
        raise UnreadableError(f"invalid log-prob {rollout.logprobs.max():.6g}")
    if rollout.temperature != expected.temperature:
        raise UnreadableError(f"sampled at temperature {rollout.temperature:g}")


async def read_sandboxed(parsers: ParserPool, limits: SubmissionLimits, path: Path) -> Sequence[Group]:
    """The groups of a file, parsed in a sandbox."""
    try:
        return (await read_submission(parsers, path, limits)).groups
    except FormError as error:
        raise UnreadableError(str(error)) from None
    except ParserPoolError as error:
        raise UnreachableError(str(error)) from None


def limit_files(params: RunParams, expected: GroupSpec) -> SubmissionLimits:
    """Limits of one file of a run, for the whole run.

    No limit depends on a parameter that the operator may change: files from before and after a change are trained on,
    and a repeated step must find the same files readable.
    """
    return SubmissionLimits(
        max_rollouts=MAX_ROLLOUTS,
        group_size=params.group_size,
        max_tokens=params.max_tokens,
        vocab_size=expected.vocab_size,
        max_prompt_tokens=expected.context,
        file_bytes=MAX_FILE_BYTES,
    )


ReadGroups = Callable[[Path], Awaitable[Sequence[Group]]]
"""Reads the groups of an untrusted file under limits: `UnreadableError` if the file is invalid, `UnreachableError` if
it could not be checked now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The groups that a step trains on."""

    step: int
    hash: str
    groups: tuple[Group, ...]
    """by index"""
    left_out: dict[int, str]
    """index and reason of groups that cannot be trained on"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTerms:
    """What a batch is compared with."""

    run: str
    coordinator: str
    async_level: int
    expected: GroupSpec


class BatchReader:
    """Reads batches in order, at most one ahead."""

    def __init__(self, client: NodeClient, read: ReadGroups, waits: RoleWaits, folder: Path, terms: RunTerms) -> None:
        self._client, self._read, self._waits, self._terms = client, read, waits, terms
        self._folder, self._files = folder, folder / "files"
        shutil.rmtree(self._files, ignore_errors=True)  # left by an earlier process
        folder.mkdir(parents=True, exist_ok=True)
        self._slots = asyncio.Semaphore(NUM_FETCHES)
        self.reason = ""
        """why there was no batch at the last request"""

    async def read_batch(self, step: int) -> TrainBatch:
        """The batch of step n, as soon as it can be cut. Its waits are not reported: the caller reports its own."""
        answer = await self._ask(step, reported=False)
        batch = check_batch(step, answer, self._terms)
        folder = self._files / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, list[BatchEntry]] = {}
        for entry in batch.groups:
            files.setdefault(entry.submission, []).append(entry)
        parts = await asyncio.gather(*(self._read_file(entries, folder) for entries in files.values()))
        found = {index: result for part in parts for index, result in part.items()}
        left_out = self._settle_left_out(answer, batch, found)
        groups = tuple(
            group for index, group in sorted(found.items()) if isinstance(group, Group) and index not in left_out
        )
        return TrainBatch(step=step, hash=batch.hash, groups=groups, left_out=left_out)

    async def find_hash(self, step: int) -> str:
        """The hash of a batch that was trained on: from its record, or from the coordinator if the record is gone."""
        try:
            return str(json.loads(self._record_path(step).read_bytes())["hash"])
        except FileNotFoundError:
            return check_batch(step, await self._ask(step, reported=True), self._terms).hash

    def drop_files(self, step: int) -> None:
        """Remove the files of step n, whose version is written."""
        shutil.rmtree(self._files / f"step-{step:06d}", ignore_errors=True)

    async def _ask(self, step: int, *, reported: bool) -> BatchAnswer:
        whom = f"the groups of step {step}"
        return await self._waits.retry_forever(
            "cut", lambda: self._poll(step), waiting_for=whom, timeout_s=BATCH_S, reported=reported, step=step
        )

    async def _poll(self, step: int) -> BatchAnswer:
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            answer = await self._client.cut_batch(step, wait_s=POLL_S)
            self.reason = answer.reason
            if answer.batch is not None:
                return answer
            # A coordinator that answers at once should be asked less often.
            lasted_s = loop.time() - started_s
            await asyncio.sleep(min(max(answer.retry_after_s - lasted_s, MIN_PAUSE_S), MAX_PAUSE_S))

    async def _read_file(self, entries: Sequence[BatchEntry], folder: Path) -> dict[int, Group | UnreadableError]:
        """The groups of a batch that are in one file, or the error of each."""
        async with self._slots:
            try:
                path = await self._fetch(entries[0], folder)
                groups = await self._waits.retry_forever(
                    "reading",
                    lambda: self._read(path),
                    waiting_for="the reader of files",
                    timeout_s=READ_S,
                    reported=False,
                )
            except UnreadableError as error:
                return {entry.index: error for entry in entries}
        return {entry.index: _try_pick(groups, entry, self._terms.expected) for entry in entries}

    async def _fetch(self, entry: BatchEntry, folder: Path) -> Path:
        path = folder / entry.blob
        if path.exists() and await asyncio.to_thread(hash_file, path) == entry.blob:
            return path
        try:
            await self._waits.retry_forever(
                "file",
                lambda: self._client.fetch_blob(entry.submission, entry.blob, MAX_FILE_BYTES, path),
                waiting_for="the coordinator",
                timeout_s=FETCH_S,
                reported=False,
            )
        except RefusedError as error:
            if error.refusal.code not in _LOST:
                raise
            raise UnreadableError(f"the coordinator lost its file: {error}") from None
        except InvalidDocumentError as error:
            raise UnreadableError(str(error)) from None
        return path

    def _settle_left_out(
        self, answer: BatchAnswer, batch: Batch, found: dict[int, Group | UnreadableError]
    ) -> dict[int, str]:
        """Record which groups are left out; for a repeated step, return what was recorded before."""
        bad = {index: str(error) for index, error in found.items() if isinstance(error, UnreadableError)}
        path = self._record_path(batch.step)
        if path.exists():
            known = json.loads(path.read_bytes())
            if known["hash"] != batch.hash:
                raise TrainerError(f"{path}: the ledger has a different batch for step {batch.step} than before")
            left_out = {int(index): str(reason) for index, reason in known["left_out"].items()}
            if gone := {index: reason for index, reason in bad.items() if index not in left_out}:
                raise TrainerError(f"{path}: groups of step {batch.step} that were readable before are not now: {gone}")
            return left_out
        record = {"step": batch.step, "hash": batch.hash, "left_out": bad, "document": answer.document}
        write_atomic(path, json.dumps(record).encode())
        return bad

    def _record_path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.json"


def check_batch(step: int, answer: BatchAnswer, terms: RunTerms) -> Batch:
    """The batch of an answer, if the coordinator signed it for this step and it is within the staleness bound."""
    batch = answer.batch
    assert batch is not None, "requested until there is one"
    try:
        body = open_document(terms.coordinator, Tag.BATCH, answer.document.encode())
    except DocumentError as error:
        raise TrainerError(f"the batch of step {step} is not signed by the coordinator: {error}") from None
    signed = {"run": terms.run, "step": step, "hash": batch.hash, "groups": len(batch.groups)}
    if (batch.run, batch.step) != (terms.run, step) or {name: body.get(name) for name in signed} != signed:
        raise TrainerError(f"the coordinator sent a different batch than that of step {step}")
    indices = [entry.index for entry in batch.groups]
    if indices != sorted(set(indices)) or hash_batch(batch.groups) != batch.hash:
        raise TrainerError(f"the batch of step {step} does not match its hash, or its groups are out of order")
    old = [entry.index for entry in batch.groups if not is_allowed(step, entry.version, terms.async_level)]
    if old:
        raise TrainerError(f"groups {old[:5]} of step {step} have versions outside the staleness bound")
    return batch


def _try_pick(groups: Sequence[Group], entry: BatchEntry, expected: GroupSpec) -> Group | UnreadableError:
    try:
        return pick_group(groups, entry, expected)
    except UnreadableError as error:
        return error
