"""The node's side of the coordinator API: one method per request.

Invariants:
- each attempt of a request is signed again. The request carries what makes a second attempt harmless (a lease, a
  request key, a submission), so the coordinator answers it like the first;
- a node backs off: the wait doubles after each failure, is never shorter than requested, and is randomised, so that a
  thousand nodes do not return at once. Final refusals are not retried;
- leases, receipts and verdict records are verified and on disk before they are returned;
- files go to and come from the run's stores if it has any (`transfer`). Without stores, or when a store fails, they go
  through the coordinator. Received bytes are checked either way;
- every head received must extend the one held. A head that does not is a fork: the evidence is written to disk, and
  this and every later call raise `ForkError`; after a restart too, if the heads alone prove the fork. If only proofs
  failed, three times, each over a new connection, then the same head must be proven first after a restart. A node does
  not work for a coordinator with two histories.

All methods raise `RefusedError` (final refusal), `UnreachableError` (no answer after all attempts),
`InvalidDocumentError` and `ForkError`, and nothing else that the other side could cause.
"""

import logging
import os
from pathlib import Path

from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.identity.proof_of_work import make_stamp
from shoal.ledger.head import ForkError, HeadError, HeadKeeper, Relation, SignedHead
from shoal.net.client import Download, Endpoint, HttpClient, HttpResponse
from shoal.net.retry import RefusedError, RetryingClient
from shoal.node.public_client import MAX_ANSWER_BYTES, SignedClient, parse_answer, parse_head
from shoal.node.receipts import InvalidDocumentError, SignedDocumentStore
from shoal.node.transfer import BlobStores
from shoal.protocol.messages import (
    BatchAnswer,
    BlobLink,
    ClaimAnswer,
    ClaimRequest,
    CommitAnswer,
    CutRequest,
    Done,
    Heartbeat,
    HeartbeatAnswer,
    JoinRequest,
    LeaseAnswer,
    LeaseRequest,
    Manifest,
    MemberInfo,
    ReceiptAnswer,
    ReturnAnswer,
    SignedManifest,
    SignedVerdict,
    SignedVersion,
    VerdictAnswer,
    VerdictStatement,
    VersionAnswer,
    VersionStatement,
    sign_message,
)
from shoal.util.clock import read_clock

logger = logging.getLogger(__name__)

MAX_BATCH_BYTES = 1 << 25
MAX_WORK = 1 << 30
"""most hashes that a node computes to join: some minutes"""
_PROOF_TRIES = 3
_UPLOAD_AGAIN = frozenset({"no_file", "blob", "upload_here"})
"""codes of refused receipts after which a file that was put into a store is uploaded to the coordinator instead"""


