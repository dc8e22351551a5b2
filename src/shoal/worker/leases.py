"""The leases of a worker: one state machine, in one table, on disk.

    ASKED -> HELD -> RUNNING -> WRITTEN -> COMMITTED -> DONE      (and from each of them to DONE)

    <folder>/leases/asked.json        ASKED: the key under which the next lease is requested
    <folder>/leases/<lease>.json      a lease: its state, its order, and its manifest from WRITTEN on
    <folder>/leases/<lease>.parquet   its rollouts, complete once the state is WRITTEN

Invariants:
- this table is the only place that stores the state of a lease; `MOVES` are the only transitions;
- a state is on disk before anything follows from it: HELD before generation starts, WRITTEN with the manifest before
  the manifest is sent, COMMITTED before the upload. Only RUNNING is kept in memory alone: after a kill the lease is
  HELD again, and generating again gives the same tokens;
- a lease is requested under a key that is on disk, so a grant whose answer was lost is granted again. No key is used
  for two leases: each lease records the key it was granted under, and a recorded key is not used again;
- a lease is never written twice, because that would sign two manifests for it;
- from WRITTEN on a lease cannot be cancelled: for the coordinator it ends with its manifest, which is no reason to drop
  the file;
- the folder is this table's own: `node.receipts` keeps the signed leases elsewhere, and longer;
- file names are lease ids, which messages validate: nothing else from a coordinator becomes part of a path.

Folders `orders/` and `outbox/` of earlier shoal versions are removed with a warning: their leases expire.
"""

import logging
import os
import shutil
import threading
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.errors import ConfigError
from shoal.protocol.messages import Manifest
from shoal.util.files import sweep_leftovers, write_atomic
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour, pack_work
from shoal.worker.orders import LeaseOrder

logger = logging.getLogger(__name__)

_ASKED = "asked.json"
_OLD_FOLDERS = ("orders", "outbox")


class LeaseState(StrEnum):
    """Progress of a lease."""

    ASKED = "asked"
    """requested; it has no id yet"""
    HELD = "held"
    RUNNING = "running"
    """being generated"""
    WRITTEN = "written"
    """generated; on disk with its manifest once that is written"""
    COMMITTED = "committed"
    """the coordinator has the manifest and waits for the file"""
    DONE = "done"
    """delivered, cancelled or returned: nothing is kept"""


MOVES = {
    LeaseState.ASKED: {LeaseState.HELD, LeaseState.DONE},
    LeaseState.HELD: {LeaseState.RUNNING, LeaseState.DONE},
    LeaseState.RUNNING: {LeaseState.WRITTEN, LeaseState.DONE},
    LeaseState.WRITTEN: {LeaseState.COMMITTED, LeaseState.DONE},
    LeaseState.COMMITTED: {LeaseState.COMMITTED, LeaseState.DONE},  # a repeated commit after a restart is harmless
    LeaseState.DONE: set[LeaseState](),
}


class LeaseRecord(BaseModel):
    """A lease as stored on disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state: LeaseState
    order: LeaseOrder
    fence: int
    request_key: str = ""
    manifest: Manifest | None = None

    @property
    def can_be_cancelled(self) -> bool:
        return self.state in (LeaseState.HELD, LeaseState.RUNNING)


class AskedLease(BaseModel):
    """The key of the pending lease request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    request_key: str


