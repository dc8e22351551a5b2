"""Submitting written leases: commit the manifest, upload the file, keep the receipt.

A lease stays in the table until then and is submitted again after a restart; the coordinator answers a second
submission like the first.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shoal.net.api_error import ApiError
from shoal.net.retry import RefusedError
from shoal.node.session import Session
from shoal.worker.leases import LeaseRecord, LeaseState, LeaseTable

logger = logging.getLogger(__name__)

COMMIT_S = 60.0
UPLOAD_S = (120.0, 1e5)
"""deadline of an upload: seconds, plus its size divided by this rate in bytes per second"""
NUM_PARALLEL = 4


@dataclass(slots=True)
class SubmissionCounts:
    """Outcomes of a worker's submissions."""

    delivered: int = 0
    dropped: int = 0
    tokens: int = 0
    refusal: ApiError | None = None
    """of the last one that was dropped"""


class Submitter:
    """Submits leases; call `run` as many times as uploads may be concurrent."""

    def __init__(self, session: Session, leases: LeaseTable, on_ended: Callable[[], None]) -> None:
        """`on_ended` is called after each lease: the coordinator may grant another one from then on."""
        self._session, self._leases, self._on_ended = session, leases, on_ended
        self._queue: asyncio.Queue[LeaseRecord] = asyncio.Queue()  # a schedule; the state is in the table
        self.counts = SubmissionCounts()
        for record in leases.list_records(LeaseState.WRITTEN, LeaseState.COMMITTED):
            self.submit(record)

    def submit(self, record: LeaseRecord) -> None:
        """Submit a lease that is WRITTEN."""
        self._queue.put_nowait(record)

    async def drain(self, seconds: float) -> None:
        """Wait until everything is submitted, or for `seconds`; the rest stays on disk."""
        try:
            async with asyncio.timeout(seconds):
                await self._queue.join()
        except TimeoutError:
            logger.warning("some submissions could not be delivered; the next start resumes them")

    async def run(self) -> None:
        """Submit one lease after another, forever."""
        while True:
            await self._submit(await self._queue.get())
            self._queue.task_done()

    async def _submit(self, record: LeaseRecord) -> None:
        lease, manifest = record.order.lease, record.manifest
        assert manifest is not None, "written with its manifest"
        session, client = self._session, self._session.client
        try:
            commit = partial(client.commit, manifest)
            committed = await session.ask_coordinator("commit", commit, timeout_s=COMMIT_S, reported=False)
            await asyncio.to_thread(self._leases.mark_committed, lease)
            upload = partial(client.upload, committed, manifest, self._leases.path_of(lease))
            seconds, rate = UPLOAD_S
            await session.ask_coordinator("upload", upload, timeout_s=seconds + manifest.size / rate, reported=False)
        except RefusedError as error:
            if error.refusal.code == "superseded":
                logger.info(f"lease {lease} is no longer needed: {error}")
            else:
                logger.warning(f"lease {lease} was refused: {error}")
            self.counts.dropped += 1
            self.counts.refusal = error.refusal
        else:
            self.counts.delivered += 1
            self.counts.tokens += sum(entry.tokens for entry in manifest.rollouts)
        await asyncio.to_thread(self._leases.end, lease)
        self._on_ended()
