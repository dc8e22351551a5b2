"""From the coordinator's batch n to the groups of step n, in their one order.

    cut or read the batch -> check it -> fetch its files, several at a time -> read each in the jail -> pick -> groups

Invariants:
- the batch is the coordinator's signed word: the hash is that of its entries, their order is that of their indices, and
  no version is older than the bound. A batch that is not so is a `TrainerError`, never trained;
- a file is known by its hash and read under limits in another process; what it says is checked again here;
- a group whose file is lost, cannot be read, or is not what its entry says, is left out alone. Which ones and why is on
  disk before the step is trained, and decides: a repeated step leaves out the same.

    <run>/batches/step-000012.json        {"step", "hash", "left_out": {"<index>": reason}, "document"}
    <run>/batches/files/step-000012/      files of a batch under way; removed when its version is written
"""

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.files import hash_file, write_atomic
from shoal.node.waits import RoleWaits
from shoal.rollout import Group
from shoal.swarm.asking import RefusedError
from shoal.swarm.keepsakes import KeepError
from shoal.swarm.messages import Batch, BatchAnswer, BatchEntry
from shoal.swarm.rules.age import is_allowed
from shoal.swarm.rules.batch import hash_batch
from shoal.swarm.tags import DocumentError, Tag, open_document
from shoal.trainer.errors import TrainerError
from shoal.trainer.pick import Expected, UnreadableError, pick_group
from shoal.trainer.reading import MAX_FILE_BYTES

BATCH_S, FETCH_S, READ_S = 600.0, 600.0, 600.0
KEEP_BACK_S = 20
"""how long the coordinator may keep back the answer that there is no batch yet"""
NUM_FETCHES = 8
"""files under way at once"""
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
"""between two questions for a batch that is not there yet"""
_LOST = frozenset({"not_found", "no_file"})
"""codes of refusals that say that a file is gone"""


class BatchClient(Protocol):
    """What is asked of a coordinator; `NodeClient` answers it."""

    async def cut_batch(self, step: int, *, wait_s: int = 0) -> BatchAnswer: ...
    async def fetch_blob(self, submission: str, blob: str, size: int, path: Path) -> None: ...


class ReadGroups(Protocol):
    """Reads the groups of a stranger's file under limits.

    `UnreadableError` says what is wrong with it, `UnreachableError` that it could not be found out now.
    """

    async def __call__(self, path: Path) -> Sequence[Group]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What a step trains on."""

    step: int
    hash: str
    groups: tuple[Group, ...]
    """by index"""
    left_out: dict[int, str]
    """index and reason of groups that cannot be trained on"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTerms:
    """What a batch is held against."""

    run: str
    coordinator: str
    async_level: int
    expected: Expected


