"""Publishing a version: handed over to the origin, recorded, announced to the coordinator; concurrent with training.

    enqueue -> the origin has it -> its hashes are on disk -> the ledger has it -> older versions are removed

Invariants:
- versions are announced in order, each once: publishing resumes after the ledger's newest version. A kill at any point
  repeats what was not done, with the same hashes;
- nothing here waits for a receiver: the origin is done when it has hashed the files;
- conflicting hashes for a version that is already in the ledger are a `TrainerError`, which is fatal.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path

from shoal.errors import ConfigError, DiskError, TrainerError, UnreachableError
from shoal.net.retry import RefusedError
from shoal.node.client import NodeClient
from shoal.protocol.messages import VersionStatement
from shoal.shardcast.origin_watch import PublishedVersion, request_publish
from shoal.shardcast.store.lock import check_owner, find_owner
from shoal.trainer.versions import VersionRecord, Versions
from shoal.util.aio import run_blocking
from shoal.util.spans import SpanLog
from shoal.util.waits import RoleWaits, WaitError

logger = logging.getLogger(__name__)

MAX_REFUSALS = 5
"""consecutive refusals of a running origin after which publishing fails"""
_ENTRY = re.compile(r"v(0|[1-9][0-9]*)-[0-9a-f]{16}")


class OriginFolder:
    """The origin that serves the store in `data`. Without `publisher` its key is not compared."""

    def __init__(self, data: Path, *, run: str, publisher: str = "") -> None:
        self._data, self._run, self._publisher = data, run, publisher
        self._num_refusals = 0

    async def hand_over(self, path: Path, version: int) -> PublishedVersion:
        """Have the origin publish a folder, and wait until it has; `UnreachableError` if no origin is running."""
        if find_owner(self._data) is None:
            raise UnreachableError(f"{self._data}: no origin serves this folder now")
        if self._publisher:
            self._check_publisher()
        try:
            published = await request_publish(self._data, path, version)
        except DiskError as error:
            raise UnreachableError(str(error)) from None
        except ConfigError as error:
            self._num_refusals += find_owner(self._data) is not None
            if self._num_refusals > MAX_REFUSALS:
                raise TrainerError(f"the origin refuses to publish v{version}: {error}") from None
            raise UnreachableError(str(error)) from None
        self._num_refusals = 0
        return published

    def list_served(self) -> set[int]:
        """Versions in the origin's store."""
        names = [path.name for path in self._data.iterdir()] if self._data.is_dir() else []
        return {int(match[1]) for name in names if (match := _ENTRY.fullmatch(name))}

    def _check_publisher(self) -> None:
        try:
            check_owner(self._data, self._run, self._publisher)
        except ConfigError as error:
            raise TrainerError(f"{error}; is the origin's key that of the run?") from None


HAND_OVER_S, ANNOUNCE_S, LEAVE_S = 3600.0, 60.0, 30.0


class Publisher:
    """Publishes one version at a time. `run` it next to the training, and `enqueue` each version."""

    def __init__(
        self,
        versions: Versions,
        client: NodeClient,
        origin: OriginFolder,
        waits: RoleWaits,
        *,
        newest: int,
        first_root: str = "",
        spans: SpanLog | None = None,
        list_awaited: Callable[[], list[int]] = list,
    ) -> None:
        self._versions, self._client, self._origin, self._waits = versions, client, origin, waits
        self._first_root, self._spans = first_root, spans or SpanLog(None, "trainer")
        self._list_awaited = list_awaited
        self._queue: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        """versions on disk, the last one perhaps still being written, with the hashes of their batches"""
        self.newest = newest
        """newest version in the ledger; -1 before v0"""

    def enqueue(self, version: int, batch: str) -> None:
        """Queue a version that is on disk or being written, with the hash of its training batch, empty for v0. Does not
        block; the async level keeps the queue short."""
        self._queue.put_nowait((version, batch))

    async def run(self) -> None:
        """Publish what is enqueued, forever."""
        while True:
            version, batch = await self._queue.get()
            with self._spans.span("publish", lane="publish", version=version):
                await self._publish(version, batch)
            self._queue.task_done()

    async def drain(self, *, patient: bool) -> None:
        """Wait until everything enqueued is published; if not `patient`, only briefly: the next start does the rest."""
        if patient:
            await self._waits.retry_forever(
                "publishing", self._queue.join, waiting_for="the origin", timeout_s=HAND_OVER_S
            )
            return
        try:
            await self._waits.with_timeout(
                "publishing", self._queue.join(), waiting_for="the origin", timeout_s=LEAVE_S
            )
        except WaitError as error:
            logger.warning(f"{error}; the next start publishes the rest")

    async def _publish(self, version: int, batch: str) -> None:
        if version < self.newest:
            return  # a repeated step; its weights were compared when they were written
        record = await self._hand_over(version, batch)
        known = self._versions.records.get(version)
        if version == self.newest and known is not None:
            _check_root(record, known.root, "what was published before")
            return
        if version == 0 and self._first_root:
            _check_root(record, self._first_root, "the recipe of this run")
        await run_blocking(None, self._versions.record, record)
        await self._announce(record)
        served = self._origin.list_served()
        await run_blocking(None, lambda: self._versions.prune(self.newest, {*served, *self._list_awaited()}))

    async def _hand_over(self, version: int, batch: str) -> VersionRecord:
        path = self._versions.path_of(version)
        if not path.is_dir():
            raise TrainerError(f"{path}: is missing and was not published; remove the checkpoints of later steps")
        published = await self._waits.retry_forever(
            "hand-over",
            lambda: self._origin.hand_over(path, version),
            waiting_for="the origin",
            timeout_s=HAND_OVER_S,
            lane="publish",
            version=version,
        )
        return VersionRecord(version, published.root, published.manifest, batch, published.shard_bytes)

    async def _announce(self, record: VersionRecord) -> None:
        statement = VersionStatement(
            version=record.version, root=record.root, manifest=record.manifest, batch=record.batch
        )
        try:
            await self._waits.retry_forever(
                "announcement",
                lambda: self._client.publish_version(statement),
                waiting_for="the coordinator",
                timeout_s=ANNOUNCE_S,
                lane="publish",
                version=record.version,
            )
        except RefusedError as error:
            raise TrainerError(f"the coordinator refused v{record.version}: {error}") from None
        self.newest = max(self.newest, record.version)


def _check_root(record: VersionRecord, root: str, where: str) -> None:
    if record.root != root:
        raise TrainerError(f"v{record.version} has the root hash {record.root}, but {root} according to {where}")