class LeaseTable:
    """The leases of one process; thread-safe. Without a folder nothing is stored on disk."""

    def __init__(self, folder: Path | None = None) -> None:
        self.changed = threading.Condition()
        """notified after each change; its lock guards the records and is never held while a file is written"""
        self._records: dict[str, LeaseRecord] = {}
        self._folder = None if folder is None else folder / "leases"
        if folder is not None:
            _drop_old(folder)
            self._load()

    def __len__(self) -> int:
        return len(self._records)

    def find(self, lease: str) -> LeaseRecord | None:
        """The record of a lease that is not done, if it has one."""
        return self._records.get(lease)

    def list_records(self, *states: LeaseState) -> list[LeaseRecord]:
        """Leases in one of these states, oldest first."""
        with self.changed:
            return [record for record in self._records.values() if record.state in states]

    def find_key(self) -> str:
        """ASKED: the key of the pending lease request, or a new one. Blocking."""
        assert self._folder is not None, "only workers with a folder request leases"
        path = self._folder / _ASKED
        if path.exists():
            return _read(path, AskedLease).request_key
        asked = AskedLease(request_key=os.urandom(16).hex())
        write_atomic(path, asked.model_dump_json().encode())
        return asked.request_key

    def drop_key(self) -> None:
        """Use a new key for the next lease."""
        if self._folder is not None:
            (self._folder / _ASKED).unlink(missing_ok=True)

    def hold(self, order: LeaseOrder, *, fence: int = 0, request_key: str = "") -> None:
        """ASKED -> HELD: store a granted lease. Blocking."""
        assert order.lease not in self._records, "a lease is taken only once"
        self._put(LeaseRecord(state=LeaseState.HELD, order=order, fence=fence, request_key=request_key))
        self.drop_key()

    def has_ready(self, version: int) -> bool:
        """Whether a lease of a version is HELD."""
        return any(record.order.version == version for record in self.list_records(LeaseState.HELD))

    def start_next(self, version: int) -> LeaseOrder | None:
        """HELD -> RUNNING: the lease of a version with the smallest step."""
        with self.changed:
            ready = [record for record in self.list_records(LeaseState.HELD) if record.order.version == version]
            if not ready:
                return None
            # Training waits for the smallest step.
            order = min((record.order for record in ready), key=lambda order: (order.step, order.first))
            self._move(order.lease, LeaseState.RUNNING)
            return order

    def write(self, work: FinishedWork, behaviour: WorkerBehaviour) -> LeaseRecord | None:
        """RUNNING -> WRITTEN: write the file and the manifest; None if the lease was cancelled before. Blocking."""
        assert self._folder is not None, "only workers with a folder write submissions"
        with self.changed:
            if work.order.lease not in self._records:
                return None
            record = self._move(work.order.lease, LeaseState.WRITTEN)
        pending = pack_work(behaviour, work, record.fence, self.path_of(work.order.lease))
        return self._put(record.model_copy(update={"manifest": pending.manifest}))

    def path_of(self, lease: str) -> Path:
        """The path of a lease's rollouts."""
        assert self._folder is not None, "only workers with a folder write files"
        return self._folder / f"{lease}.parquet"

    def mark_committed(self, lease: str) -> None:
        """WRITTEN -> COMMITTED. Blocking."""
        with self.changed:
            record = self._move(lease, LeaseState.COMMITTED)
        self._put(record)

    def end(self, lease: str) -> None:
        """-> DONE: remove everything about a lease."""
        with self.changed:
            if lease in self._records:
                self._move(lease, LeaseState.DONE)
                del self._records[lease]
        if self._folder is not None:
            # The record first: a record without its file would look like a written lease.
            (self._folder / f"{lease}.json").unlink(missing_ok=True)
            self.path_of(lease).unlink(missing_ok=True)

    def _move(self, lease: str, state: LeaseState) -> LeaseRecord:
        record = self._records[lease]
        assert state in MOVES[record.state], f"lease {lease} cannot move from {record.state} to {state}"
        moved = record.model_copy(update={"state": state})
        self._records[lease] = moved
        self.changed.notify_all()
        return moved

    def _put(self, record: LeaseRecord) -> LeaseRecord:
        """Store a record on disk, then in the table."""
        lease = record.order.lease
        if self._folder is not None:
            write_atomic(self._folder / f"{lease}.json", record.model_dump_json().encode())
        with self.changed:
            self._records[lease] = record
            self.changed.notify_all()
        return record

    def _load(self) -> None:
        """Load the records of an earlier process."""
        folder = self._folder
        assert folder is not None
        folder.mkdir(parents=True, exist_ok=True)
        sweep_leftovers(folder)
        paths = [path for path in folder.glob("l*.json") if path.stem[1:].isdecimal()]
        for path in sorted(paths, key=lambda path: int(path.stem[1:])):
            self._records[path.stem] = _read(path, LeaseRecord)
        for path in folder.glob("*.parquet"):
            record = self._records.get(path.stem)
            if record is None or record.manifest is None:
                path.unlink()  # the process was killed while writing or removing it
        asked = folder / _ASKED
        if asked.exists() and _read(asked, AskedLease).request_key in {r.request_key for r in self._records.values()}:
            self.drop_key()  # the process was killed between storing the lease and dropping its key


Kept = TypeVar("Kept", bound=BaseModel)


def _read(path: Path, model: type[Kept]) -> Kept:
    try:
        return model.model_validate_json(path.read_bytes())
    except ValidationError:
        raise ConfigError(f"{path}: corrupt; delete it, the lease will be reassigned") from None


def _drop_old(folder: Path) -> None:
    old = [folder / name for name in _OLD_FOLDERS if (folder / name).is_dir()]
    if old:
        logger.warning(f"{folder}: removing leases of an earlier shoal version; they expire and are reassigned")
    for path in old:
        shutil.rmtree(path)
