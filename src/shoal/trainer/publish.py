"""How a version gets out: handed over to the origin, recorded, announced to the coordinator; beside the next step.

    enqueue -> the origin has it -> its hashes are on disk -> the ledger has it -> older ones go

Invariants:
- versions are announced in order, each once: the ledger's newest version says where to go on. A kill at any point
  repeats what was not done, with the same hashes;
- nothing here waits for a receiver: the origin is through when it has hashed the files, whoever fetches them;
- what the ledger holds under the same number with other hashes is a `TrainerError`: two lineages are not mended.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal.node.spans import SpanLog
from shoal.node.waits import Note, RoleWaits, WaitError
from shoal.shardcast.pool import run_blocking
from shoal.swarm.asking import RefusedError
from shoal.swarm.messages import VersionAnswer, VersionStatement
from shoal.trainer.errors import TrainerError
from shoal.trainer.handover import HandOver
from shoal.trainer.versions import Record, Versions

HAND_OVER_S, ANNOUNCE_S, LEAVE_S = 3600.0, 60.0, 30.0


class VersionClient(Protocol):
    """What is asked of a coordinator; `NodeClient` answers it."""

    async def publish_version(self, version: VersionStatement) -> VersionAnswer: ...


@dataclass(frozen=True, slots=True)
class Queued:
    """A version on disk that is to get out."""

    version: int
    batch: str
    """hash of the batch it was trained on; empty for v0"""


class Publisher:
    """Publishes one version at a time. `run` beside the training, `enqueue` as often as there is a version."""

    def __init__(
        self,
        versions: Versions,
        client: VersionClient,
        origin: HandOver,
        waits: RoleWaits,
        *,
        newest: int,
        first_root: str = "",
        spans: SpanLog | None = None,
        note: Note = lambda _: None,
        list_awaited: Callable[[], list[int]] = list,
        announced: Callable[[VersionAnswer], None] = lambda _: None,
    ) -> None:
        self._versions, self._client, self._origin, self._waits = versions, client, origin, waits
        self._first_root, self._spans = first_root, spans or SpanLog(None, "trainer")
        self._note, self._list_awaited, self._announced = note, list_awaited, announced
        self._queue: asyncio.Queue[Queued] = asyncio.Queue()
        self.newest = newest
        """newest version in the ledger; -1 before v0"""

    def enqueue(self, version: int, batch: str) -> None:
        """Take a version that is on disk. At once; the queue is as short as the async level keeps it."""
        self._queue.put_nowait(Queued(version, batch))

    async def run(self) -> None:
        """Publish what is enqueued, for ever."""
        while True:
            queued = await self._queue.get()
            with self._spans.span("publish", lane="publish", version=queued.version):
                await self._publish(queued)
            self._queue.task_done()

    async def drain(self, *, patient: bool) -> None:
        """Until all that was enqueued is out; if not `patient`, for a moment, and the next start does the rest."""
        if patient:
            await self._waits.insist("publishing", self._queue.join, for_whom="the origin", timeout_s=HAND_OVER_S)
            return
        try:
            await self._waits.bound("publishing", self._queue.join(), for_whom="the origin", timeout_s=LEAVE_S)
        except WaitError as error:
            self._note(f"{error}; what is left is published at the next start")

    async def _publish(self, queued: Queued) -> None:
        if queued.version < self.newest:
            return  # a step that was repeated; its weights were compared when they were written
        record = await self._hand_over(queued)
        known = self._versions.records.get(queued.version)
        if queued.version == self.newest and known is not None:
            _check_root(record, known.root, "what was published before")
            return
        if queued.version == 0 and self._first_root:
            _check_root(record, self._first_root, "the recipe of this run")
        await run_blocking(None, self._versions.record, record)
        await self._announce(record)
        await self._prune()

    async def _hand_over(self, queued: Queued) -> Record:
        path = self._versions.path_of(queued.version)
        if not path.is_dir():
            raise TrainerError(f"{path}: is missing and was not published; remove the checkpoints of later steps")
        published = await self._waits.insist(
            "hand-over",
            lambda: self._origin.hand_over(path, queued.version),
            for_whom="the origin",
            timeout_s=HAND_OVER_S,
            lane="publish",
            version=queued.version,
        )
        weights = await run_blocking(None, self._versions.hash_weights, queued.version)
        return Record(queued.version, weights, published.root, published.manifest, queued.batch)

    async def _announce(self, record: Record) -> None:
        said = VersionStatement(version=record.version, root=record.root, manifest=record.manifest, batch=record.batch)
        try:
            answer = await self._waits.insist(
                "announcement",
                lambda: self._client.publish_version(said),
                for_whom="the coordinator",
                timeout_s=ANNOUNCE_S,
                lane="publish",
                version=record.version,
            )
        except RefusedError as error:
            raise TrainerError(f"v{record.version} is not taken by the coordinator: {error}") from None
        self.newest = max(self.newest, record.version)
        self._announced(answer)

    async def _prune(self) -> None:
        served = self._origin.list_served()
        await run_blocking(None, self._prune_now, served)

    def _prune_now(self, served: set[int]) -> None:
        self._versions.prune(below=self.newest, served=served, awaited=self._list_awaited())


def _check_root(record: Record, root: str, where: str) -> None:
    if record.root != root:
        raise TrainerError(f"v{record.version} has the root {record.root}, and {root} according to {where}")
