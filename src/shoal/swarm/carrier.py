"""A node's files on both their ways: past the coordinator, where there is a store for that, and through it."""

from pathlib import Path

from shoal.swarm.api.answers import BlobLink
from shoal.swarm.asking import Asker
from shoal.swarm.client_auth import RequestSigner
from shoal.swarm.clock import read_clock
from shoal.swarm.intake import Intake
from shoal.swarm.keepsakes import KeepError
from shoal.swarm.link import Answer, Link
from shoal.swarm.messages import CommitAnswer, Manifest
from shoal.swarm.stores import StoreError, Stores

MAX_ANSWER_BYTES = 1 << 20
LEAST_S = 1.0
"""with less time for a store it is not asked: that it was too slow would not be its fault"""
FETCH_S, FETCH_RATE = 10.0, 1 << 20
"""how long a store may take for a file: so much, and a second for as many bytes. Then the coordinator is asked"""


class Carrier:
    """Carries files for one node."""

    def __init__(self, link: Link, asker: Asker, signer: RequestSigner, stores: Stores) -> None:
        self._link, self._asker, self._signer, self._stores = link, asker, signer, stores

    async def put_past(self, committed: CommitAnswer, manifest: Manifest, path: Path) -> bool:
        """Put a file into the store that a commitment names; False if the coordinator must take it."""
        if not committed.upload_url or not self._stores.is_ready:
            return False
        left_s = (committed.deadline_ms - read_clock() - self._signer.offset_ms) / 1000
        within_s = left_s / 2  # so that there is some left for the other way
        if within_s < LEAST_S:
            return False
        try:
            await self._stores.put(
                committed.upload_url, path, blob=manifest.blob, size=manifest.size, within_s=within_s
            )
        except StoreError:
            return False  # noted where it was raised
        return True

    async def put_here(self, submission: str, manifest: Manifest, path: Path) -> Answer:
        """Upload a file to the coordinator; the answer has its receipt."""
        target, digest = f"/v1/submissions/{submission}/blob", bytes.fromhex(manifest.blob)

        async def attempt() -> Answer:
            headers = self._signer.sign_stream("PUT", target, manifest.size, digest)
            return await self._link.send_file(target, headers, path, MAX_ANSWER_BYTES)

        return await self._asker.persist(attempt, self._signer)

    async def fetch_past(self, link: BlobLink, intake: Intake) -> bool:
        """Read a file from the store that a link names; False if the coordinator must send it."""
        if not link.url:
            return False
        try:
            within_s = min(FETCH_S + intake.size / FETCH_RATE, link.expires_s)
            await self._stores.fetch(link.url, intake, within_s=within_s)
        except StoreError:
            return False  # noted where it was raised
        return True

    async def fetch_here(self, submission: str, intake: Intake) -> None:
        """Read a file from the coordinator; `intake` is whole afterwards."""
        target = f"/v1/submissions/{submission}/blob"

        async def attempt() -> Answer:
            intake.restart()
            answer = await self._link.fetch(target, self._signer.sign_request("GET", target), intake, MAX_ANSWER_BYTES)
            if answer.status == 200 and not intake.is_whole:
                raise KeepError("the coordinator sent other bytes than those of the submission")
            return answer

        await self._asker.persist(attempt, self._signer)
