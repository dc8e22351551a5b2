"""Handing work in: commit, upload, keep the receipt.

A parcel stays on disk until then, and is handed in again after a restart; the coordinator answers the second time as it
did the first.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shoal.node.session import Session, end_session
from shoal.node.waits import WaitError
from shoal.swarm.asking import RefusedError, UnreachableError
from shoal.swarm.head import ForkError
from shoal.swarm.keepsakes import KeepError
from shoal.swarm.messages import CommitAnswer, Manifest
from shoal.worker.outbox import Outbox, Parcel

COMMIT_S = 60.0
UPLOAD_S = (120.0, 1e5)
"""deadline of an upload: seconds, and bytes per second of its size more"""
AT_ONCE = 4
_AGAIN_S = 0.5
"""between two uploads of a file, beside what the client waits"""


@dataclass(slots=True)
class Tally:
    """What became of a worker's parcels."""

    delivered: int = 0
    dropped: int = 0
    tokens: int = 0


class Delivery:
    """Hands parcels in. `run` it as often as parcels are to be on their way side by side."""

    def __init__(self, session: Session, outbox: Outbox, ended: Callable[[str], None]) -> None:
        """`ended` is called with each lease whose parcel is delivered or dropped."""
        self._session, self._outbox, self._ended = session, outbox, ended
        self._queue: asyncio.Queue[Parcel] = asyncio.Queue()
        self.tally = Tally()

    def send(self, parcel: Parcel) -> None:
        """Hand this in."""
        self._queue.put_nowait(parcel)

    async def drain(self, seconds: float) -> None:
        """Until nothing is on its way, or for so long; what is left stays on disk."""
        try:
            async with asyncio.timeout(seconds):
                await self._queue.join()
        except TimeoutError:
            self._session.note("not all of it could be delivered; the next start goes on with it")

    async def run(self) -> None:
        """Deliver one parcel after the other, for ever."""
        while True:
            await self._deliver(await self._queue.get())
            self._queue.task_done()

    async def _deliver(self, parcel: Parcel) -> None:
        """Hand one in, or drop it with a note where it is refused."""
        manifest = parcel.manifest
        try:
            committed = await self._commit(manifest)
            await self._upload(committed, parcel)
        except RefusedError as error:
            self._session.note(f"lease {manifest.lease} is not wanted: {error}")
            self.tally.dropped += 1
        except (ForkError, KeepError) as error:
            raise end_session(error) from None
        else:
            self.tally.delivered += 1
            self.tally.tokens += sum(entry.tokens for entry in manifest.rollouts)
        await asyncio.to_thread(self._outbox.forget, manifest.lease)
        self._ended(manifest.lease)

    async def _commit(self, manifest: Manifest) -> CommitAnswer:
        commit = partial(self._session.client.commit, manifest)
        return await self._session.waits.insist(
            "commit", commit, for_whom="the coordinator", timeout_s=COMMIT_S, told=False
        )

    async def _upload(self, committed: CommitAnswer, parcel: Parcel) -> None:
        client, manifest = self._session.client, parcel.manifest
        seconds, rate = UPLOAD_S
        while True:
            try:
                await self._session.waits.bound(
                    "upload",
                    client.upload(committed, manifest, parcel.path),
                    for_whom="the coordinator",
                    timeout_s=seconds + manifest.size / rate,
                    told=False,
                )
                return
            except (WaitError, UnreachableError) as error:
                self._session.note(f"{committed.submission}: {error}; uploads it again")
                await asyncio.sleep(_AGAIN_S)