class NodeClient(SignedClient):
    """Requests of a node under its key. `folder` holds its signed documents and the head; one client per folder."""

    def __init__(
        self,
        place: Endpoint,
        key: Key,
        *,
        run: str,
        coordinator: str,
        folder: Path,
        link: HttpClient | None = None,
        asker: RetryingClient | None = None,
        stores: BlobStores | None = None,
    ) -> None:
        super().__init__(place, key, run=run, coordinator=coordinator, link=link, asker=asker)
        self.stores = stores or BlobStores((), place)
        self.documents = SignedDocumentStore(folder, run, coordinator)
        try:
            self.heads = HeadKeeper(folder / "head.json", run, coordinator)
        except HeadError as error:
            raise ConfigError(
                f"{folder / 'head.json'}: {error}; without its head a node cannot detect a fork"
            ) from None

    @property
    def clock_offset_ms(self) -> int:
        """Estimated offset of the coordinator's clock from ours."""
        return self._signer.offset_ms

    def close(self) -> None:
        """As `PublicClient.close`."""
        super().close()
        self.stores.close()

    # Membership

    async def join(self, delegation: bytes, software: str = "", max_work: int = MAX_WORK) -> MemberInfo:
        """Compute the proof of work and join; again if the stamp was used up, or the work has risen meanwhile."""
        message = JoinRequest(delegation=delegation.decode(), software=software)
        for is_last in (False, False, True):
            challenge = await self.read_challenge(self._key.public)
            logger.info("joining: computing the proof of work, which takes some seconds")
            try:
                stamp = await make_stamp(challenge, self._key.public, max_work)
            except ValueError as error:
                raise InvalidDocumentError(str(error)) from None
            try:
                return await self._call("POST", "/v1/join", MemberInfo, message, [("Shoal-Work", stamp)])
            except RefusedError as error:
                if is_last or error.refusal.code != "work":
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def leave(self) -> None:
        """Leave the run; the node may join again later."""
        await self._call("POST", "/v1/leave", Done)

    async def send_heartbeat(self, beat: Heartbeat) -> HeartbeatAnswer:
        """Send a heartbeat; the head in the answer is checked against the one held."""
        answer = await self._call("POST", "/v1/heartbeat", HeartbeatAnswer, beat)
        if answer.head is not None:
            await self.check_head(parse_head(answer.head))
        return answer

    async def check_newest(self) -> Relation | None:
        """Check the coordinator's newest head against the one held; None if it has not signed any yet."""
        self._check_server()
        shown = await self.read_head()
        return None if shown is None else await self.check_head(shown)

    async def check_head(self, shown: SignedHead) -> Relation:
        """Check a head against the one held, with a proof if needed; `ForkError` ends the work."""
        try:
            if self.heads.doubted is not None:
                await self._prove_head(self.heads.doubted)
                self.heads.end_doubt()
            return await self._prove_head(shown)
        except HeadError as error:
            raise InvalidDocumentError(f"invalid ledger head from the coordinator: {error}") from None

    # Work

    async def ask_lease(self, request_key: str | None = None, *, version: int, wait_s: int = 0) -> LeaseAnswer:
        """Request a lease for work with a version; the same request key gets the same lease.

        The answer may take up to `wait_s`.
        """
        message = LeaseRequest(request_key=request_key or os.urandom(16).hex(), version=version, wait_s=wait_s)
        answer = await self._call("POST", "/v1/leases", LeaseAnswer, message)
        if answer.lease is not None:
            if answer.lease.node != self._key.public:
                raise InvalidDocumentError("the coordinator sent a lease of another node")
            self.documents.keep(answer.lease.lease, answer.lease, answer.document)
        return answer

    async def return_lease(self, lease: str) -> ReturnAnswer:
        """Return a lease."""
        return await self._call("POST", f"/v1/leases/{lease}/return", ReturnAnswer)

    async def submit(self, manifest: Manifest, path: Path) -> ReceiptAnswer:
        """Commit to a file, upload it, and keep its receipt."""
        return await self.upload(await self.commit(manifest), manifest, path)

    async def commit(self, manifest: Manifest) -> CommitAnswer:
        """Commit to a file before its upload."""
        signed = SignedManifest(manifest=manifest, signature=sign_message(self._key, self._run, manifest))
        return await self._call("POST", "/v1/submissions", CommitAnswer, signed)

    async def upload(self, committed: CommitAnswer, manifest: Manifest, path: Path) -> ReceiptAnswer:
        """Upload the file of a submission: to the store that its commitment names, or to the coordinator."""
        self._check_server()
        left_s = (committed.deadline_ms - read_clock() - self.clock_offset_ms) / 1000
        if await self.stores.try_put(committed, manifest, path, left_s=left_s):
            try:
                return await self.ask_receipt(committed.submission, manifest)
            except RefusedError as error:
                if error.refusal.code not in _UPLOAD_AGAIN:
                    raise
        target, digest = f"/v1/submissions/{committed.submission}/blob", bytes.fromhex(manifest.blob)

        async def attempt() -> HttpResponse:
            headers = self._signer.sign_stream("PUT", target, manifest.size, digest)
            answer = await self._link.send_file(target, headers, path, MAX_ANSWER_BYTES)
            return self._signer.check_answer("PUT", target, headers, answer)

        answer = parse_answer(ReceiptAnswer, await self._asker.call_with_retry(attempt, self._signer))
        return self._keep_receipt(committed.submission, manifest, answer)

    async def ask_receipt(self, submission: str, manifest: Manifest) -> ReceiptAnswer:
        """The receipt of a file that has arrived: a repeated one, or the first for a file that went to a store."""
        answer = await self._call("POST", f"/v1/submissions/{submission}/receipt", ReceiptAnswer)
        return self._keep_receipt(submission, manifest, answer)

    # Judging and training

    async def claim_jobs(self, *, wait_s: int = 0, most: int = 1) -> ClaimAnswer:
        """Claim submissions to judge; the coordinator may wait up to `wait_s` until there is one."""
        return await self._call("POST", "/v1/claims", ClaimAnswer, ClaimRequest(wait_s=wait_s, most=most))

    async def fetch_blob(self, submission: str, blob: str, size: int, path: Path) -> None:
        """Download the file of a submission to a new file, which exists only if its bytes are right."""
        self._check_server()
        with Download(path, blob, size) as download:
            if not await self._fetch_from_store(submission, download):
                await self._fetch_file(f"/v1/submissions/{submission}/blob", download)
            download.keep()

    async def send_verdict(self, verdict: VerdictStatement) -> VerdictAnswer:
        """Send a verdict."""
        signed = SignedVerdict(verdict=verdict, signature=sign_message(self._key, self._run, verdict))
        answer = await self._call("POST", "/v1/verdicts", VerdictAnswer, signed)
        record = answer.record
        expected = (verdict.submission, verdict.round, self._key.public)
        if (record.submission, record.round, record.validator) != expected:
            raise InvalidDocumentError("the coordinator answered with the record of another verdict")
        self.documents.keep(f"{record.submission}-{record.round}", record, answer.document)
        return answer

    async def cut_batch(self, step: int, *, wait_s: int = 0) -> BatchAnswer:
        """Fix the batch of a step; the coordinator may wait up to `wait_s` until there are enough groups."""
        message = CutRequest(wait_s=wait_s)
        return await self._call("POST", f"/v1/batches/{step}", BatchAnswer, message, max_bytes=MAX_BATCH_BYTES)

    async def read_batch(self, step: int) -> BatchAnswer:
        """A batch that was cut before."""
        return await self._call("GET", f"/v1/batches/{step}", BatchAnswer, max_bytes=MAX_BATCH_BYTES)

    async def publish_version(self, version: VersionStatement) -> VersionAnswer:
        """Announce a version."""
        signed = SignedVersion(version=version, signature=sign_message(self._key, self._run, version))
        return await self._call("POST", "/v1/versions", VersionAnswer, signed)

    async def _prove_head(self, shown: SignedHead) -> Relation:
        """Check a head, with its proof if needed; a failing proof may have been altered in transit."""
        relation = self.heads.offer_head(shown)
        if relation is not Relation.UNPROVEN or self.heads.held is None:
            return relation
        for _ in range(_PROOF_TRIES):
            proof = await self.read_proof(self.heads.held.head.size, shown.head.size)
            relation = self.heads.offer_head(shown, proof)
            if relation is not Relation.BROKEN:
                return relation
            self._link.close()
        raise self.heads.note_fork(shown, proof)

    async def _fetch_from_store(self, submission: str, download: Download) -> bool:
        if not self.stores.is_ready:
            return False
        link = await self._call("GET", f"/v1/submissions/{submission}/link", BlobLink)
        return await self.stores.try_fetch(link, download)

    def _keep_receipt(self, submission: str, manifest: Manifest, answer: ReceiptAnswer) -> ReceiptAnswer:
        receipt = answer.receipt
        expected = (submission, manifest.lease, self._key.public, manifest.blob, manifest.size)
        if (receipt.submission, receipt.lease, receipt.node, receipt.blob, receipt.size) != expected:
            raise InvalidDocumentError("the coordinator sent a receipt for another submission")
        self.documents.keep(submission, receipt, answer.document)
        return answer

    def _check_server(self) -> None:
        """See `SignedClient._check_server`: no requests to a coordinator with two histories."""
        if self.heads.fork is not None:
            raise ForkError(self.heads.fork)
