"""The coordinator: the one who decides, for a run of strangers, and writes every decision down.

    join -> lease -> commit -> upload, receipt -> claim -> verdict -> batch -> version -> next step

Invariants:
- each method that changes anything is one decision of the ledger: it happened whole and is on disk when it answers, or
  it left nothing. Called again with the same key (lease, request, statement) it answers as it did the first time;
- who calls is an argument that the wire took from a signature. Whether the caller may is checked here, in the decision;
- what a node is refused is an `AuthError` with a status, a code and a sentence;
- nothing here waits for anything but the ledger and the blob store.

A span is what one lease covers: consecutive groups of a step, given out, returned, backed up, delivered and accepted as
a whole. A group is trained at most once, for a span is accepted at most once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from shoal.errors import ConfigError
from shoal.keys import Key
from shoal.swarm import (
    batching,
    commanding,
    crediting,
    explain,
    judging,
    leasing,
    membership,
    queueing,
    status,
    submitting,
)
from shoal.swarm.beacon import BeaconChain
from shoal.swarm.blobs.base import BlobReader, BlobStore
from shoal.swarm.event import Event
from shoal.swarm.ledger import Draft, Ledger, read_clock
from shoal.swarm.messages import (
    AppealAnswer,
    BatchAnswer,
    ClaimAnswer,
    CommandAnswer,
    CommitAnswer,
    Heartbeat,
    HeartbeatAnswer,
    LeaderLine,
    LeaseAnswer,
    MemberInfo,
    ReceiptAnswer,
    ReturnAnswer,
    SignedAppeal,
    SignedCommand,
    SignedManifest,
    SignedVerdict,
    SignedVersion,
    Status,
    VerdictAnswer,
    VersionAnswer,
)
from shoal.swarm.mirror import Mirror
from shoal.swarm.params import RunParams, dump_params
from shoal.swarm.server_auth import Member
from shoal.swarm.state import PROJECTIONS
from shoal.swarm.state.run import read_run
from shoal.swarm.turn import Setting, Turn
from shoal.swarm.waits import WaitBook

T = TypeVar("T")


def open_run(
    url: str,
    *,
    run: str,
    key: Key,
    operator: str,
    secret: bytes,
    params: RunParams,
    clock: Callable[[], int] = read_clock,
    linger_s: float | None = None,
) -> Ledger:
    """The ledger of a run with all its tables; a new one gets these parameters, an old one keeps its own."""
    genesis = {"beacon": BeaconChain(secret, params.steps).tip, "operator": operator, "params": dump_params(params)}
    extra = {} if linger_s is None else {"linger_s": linger_s}
    return Ledger.open(url, run=run, key=key, genesis=genesis, projections=PROJECTIONS, clock=clock, **extra)


class Coordinator:
    """A run's decisions. `start` first, `tick` every second or so, from the event loop that serves requests."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        run: str,
        key: Key,
        secret: bytes,
        blobs: BlobStore,
        clock: Callable[[], int] = read_clock,
    ) -> None:
        self.ledger, self.blobs = ledger, blobs
        self._clock = clock
        with ledger.read() as connection:
            state = read_run(connection)
            self.mirror = Mirror(connection, state)
        chain = BeaconChain(secret, state.params.steps)
        if chain.tip != state.beacon:
            raise ConfigError("the beacon secret is not the one that this run's genesis was made with")
        self._setting = Setting(run, key, chain, self.mirror)
        self.waits = WaitBook(clock)

    @property
    def run(self) -> str:
        return self._setting.run

    @property
    def public(self) -> str:
        """The coordinator's public key."""
        return self._setting.key.public

    @property
    def params(self) -> RunParams:
        return self.mirror.params

    async def start(self) -> None:
        """Record that the coordinator is up again; deadlines move by the time it was away."""
        await self._decide(membership.record_start)

    async def tick(self) -> None:
        """Do what time has come for: leases, uploads, claims and opinions that ended, credit, standing."""
        for work in (leasing.expire_leases, submitting.expire_uploads, judging.expire_opinions):
            while await self._decide(work):
                pass
        for work in (crediting.release_holds, crediting.release_bonds, membership.lift_limits):
            while await self._decide(work):
                pass

    # Membership

    def find_member(self, node: str) -> Member | None:
        """What `Authenticator` asks for each request; from memory, at once."""
        return self.mirror.find_member(node)

    async def join(self, node: str, delegation: bytes) -> MemberInfo:
        """Take in a node that showed its stamp of work, or renew its owner's delegation."""
        return await self._decide(partial(membership.join_node, node=node, document=delegation))

    async def revoke(self, revocation: bytes) -> None:
        """Record an owner's revocation; whoever brings it."""
        await self._decide(partial(membership.revoke_node, document=revocation))

    async def leave(self, node: str) -> None:
        """Let a node go: its leases are returned without blame."""
        await self._decide(partial(membership.leave_node, node=node))

    def heartbeat(self, node: str, beat: Heartbeat) -> HeartbeatAnswer:
        """Note that a node lives. Not in the ledger; from memory, at once."""
        head = self.ledger.head
        return self.mirror.answer_heartbeat(
            node, beat, self._clock(), None if head is None else head.to_bytes().decode()
        )

    # Leases

    async def grant_lease(self, node: str, request_key: str) -> LeaseAnswer:
        """Give a node work, or say why not. The same request key again gets the same lease."""
        return await self._decide(partial(leasing.grant_lease, node=node, request_key=request_key))

    async def return_lease(self, node: str, lease: str) -> ReturnAnswer:
        """Take a lease back before its deadline."""
        return await self._decide(partial(leasing.return_lease, node=node, lease_id=lease))

    # Submissions

    async def commit_submission(self, node: str, signed: SignedManifest) -> CommitAnswer:
        """Record what a node will upload."""
        return await self._decide(partial(submitting.commit_manifest, node=node, signed=signed))

    async def put_blob(self, node: str, submission: str, chunks: AsyncIterator[bytes]) -> ReceiptAnswer:
        """Take the file of a submission and record its receipt. `BlobError` for other bytes than announced."""
        plan = await self._decide(partial(submitting.plan_upload, node=node, submission=submission))
        if isinstance(plan, ReceiptAnswer):
            return plan
        await self.blobs.put(plan.blob, plan.size, chunks)
        return await self._decide(partial(submitting.record_receipt, node=node, submission=submission))

    async def receive(self, node: str, submission: str) -> ReceiptAnswer:
        """The receipt of a submission; for a file that went past us into the store, recorded now."""
        plan = await self._decide(partial(submitting.plan_upload, node=node, submission=submission, past_us=True))
        if isinstance(plan, ReceiptAnswer):
            return plan
        if not await self.blobs.has(plan.blob):
            raise submitting.refuse_absent()
        return await self._decide(partial(submitting.record_receipt, node=node, submission=submission))

    async def open_blob(self, reader: str, submission: str) -> BlobReader:
        """The file of a submission, for a validator with a claim on it or a trainer; for nobody else."""
        name = await self._decide(partial(judging.allow_reading, node=reader, submission=submission))
        return await self.blobs.open(name)

    # Validation

    async def claim_job(self, validator: str) -> ClaimAnswer:
        """Give a validator a submission to judge; the claim it holds already, if it has one."""
        return await self._decide(partial(queueing.claim_job, node=validator))

    async def post_verdict(self, validator: str, signed: SignedVerdict) -> VerdictAnswer:
        """Record a verdict, with all that follows from it."""
        return await self._decide(partial(judging.post_verdict, node=validator, signed=signed))

    async def appeal(self, signed: SignedAppeal) -> AppealAnswer:
        """Record an owner's appeal; whoever brings it."""
        return await self._decide(partial(judging.open_appeal, signed=signed))

    # Batches and versions

    async def cut_batch(self, trainer: str, step: int) -> BatchAnswer:
        """Fix what a step trains on, once; or say what is missing."""
        return await self._decide(partial(batching.cut_batch, node=trainer, step=step))

    async def get_batch(self, trainer: str, step: int) -> BatchAnswer:
        """A batch that was cut."""
        return await self._decide(partial(batching.show_batch, node=trainer, step=step))

    async def publish_version(self, trainer: str, signed: SignedVersion) -> VersionAnswer:
        """Record that a version is out, and open what it opens."""
        return await self._decide(partial(batching.publish_version, node=trainer, signed=signed))

    # Credit, the operator, and what all can see

    async def unbond(self, node: str) -> int:
        """Begin to give an owner's bond back; returns when it is free, in ms."""
        return await self._decide(partial(crediting.unbond_stake, node=node))

    async def command(self, signed: SignedCommand) -> CommandAnswer:
        """Do what the operator commands."""
        return await self._decide(partial(commanding.run_command, signed=signed))

    def read_status(self) -> Status:
        """The run at a glance, and who waits for whom. Reads the database: call it in a thread."""
        with self.ledger.read() as connection:
            return status.build_status(connection, self._setting, self.waits, self._clock())

    def explain(self, submission: str) -> str:
        """All that is known of a submission, in plain words. Reads the database: call it in a thread."""
        with self.ledger.read() as connection:
            return explain.explain_submission(connection, submission)

    def read_leaders(self, limit: int = 100) -> list[LeaderLine]:
        """Owners by accepted tokens. Reads the database: call it in a thread."""
        with self.ledger.read() as connection:
            return status.read_leaders(connection, limit)

    async def _decide(self, decide: Callable[[Turn], T]) -> T:
        """Run a decision; what it appended reaches the mirror once it is on disk, also if the caller has gone."""
        future = self.ledger.submit(partial(self._run_turn, decide=decide))
        future.add_done_callback(self._note_events)
        return (await asyncio.wrap_future(future))[0]

    def _run_turn(self, draft: Draft, *, decide: Callable[[Turn], T]) -> tuple[T, list[Event]]:
        turn = Turn(draft, self._setting)
        return decide(turn), turn.events

    def _note_events(self, future: "Future[tuple[Any, list[Event]]]") -> None:
        if not future.cancelled() and future.exception() is None:
            self.mirror.take_events(future.result()[1])
