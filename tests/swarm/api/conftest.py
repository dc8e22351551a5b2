"""A coordinator that says yes, behind the real app, the real server and a real socket.

The stand-in keeps what it is told in memory and signs what a coordinator signs; its ledger and its blobs are real. So
these tests are about the way to the coordinator and back, and not about its decisions.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.keys import Key
from shoal.shardcast.metrics import Registry
from shoal.swarm.api.app import build_app
from shoal.swarm.api.desk import ApiLimits, Desk
from shoal.swarm.asking import Asker, Patience
from shoal.swarm.blobs.disk import DiskLimits, DiskStore
from shoal.swarm.client import NodeClient
from shoal.swarm.client_auth import RequestSigner
from shoal.swarm.clock import read_clock
from shoal.swarm.delegation import Scope
from shoal.swarm.exchange import HttpLimits
from shoal.swarm.ledger import Ledger
from shoal.swarm.link import Place, parse_place
from shoal.swarm.messages import (
    AppealAnswer,
    Batch,
    BatchAnswer,
    ClaimAnswer,
    CommandAnswer,
    CommitAnswer,
    EvidenceAnswer,
    Heartbeat,
    HeartbeatAnswer,
    Job,
    LeaderLine,
    Lease,
    LeaseAnswer,
    Manifest,
    MemberInfo,
    Message,
    Receipt,
    ReceiptAnswer,
    RedeemAnswer,
    ReturnAnswer,
    SignedAppeal,
    SignedCommand,
    SignedManifest,
    SignedRedeem,
    SignedUnbond,
    SignedVerdict,
    SignedVersion,
    Standing,
    Status,
    SubmissionState,
    UnbondAnswer,
    VerdictAnswer,
    VerdictRecord,
    VersionAnswer,
)
from shoal.swarm.nonces import NonceBook
from shoal.swarm.params import RunParams
from shoal.swarm.refusal import AuthError
from shoal.swarm.serve import Server
from shoal.swarm.server_auth import AuthLimits, Member
from shoal.swarm.tags import Tag, sign_document
from shoal.swarm.work import JoinRate, WorkGate

RUN = "demo"
ZERO = "0" * 64


class StandIn:
    """Decides nothing and remembers who asked what."""

    def __init__(self, ledger: Ledger, key: Key, blobs: DiskStore) -> None:
        self.run, self.key, self.public, self.ledger, self.blobs = RUN, key, key.public, ledger, blobs
        self.params = RunParams()
        self.mirror = SimpleNamespace(canaries={"caught": 2, "missed": 1, "wronged": 0})
        self.members: dict[str, Member] = {}
        self.manifests: dict[str, SignedManifest] = {}
        self.calls: list[str] = []
        self.num_ticks = 0

    def admit(self, node: str, **fields: Any) -> None:
        scopes = frozenset({Scope.WORK, Scope.VALIDATE, Scope.TRAIN})
        self.members[node] = Member(**{"owner": node, "scopes": scopes, **fields})

    def listen(self, listener: Callable[..., None]) -> None:
        """Nothing happens here that somebody waits for."""

    async def tick(self) -> None:
        self.num_ticks += 1

    def find_member(self, node: str) -> Member | None:
        return self.members.get(node)

    def find_owner(self, key: str) -> str | None:
        member = self.members.get(key)
        return None if member is None or member.is_revoked else member.owner

    async def show_evidence(self, key: str, submission: str) -> EvidenceAnswer:
        self.calls.append("evidence")
        raise AuthError(409, "undecided", "this submission is not decided")

    async def open_evidence(self, key: str, submission: str) -> Any:
        self.calls.append("file")
        return await self.blobs.open(self.find_manifest(submission).blob)

    async def join(self, node: str, delegation: bytes) -> MemberInfo:
        self.calls.append("join")
        self.admit(node)
        return MemberInfo(
            run=RUN,
            node=node,
            owner=node,
            standing=Standing.PROBATION,
            scopes=("work",),
            width=1,
            heartbeat_s=10,
            server_time_ms=read_clock(),
        )

    async def leave(self, node: str) -> None:
        self.calls.append("leave")

    def heartbeat(self, node: str, beat: Heartbeat) -> HeartbeatAnswer:
        self.calls.append("heartbeat")
        head = self.ledger.head
        return HeartbeatAnswer(
            cancelled=(),
            newest_version=0,
            oldest_version=0,
            head=None if head is None else head.to_bytes().decode(),
            server_time_ms=read_clock(),
            next_s=10,
            standing=Standing.PROBATION,
            finished=False,
            reasons=(),
        )

    async def grant_lease(self, node: str, request_key: str) -> LeaseAnswer:
        self.calls.append("lease")
        lease = Lease(
            run=RUN,
            lease="l1",
            node=node,
            step=1,
            first=0,
            count=1,
            group_size=2,
            max_tokens=8,
            beacon=ZERO,
            fence=1,
            newest_version=0,
            oldest_version=0,
            granted_ms=1,
            deadline_ms=2**40,
            price=1,
        )
        return LeaseAnswer(lease=lease, document=self.sign(Tag.LEASE, lease))

    async def return_lease(self, node: str, lease: str) -> ReturnAnswer:
        self.calls.append("return")
        return ReturnAnswer(lease=lease, state="returned")

    async def commit_submission(self, node: str, signed: SignedManifest) -> CommitAnswer:
        self.calls.append("commit")
        self.manifests["s1"] = signed
        size = signed.manifest.size
        return CommitAnswer(submission="s1", state=SubmissionState.COMMITTED, size=size, deadline_ms=2**40)

    async def put_blob(self, node: str, submission: str, chunks: AsyncIterator[bytes]) -> ReceiptAnswer:
        self.calls.append("blob")
        manifest = self.find_manifest(submission)
        await self.blobs.put(manifest.blob, manifest.size, chunks)
        return self.make_receipt(node, submission)

    async def receive(self, node: str, submission: str) -> ReceiptAnswer:
        self.calls.append("receipt")
        if not await self.blobs.has(self.find_manifest(submission).blob):
            raise AuthError(409, "absent", "the file is not here")
        return self.make_receipt(node, submission)

    async def open_blob(self, reader: str, submission: str) -> Any:
        self.calls.append("open")
        return await self.blobs.open(self.find_manifest(submission).blob)

    async def claim_jobs(self, validator: str, most: int = 1) -> ClaimAnswer:
        self.calls.append("claim")
        if "s1" not in self.manifests:
            return ClaimAnswer(retry_after_s=5)
        signed = self.manifests["s1"]
        job = Job(
            submission="s1",
            round=1,
            step=1,
            first=0,
            count=1,
            group_size=2,
            max_tokens=8,
            beacon=ZERO,
            version=0,
            manifest=signed.manifest,
            check_ppm=10,
            check_seed=ZERO,
            duplicates=(),
            deadline_ms=2**40,
        )
        return ClaimAnswer(jobs=(job,))

    async def post_verdict(self, validator: str, signed: SignedVerdict) -> VerdictAnswer:
        self.calls.append("verdict")
        record = VerdictRecord(
            run=RUN,
            submission=signed.verdict.submission,
            validator=validator,
            round=signed.verdict.round,
            verdict=signed.verdict.verdict,
            state=SubmissionState.ACCEPTED,
            paid=0,
            time_ms=1,
        )
        return VerdictAnswer(record=record, document=self.sign(Tag.VERDICT, record))

    async def appeal(self, signed: SignedAppeal) -> AppealAnswer:
        self.calls.append("appeal")
        return AppealAnswer(submission=signed.appeal.submission, state="open", fee=0)

    async def cut_batch(self, trainer: str, step: int) -> BatchAnswer:
        self.calls.append("cut")
        return BatchAnswer(batch=Batch(run=RUN, step=step, hash=ZERO, groups=()))

    async def get_batch(self, trainer: str, step: int) -> BatchAnswer:
        self.calls.append("batch")
        return BatchAnswer(batch=None, reason="not yet", retry_after_s=1)

    async def publish_version(self, trainer: str, signed: SignedVersion) -> VersionAnswer:
        self.calls.append("version")
        return VersionAnswer(version=signed.version.version, open_steps=(1,), finished=False)

    async def unbond(self, signed: SignedUnbond) -> UnbondAnswer:
        self.calls.append("unbond")
        return UnbondAnswer(request=signed.unbond.request, amount=5, free_ms=7)

    async def redeem(self, signed: SignedRedeem) -> RedeemAnswer:
        self.calls.append("redeem")
        asked = signed.redeem
        return RedeemAnswer(request=asked.request, state="open", amount=asked.amount, seq=3)

    async def revoke(self, revocation: bytes) -> None:
        self.calls.append("revoke")

    async def command(self, signed: SignedCommand) -> CommandAnswer:
        self.calls.append("command")
        return CommandAnswer(nonce=signed.command.nonce, seq=3)

    def read_status(self) -> Status:
        self.calls.append("status")
        return Status(
            run=RUN,
            server_time_ms=1,
            finished=False,
            stopped=False,
            steps=1,
            trained=0,
            newest_version=-1,
            open_steps=(),
            queue=0,
            nodes_live=0,
            nodes_stale=0,
            nodes_gone=0,
            waits=(),
            alarms=(),
        )

    def explain(self, submission: str) -> str:
        return f"all about {submission}"

    def read_state(self, submission: str) -> SubmissionState:
        return SubmissionState.RECEIVED

    def read_leaders(self, limit: int = 100) -> list[LeaderLine]:
        return [LeaderLine(owner=ZERO, standing=Standing.GOOD, accepted=1, rejected=0, tokens=5, earned=5)]

    def find_manifest(self, submission: str) -> Manifest:
        if submission not in self.manifests:
            raise AuthError(404, "not_found", "there is no such submission")
        return self.manifests[submission].manifest

    def make_receipt(self, node: str, submission: str) -> ReceiptAnswer:
        manifest = self.find_manifest(submission)
        receipt = Receipt(
            run=RUN,
            submission=submission,
            lease=manifest.lease,
            node=node,
            blob=manifest.blob,
            size=manifest.size,
            received_ms=1,
        )
        return ReceiptAnswer(receipt=receipt, document=self.sign(Tag.RECEIPT, receipt))

    def sign(self, tag: Tag, message: Message) -> str:
        return sign_document(self.key, tag, message.model_dump(mode="json")).decode()


class Stand:
    """The whole of it, on a port of its own."""

    def __init__(self, folder: Path, key: Key, **options: Any) -> None:
        self.folder, self.key = folder, key
        self.ledger = Ledger.open(f"sqlite:///{folder}/ledger.db", run=RUN, key=key)
        self.blobs = DiskStore(folder / "blobs", options.pop("disk", DiskLimits()))
        self.coordinator = StandIn(self.ledger, key, self.blobs)
        self.nonces = NonceBook(folder / "nonces.db")
        registry = Registry()
        # Everybody here comes from one address.
        auth = options.pop("auth", AuthLimits(address_rate=1e5, owner_rate=1e5, fresh_rate=1e5))
        api = options.pop("api", ApiLimits(read_rate=1e5, stranger_rate=1e5, all_strangers_rate=1e5))
        self.desk = Desk(
            self.coordinator,  # type: ignore[arg-type]
            gate=WorkGate(os.urandom(16), RUN, JoinRate(base_work=16)),
            nonces=self.nonces,
            registry=registry,
            limits=api,
            auth_limits=auth,
        )
        self.app = build_app(self.desk)
        self.server = Server(self.app, limits=HttpLimits(**options), registry=registry)

    @property
    def place(self) -> Place:
        host, port = self.server.address
        return parse_place(f"http://{host}:{port}")

    def sign(self, key: Key, **options: Any) -> RequestSigner:
        return RequestSigner(key, options.pop("run", RUN), options.pop("audience", self.key.public), **options)

    def client(self, key: Key, **options: Any) -> NodeClient:
        options.setdefault("asker", Asker(Patience(tries=3, first_s=0.01)))
        folder = self.folder / "nodes" / key.public[:8]
        return NodeClient(self.place, key, run=RUN, coordinator=self.key.public, folder=folder, **options)

    async def send(self, head: list[str], body: bytes = b"", source: str = "127.0.0.1") -> tuple[int, bytes]:
        """Send a request as it is, and return status and body of the answer."""
        reader, writer = await asyncio.open_connection(*self.server.address, local_addr=(source, 0))
        writer.write("\r\n".join([*head, "Host: test", "Connection: close", "", ""]).encode("latin-1") + body)
        got = await reader.read(-1)
        writer.close()
        top, _, rest = got.partition(b"\r\n\r\n")
        return int(top.split()[1]), rest

    async def close(self) -> None:
        await self.server.close()
        await self.blobs.close()
        self.nonces.close()
        self.ledger.close()


OpenStand = Callable[..., AbstractAsyncContextManager[Stand]]


@pytest.fixture
def open_stand(tmp_path: Path) -> OpenStand:
    """Opens a stand in the test's folder; again after it was closed, it is the same one restarted."""
    key = Key.generate()

    @asynccontextmanager
    async def open_one(**options: Any) -> AsyncIterator[Stand]:
        stand = Stand(tmp_path, key, **options)
        await stand.server.start()
        try:
            async with asyncio.timeout(60):
                yield stand
        finally:
            await stand.close()

    return open_one
