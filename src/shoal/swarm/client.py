"""A node's side of the control plane: one method for each thing that can be asked of a coordinator.

Invariants:
- each try of a request is signed anew; what makes a second try harmless is in the request (a lease, a request key, a
  submission), so the coordinator answers it as it did the first;
- a node backs off: twice as long after each failure, never shorter than it was asked to wait, and with a random share,
  so that a thousand nodes do not come back at once. What is refused for good is not tried again;
- leases, receipts and verdict records are on disk, with a signature that holds, before they are returned;
- files go to the run's stores and come from them where there are such (`stores`), else through the coordinator, and so
  they do whenever a store fails; what comes has the right bytes either way;
- every head that is shown must extend the one held. One that does not is a fork: the evidence is on disk, and this and
  every later call raise `ForkError`; after a restart too, if the heads convict by themselves. If only proofs failed,
  three of them, each over a connection of its own, then the same head must be proven first after a restart. A node does
  not work for a coordinator with two histories.

All methods raise `RefusedError` (a final no), `UnreachableError` (no answer after all tries), `KeepError` and
`ForkError`, and nothing else that the other side could cause.
"""

import asyncio
import os
import threading
from pathlib import Path

from pydantic import BaseModel

from shoal.errors import ConfigError
from shoal.keys import Key
from shoal.swarm.api.answers import (
    BlobLink,
    Done,
)
from shoal.swarm.asking import Asker, RefusedError
from shoal.swarm.carrier import MAX_ANSWER_BYTES, Carrier
from shoal.swarm.client_auth import RequestSigner
from shoal.swarm.head import ForkError, HeadError, HeadKeeper, Relation, SignedHead
from shoal.swarm.intake import Intake
from shoal.swarm.keepsakes import KeepError, Keepsakes
from shoal.swarm.link import Answer, Link, Place
from shoal.swarm.messages import (
    BatchAnswer,
    ClaimAnswer,
    ClaimRequest,
    CommitAnswer,
    CutRequest,
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
from shoal.swarm.open_client import Model, OpenClient, parse_answer, parse_head
from shoal.swarm.stores import Stores
from shoal.swarm.work import read_challenge, solve_challenge

MAX_BATCH_BYTES = 1 << 25
MAX_WORK = 1 << 30
"""hashes that a node does at most to join: some minutes"""
_PROOF_TRIES = 3
_UPLOAD_HERE = frozenset({"no_file", "blob", "upload_here"})
"""codes of refused receipts for files that were put into a store: the coordinator takes them itself"""


class NodeClient(OpenClient):
    """What a node may ask, under its key. `folder` holds its keepsakes and the head; one client per folder."""

    def __init__(
        self,
        place: Place,
        key: Key,
        *,
        run: str,
        coordinator: str,
        folder: Path,
        link: Link | None = None,
        asker: Asker | None = None,
        signer: RequestSigner | None = None,
        stores: Stores | None = None,
    ) -> None:
        super().__init__(place, link=link, asker=asker)
        self._key, self._run = key, run
        self._signer = signer or RequestSigner(key, run, coordinator)
        self.stores = stores or Stores((), place)
        self._carrier = Carrier(self._link, self._asker, self._signer, self.stores)
        self.keepsakes = Keepsakes(folder, run, coordinator)
        try:
            self.heads = HeadKeeper(folder / "head.json", run, coordinator)
        except HeadError as error:
            raise ConfigError(
                f"{folder / 'head.json'}: {error}; a node that lost its head cannot tell a fork"
            ) from None

    @property
    def clock_offset_ms(self) -> int:
        """How far the coordinator's clock is ahead of ours, as far as known."""
        return self._signer.offset_ms

    def close(self) -> None:
        """As `OpenClient.close`."""
        super().close()
        self.stores.close()

    # Membership

    async def join(self, delegation: bytes, software: str = "", max_work: int = MAX_WORK) -> MemberInfo:
        """Do the work that joining costs, and join."""
        stamp = await self._make_stamp(max_work)
        message = JoinRequest(delegation=delegation.decode(), software=software)
        return await self._call("POST", "/v1/join", MemberInfo, message, [("Shoal-Work", stamp)])

    async def leave(self) -> None:
        """Leave for now."""
        await self._call("POST", "/v1/leave", Done)

    async def send_heartbeat(self, beat: Heartbeat) -> HeartbeatAnswer:
        """Say that we live; the head that comes back is checked against the one held."""
        answer = await self._call("POST", "/v1/heartbeat", HeartbeatAnswer, beat)
        if answer.head is not None:
            await self.check_head(parse_head(answer.head))
        return answer

    async def check_newest(self) -> Relation | None:
        """Hold the coordinator's newest head against the one that is held; None if it has signed none yet."""
        self._refuse_fork()
        shown = await self.read_head()
        return None if shown is None else await self.check_head(shown)

    async def check_head(self, shown: SignedHead) -> Relation:
        """Hold a head against the one that is held, with a proof if it takes one; `ForkError` ends the work."""
        try:
            if self.heads.doubted is not None:
                await self._prove_head(self.heads.doubted)
                self.heads.end_doubt()
            return await self._prove_head(shown)
        except HeadError as error:
            raise KeepError(f"the coordinator showed no head of its own: {error}") from None

    # Work

    async def ask_lease(self, request_key: str | None = None, *, wait_s: int = 0) -> LeaseAnswer:
        """Ask for work; the same request key again gets the same lease. The answer may be kept back for `wait_s`."""
        message = LeaseRequest(request_key=request_key or os.urandom(16).hex(), wait_s=wait_s)
        answer = await self._call("POST", "/v1/leases", LeaseAnswer, message)
        if answer.lease is not None:
            if answer.lease.node != self._key.public:
                raise KeepError("the coordinator sent the lease of another node")
            self.keepsakes.keep(answer.lease.lease, answer.lease, answer.document)
        return answer

    async def return_lease(self, lease: str) -> ReturnAnswer:
        """Give work back."""
        return await self._call("POST", f"/v1/leases/{lease}/return", ReturnAnswer)

    async def submit(self, manifest: Manifest, path: Path) -> ReceiptAnswer:
        """Commit to a file, upload it, and keep its receipt."""
        return await self.upload(await self.commit(manifest), manifest, path)

    async def commit(self, manifest: Manifest) -> CommitAnswer:
        """Commit to what will be uploaded."""
        signed = SignedManifest(manifest=manifest, signature=sign_message(self._key, self._run, manifest))
        return await self._call("POST", "/v1/submissions", CommitAnswer, signed)

    async def upload(self, committed: CommitAnswer, manifest: Manifest, path: Path) -> ReceiptAnswer:
        """Upload the file of a submission: to the store that its commitment names, or to the coordinator."""
        self._refuse_fork()
        if await self._carrier.put_past(committed, manifest, path):
            try:
                return await self.ask_receipt(committed.submission, manifest)
            except RefusedError as error:
                if error.refusal.code not in _UPLOAD_HERE:
                    raise
        answer = parse_answer(ReceiptAnswer, await self._carrier.put_here(committed.submission, manifest, path))
        return self._keep_receipt(committed.submission, manifest, answer)

    async def ask_receipt(self, submission: str, manifest: Manifest) -> ReceiptAnswer:
        """The receipt of a file that is there: once more, or for one that was put into the store itself."""
        answer = await self._call("POST", f"/v1/submissions/{submission}/receipt", ReceiptAnswer)
        return self._keep_receipt(submission, manifest, answer)

    # Judging and training

    async def claim_jobs(self, *, wait_s: int = 0, most: int = 1) -> ClaimAnswer:
        """Take a submission to judge; the answer may be kept back for `wait_s` until there is one."""
        return await self._call("POST", "/v1/claims", ClaimAnswer, ClaimRequest(wait_s=wait_s, most=most))

    async def fetch_blob(self, submission: str, blob: str, size: int, path: Path) -> None:
        """The file of a submission into a new file, which is there only if it has the right bytes."""
        self._refuse_fork()
        with Intake(path, blob, size) as intake:
            if not await self._fetch_past(submission, intake):
                await self._carrier.fetch_here(submission, intake)
            intake.keep()

    async def send_verdict(self, verdict: VerdictStatement) -> VerdictAnswer:
        """Say what was found."""
        signed = SignedVerdict(verdict=verdict, signature=sign_message(self._key, self._run, verdict))
        answer = await self._call("POST", "/v1/verdicts", VerdictAnswer, signed)
        record = answer.record
        expected = (verdict.submission, verdict.round, self._key.public)
        if (record.submission, record.round, record.validator) != expected:
            raise KeepError("the coordinator answered with the record of another verdict")
        self.keepsakes.keep(f"{record.submission}-{record.round}", record, answer.document)
        return answer

    async def cut_batch(self, step: int, *, wait_s: int = 0) -> BatchAnswer:
        """Fix what a step trains on; the answer may be kept back for `wait_s` until there is enough."""
        message = CutRequest(wait_s=wait_s)
        return await self._call("POST", f"/v1/batches/{step}", BatchAnswer, message, max_bytes=MAX_BATCH_BYTES)

    async def read_batch(self, step: int) -> BatchAnswer:
        """A batch that was cut."""
        return await self._call("GET", f"/v1/batches/{step}", BatchAnswer, max_bytes=MAX_BATCH_BYTES)

    async def publish_version(self, version: VersionStatement) -> VersionAnswer:
        """Say that a version is out."""
        signed = SignedVersion(version=version, signature=sign_message(self._key, self._run, version))
        return await self._call("POST", "/v1/versions", VersionAnswer, signed)

    async def _call(
        self,
        method: str,
        target: str,
        model: type[Model],
        message: BaseModel | None = None,
        extra: list[tuple[str, str]] | None = None,
        *,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> Model:
        self._refuse_fork()
        body = b"" if message is None else message.model_dump_json().encode()

        async def attempt() -> Answer:
            headers = [*self._signer.sign_request(method, target, body), *(extra or [])]
            return await self._link.ask(method, target, headers, body, max_bytes)

        return parse_answer(model, await self._asker.persist(attempt, self._signer))

    async def _prove_head(self, shown: SignedHead) -> Relation:
        """Offer a head, with its proof if it takes one; one that fails may have been altered on the way."""
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

    async def _fetch_past(self, submission: str, intake: Intake) -> bool:
        if not self.stores.is_ready:
            return False
        link = await self._call("GET", f"/v1/submissions/{submission}/link", BlobLink)
        return await self._carrier.fetch_past(link, intake)

    def _keep_receipt(self, submission: str, manifest: Manifest, answer: ReceiptAnswer) -> ReceiptAnswer:
        receipt = answer.receipt
        expected = (submission, manifest.lease, self._key.public, manifest.blob, manifest.size)
        if (receipt.submission, receipt.lease, receipt.node, receipt.blob, receipt.size) != expected:
            raise KeepError("the coordinator sent a receipt for something else")
        self.keepsakes.keep(submission, receipt, answer.document)
        return answer

    def _refuse_fork(self) -> None:
        if self.heads.fork is not None:
            raise ForkError(self.heads.fork)

    async def _make_stamp(self, max_work: int) -> str:
        """Solve a challenge in a thread, which ends with whoever waits for it."""
        text = await self.read_challenge(self._key.public)
        try:
            challenge = read_challenge(text, self._key.public, max_work)
        except ValueError as error:
            raise KeepError(str(error)) from None
        stop = threading.Event()
        try:
            stamp = await asyncio.to_thread(solve_challenge, challenge, stop.is_set)
        finally:
            stop.set()
        assert stamp is not None, "nobody said stop"
        return stamp