class BatchReader:
    """Reads batches, one after the other or one ahead."""

    def __init__(self, client: BatchClient, read: ReadGroups, waits: RoleWaits, folder: Path, terms: RunTerms) -> None:
        self._client, self._read, self._waits, self._terms = client, read, waits, terms
        self._folder, self._files = folder, folder / "files"
        shutil.rmtree(self._files, ignore_errors=True)  # of an earlier process
        folder.mkdir(parents=True, exist_ok=True)
        self._slots = asyncio.Semaphore(NUM_FETCHES)
        self.reason = ""
        """why there was no batch when it was last asked for"""

    async def read_batch(self, step: int) -> TrainBatch:
        """The batch of step n, as soon as it can be cut. Its waits are not told: who is kept waiting by it says so."""
        answer = await self._ask(step, told=False)
        batch = check_batch(step, answer, self._terms)
        folder = self._files / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        names = {entry.submission: entry for entry in batch.groups}
        parts = await asyncio.gather(*(self._read_file(entry, batch, folder) for entry in names.values()))
        found = {index: result for part in parts for index, result in part.items()}
        left_out = self._settle_left_out(answer, batch, found)
        groups = tuple(
            group for index, group in sorted(found.items()) if isinstance(group, Group) and index not in left_out
        )
        return TrainBatch(step=step, hash=batch.hash, groups=groups, left_out=left_out)

    async def find_hash(self, step: int) -> str:
        """The hash of a batch that was trained on: from its record, or from the coordinator where that is gone."""
        try:
            return str(json.loads(self._record_path(step).read_bytes())["hash"])
        except FileNotFoundError:
            return check_batch(step, await self._ask(step, told=True), self._terms).hash

    def drop_files(self, step: int) -> None:
        """Step n is written: its files are not needed any more."""
        shutil.rmtree(self._files / f"step-{step:06d}", ignore_errors=True)

    async def _ask(self, step: int, *, told: bool) -> BatchAnswer:
        whom = f"the groups of step {step}"
        return await self._waits.insist(
            "cut", lambda: self._poll(step), for_whom=whom, timeout_s=BATCH_S, told=told, step=step
        )

    async def _poll(self, step: int) -> BatchAnswer:
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            answer = await self._client.cut_batch(step, wait_s=KEEP_BACK_S)
            self.reason = answer.reason
            if answer.batch is not None:
                return answer
            # A coordinator that did not keep the answer back wants to be asked less often.
            lasted_s = loop.time() - started_s
            await asyncio.sleep(min(max(answer.retry_after_s - lasted_s, MIN_PAUSE_S), MAX_PAUSE_S))

    async def _read_file(self, entry: BatchEntry, batch: Batch, folder: Path) -> dict[int, Group | UnreadableError]:
        """The groups of a batch that are in one file, or what is wrong with each."""
        entries = [other for other in batch.groups if other.submission == entry.submission]
        async with self._slots:
            try:
                path = await self._fetch(entry, folder)
                groups = await self._waits.insist(
                    "reading", lambda: self._read(path), for_whom="the reader of files", timeout_s=READ_S, told=False
                )
            except UnreadableError as error:
                return {other.index: error for other in entries}
        return {other.index: _try_pick(groups, other, self._terms.expected) for other in entries}

    async def _fetch(self, entry: BatchEntry, folder: Path) -> Path:
        path = folder / entry.blob
        if path.exists() and await asyncio.to_thread(hash_file, path) == entry.blob:
            return path
        try:
            await self._waits.insist(
                "file",
                lambda: self._client.fetch_blob(entry.submission, entry.blob, MAX_FILE_BYTES, path),
                for_whom=f"the file of {entry.submission}",
                timeout_s=FETCH_S,
                told=False,
            )
        except RefusedError as error:
            if error.refusal.code not in _LOST:
                raise
            raise UnreadableError(f"the coordinator lost its file: {error}") from None
        except KeepError as error:
            raise UnreadableError(str(error)) from None
        return path

    def _settle_left_out(
        self, answer: BatchAnswer, batch: Batch, found: dict[int, Group | UnreadableError]
    ) -> dict[int, str]:
        """What is left out, written down; for a step that is repeated, what was left out then."""
        bad = {index: str(error) for index, error in found.items() if isinstance(error, UnreadableError)}
        path = self._record_path(batch.step)
        if path.exists():
            known = json.loads(path.read_bytes())
            if known["hash"] != batch.hash:
                raise TrainerError(f"{path}: the ledger has another batch for step {batch.step} than it had before")
            left_out = {int(index): str(reason) for index, reason in known["left_out"].items()}
            if gone := {index: reason for index, reason in bad.items() if index not in left_out}:
                raise TrainerError(f"{path}: groups of step {batch.step} were read before and cannot be now: {gone}")
            return left_out
        record = {"step": batch.step, "hash": batch.hash, "left_out": bad, "document": answer.document}
        write_atomic(path, json.dumps(record).encode())
        return bad

    def _record_path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.json"


def check_batch(step: int, answer: BatchAnswer, terms: RunTerms) -> Batch:
    """The batch of an answer, if it is the coordinator's for this step and within the bound."""
    batch = answer.batch
    assert batch is not None, "asked for until there is one"
    try:
        body = open_document(terms.coordinator, Tag.BATCH, answer.document.encode())
    except DocumentError as error:
        raise TrainerError(f"the batch of step {step} is not signed by the coordinator: {error}") from None
    said = {"run": terms.run, "step": step, "hash": batch.hash, "groups": len(batch.groups)}
    if (batch.run, batch.step) != (terms.run, step) or {name: body.get(name) for name in said} != said:
        raise TrainerError(f"the coordinator sent another batch than that of step {step}")
    indices = [entry.index for entry in batch.groups]
    if indices != sorted(set(indices)) or hash_batch(batch.groups) != batch.hash:
        raise TrainerError(f"the batch of step {step} does not have the hash or the order of its groups")
    old = [entry.index for entry in batch.groups if not is_allowed(step, entry.version, terms.async_level)]
    if old:
        raise TrainerError(f"groups {old[:5]} of step {step} are of a version outside the bound")
    return batch


def _try_pick(groups: Sequence[Group], entry: BatchEntry, expected: Expected) -> Group | UnreadableError:
    try:
        return pick_group(groups, entry, expected)
    except UnreadableError as error:
        return error
