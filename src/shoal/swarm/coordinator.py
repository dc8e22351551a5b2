"""The coordinator: the one who decides, for a run of strangers, and writes every decision down.

    join -> lease -> commit -> upload, receipt -> claim -> verdict -> batch -> version -> next step

Invariants:
- each method that changes anything is one decision of the ledger: it happened whole and is on disk when it answers, or
  it left nothing. Called again with the same key (lease, request, statement) it answers as it did the first time;
- who calls is an argument that the wire took from a signature. Whether the caller may is checked here, in the decision;
- what a node is refused is an `AuthError` with a status, a code and a sentence;
- nothing here waits for anything but the ledger and the blob store.

A span is what one lease covers: consecutive groups of a step, given out, returned, backed up, delivered and accepted as
a whole. A group is trained at most once, for a span is accepted by one submission at a time, and in a batch for good.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, TypeVar

from shoal.errors import ConfigError
from shoal.keys import Key
from shoal.swarm import (
    batching,
    commanding,
    crediting,
    evidence,
    explain,
    judging,
    leasing,
    membership,
    queueing,
    status,
    submitting,
    sweeping,
)
from shoal.swarm.beacon import BeaconChain
from shoal.swarm.blobs.base import BlobReader, BlobStore, FullError
from shoal.swarm.clock import LifeSign, read_clock
from shoal.swarm.edition import RULES, check_edition
from shoal.swarm.event import Event
from shoal.swarm.faults import reach
from shoal.swarm.ledger import Draft, Ledger
from shoal.swarm.messages import (
    AppealAnswer,
    BatchAnswer,
    ClaimAnswer,
    CommandAnswer,
    CommitAnswer,
    EvidenceAnswer,
    Heartbeat,
    HeartbeatAnswer,
    LeaderLine,
    LeaseAnswer,
    MemberInfo,
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
    Status,
    SubmissionState,
    UnbondAnswer,
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
from shoal.swarm.writer import WriterStoppedError

T = TypeVar("T")

DECIDE_S, STORE_S = 10, 60
"""after which a decision, or a question to the store, is overdue in the status"""

_CHORES: tuple[Callable[[Turn], bool], ...] = (
    leasing.expire_leases,
    submitting.expire_uploads,
    queueing.expire_claims,
    judging.expire_opinions,
    crediting.release_holds,
    crediting.release_bonds,
    membership.lift_limits,
)


def open_run(
    url: str,
    *,
    run: str,
    key: Key,
    operator: str,
    secret: bytes,
    params: RunParams,
    recipe: str = "",
    clock: Callable[[], int] = read_clock,
    linger_s: float | None = None,
) -> Ledger:
    """The ledger of a run with all its tables; a new one gets these parameters, an old one keeps its own."""
    check_edition(url)
    genesis = {
        "beacon": BeaconChain(secret, params.steps).tip,
        "operator": operator,
        "params": dump_params(params),
        "recipe": recipe,
        "rules": RULES,
    }
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
        wall: Callable[[], int] | None = None,
        life: LifeSign | None = None,
    ) -> None:
        """`clock` is that of the ledger; `wall` is the machine's, if that is another one."""
        self._life = life or LifeSign(None)
        self.ledger, self.blobs = ledger, blobs
        self._clock, self._wall = lambda: clock() + ledger.ahead_ms, wall or clock
        with ledger.read() as connection:
            state = read_run(connection)
            self.mirror = Mirror(connection, state)
        chain = BeaconChain(secret, state.params.steps)
        if chain.tip != state.beacon:
            raise ConfigError("the beacon secret is not the one that this run's genesis was made with")
        self._setting = Setting(run, key, chain, self.mirror)
        self.waits = WaitBook(self._clock)
        self._gate = sweeping.BlobGate()
        self._swept_ms = 0
        self._listener: Callable[[Sequence[Event]], None] = lambda _: None

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
        await self._decide(partial(membership.record_start, alive_ms=self._life.read()))

    async def stop(self) -> None:
        """Record that the coordinator goes away, before its ledger is closed."""
        with suppress(WriterStoppedError):  # then it is away already, since the last that was written
            await self._decide(membership.record_stop)

    async def tick(self) -> None:
        """Do what time has come for: leases, uploads, claims and opinions that ended, credit, standing, files."""
        for work in _CHORES:
            while await self._decide(work):
                pass
        self._life.write(self._clock())
        if self._clock() - self._swept_ms >= 1000 * sweeping.EVERY_S:
            self._swept_ms = self._clock()
            while await self._drop_blobs():
                pass

    def listen(self, listener: Callable[[Sequence[Event]], None]) -> None:
        """Tell one listener of all events that are on disk; it is called in the ledger's thread and must not wait."""
        self._listener = listener

    # Membership

    def find_member(self, node: str) -> Member | None:
        """What `Authenticator` asks for each request; from memory, at once."""
        return self.mirror.find_member(node)

    def find_owner(self, key: str) -> str | None:
        """The owner that a key speaks for, banned or not; from memory, at once."""
        return self.mirror.find_owner(key)

    async def join(self, node: str, delegation: bytes) -> MemberInfo:
        """Take in a node that showed its stamp of work, or renew its owner's delegation."""
        return await self._decide(partial(membership.join_node, node=node, document=delegation))

    async def revoke(self, revocation: bytes) -> None:
        """Record an owner's revocation; whoever brings it."""
        await self._decide(partial(membership.revoke_node, document=revocation))

    async def leave(self, node: str) -> None:
        """Let a node go: its leases are as if returned."""
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
        return await self._decide(partial(leasing.grant_lease, node=node, request_key=request_key), "lease")

    async def return_lease(self, node: str, lease: str) -> ReturnAnswer:
        """Take a lease back before its deadline."""
        return await self._decide(partial(leasing.return_lease, node=node, lease_id=lease))

    # Submissions

    async def commit_submission(self, node: str, signed: SignedManifest) -> CommitAnswer:
        """Record what a node will upload."""
        return await self._decide(partial(submitting.commit_manifest, node=node, signed=signed), "commit")

    async def put_blob(self, node: str, submission: str, chunks: AsyncIterator[bytes]) -> ReceiptAnswer:
        """Take the file of a submission and record its receipt. `BlobError` for other bytes than announced."""
        plan = await self._decide(partial(submitting.plan_upload, node=node, submission=submission), "upload")
        if isinstance(plan, ReceiptAnswer):
            return plan
        with self._gate.upload(plan.blob):
            try:
                with self.waits.wait("upload", owner=submission, for_whom=f"its file from node {node[:8]}"):
                    await self.blobs.put(plan.blob, plan.size, chunks)
            except FullError:
                self.mirror.full_ms = self.mirror.full_ms or self._clock()
                raise
            self.mirror.full_ms = 0
            return await self._decide(partial(submitting.record_receipt, node=node, submission=submission), "receipt")

    async def receive(self, node: str, submission: str) -> ReceiptAnswer:
        """The receipt of a submission; for a file that went past us into the store, recorded now."""
        plan = await self._decide(partial(submitting.plan_upload, node=node, submission=submission, past_us=True))
        if isinstance(plan, ReceiptAnswer):
            return plan
        with self._gate.upload(plan.blob):
            with self._await_store(submission):
                is_there = await self.blobs.has(plan.blob)
            if not is_there:
                raise submitting.refuse_absent()
            return await self._decide(partial(submitting.record_receipt, node=node, submission=submission), "receipt")

    async def open_blob(self, reader: str, submission: str) -> BlobReader:
        """The file of a submission, for a validator with a claim on it or a trainer; for nobody else."""
        name = await self._decide(partial(judging.allow_reading, node=reader, submission=submission))
        with self._await_store(submission):
            return await self.blobs.open(name)

    # Validation

    async def claim_jobs(self, validator: str, most: int = 1) -> ClaimAnswer:
        """Give a validator submissions to judge; the claims it holds already, if it has any."""
        return await self._decide(partial(queueing.claim_jobs, node=validator, most=most), "claim")

    async def post_verdict(self, validator: str, signed: SignedVerdict) -> VerdictAnswer:
        """Record a verdict, with all that follows from it."""
        return await self._decide(partial(judging.post_verdict, node=validator, signed=signed), "verdict")

    async def appeal(self, signed: SignedAppeal) -> AppealAnswer:
        """Record an owner's appeal; whoever brings it."""
        return await self._decide(partial(judging.open_appeal, signed=signed))

    async def show_evidence(self, key: str, submission: str) -> EvidenceAnswer:
        """By what a submission was judged, once it is decided; for its owner, or its owner's nodes, and nobody else."""
        return await self._decide(partial(evidence.show_evidence, key=key, submission=submission))

    async def open_evidence(self, key: str, submission: str) -> BlobReader:
        """The file of it, for the same."""
        name = await self._decide(partial(evidence.allow_evidence, key=key, submission=submission))
        with self._await_store(submission):
            return await self.blobs.open(name)

    # Batches and versions

    async def cut_batch(self, trainer: str, step: int) -> BatchAnswer:
        """Fix what a step trains on, once; or say what is missing."""
        return await self._decide(partial(batching.cut_batch, node=trainer, step=step), "cut")

    async def get_batch(self, trainer: str, step: int) -> BatchAnswer:
        """A batch that was cut."""
        return await self._decide(partial(batching.show_batch, node=trainer, step=step))

    async def publish_version(self, trainer: str, signed: SignedVersion) -> VersionAnswer:
        """Record that a version is out, and open what it opens."""
        return await self._decide(partial(batching.publish_version, node=trainer, signed=signed), "publish")

    # Credit, the operator, and what all can see

    async def unbond(self, signed: SignedUnbond) -> UnbondAnswer:
        """Begin to give an owner's bond back; whoever brings the request."""
        return await self._decide(partial(crediting.unbond_stake, signed=signed))

    async def redeem(self, signed: SignedRedeem) -> RedeemAnswer:
        """Take credit out of what an owner has free, to be paid out; whoever brings the request."""
        return await self._decide(partial(crediting.request_redeem, signed=signed), "redeem")

    async def command(self, signed: SignedCommand) -> CommandAnswer:
        """Do what the operator commands."""
        return await self._decide(partial(commanding.run_command, signed=signed))

    def read_status(self) -> Status:
        """The run at a glance, and who waits for whom. Reads the database: call it in a thread."""
        with self.ledger.read() as connection:
            now_ms = self._clock()
            return status.build_status(connection, self._setting, self.waits, now_ms, now_ms - self._wall())

    def explain(self, submission: str) -> str:
        """All that is known of a submission, in plain words. Reads the database: call it in a thread."""
        with self.ledger.read() as connection:
            return explain.explain_submission(connection, submission)

    def read_state(self, submission: str) -> SubmissionState:
        """Where a submission is; ConfigError if there is none. Reads the database: call it in a thread."""
        with self.ledger.read() as connection:
            return explain.read_state(connection, submission)

    def read_leaders(self, limit: int = 100) -> list[LeaderLine]:
        """Owners by accepted tokens. Reads the database: call it in a thread."""
        with self.ledger.read() as connection:
            return status.read_leaders(connection, limit)

    async def _drop_blobs(self) -> bool:
        """Remove files that nobody needs; whether there may be more."""
        found = await self._decide(sweeping.find_unneeded)
        with self._gate.removal(found) as taken:
            blobs = await self._decide(partial(sweeping.confirm_unneeded, blobs=taken)) if taken else []
            if not blobs:
                return False
            reach("drop", 1)
            for blob in blobs:
                await self.blobs.remove(blob)
            reach("drop", 2)
            await self._decide(partial(sweeping.record_drop, blobs=blobs))
            reach("drop", 3)
        return len(found) == sweeping.MAX_AT_ONCE

    def _await_store(self, submission: str) -> AbstractContextManager[object]:
        """Enter a wait for the store of files."""
        return self.waits.wait("store", owner=submission, for_whom="the store of files", timeout_s=STORE_S)

    async def _decide(self, decide: Callable[[Turn], T], name: str = "") -> T:
        """Run a decision; what it appended reaches the mirror once it is on disk, also if the caller has gone."""
        reach(name, 1)
        future = self.ledger.submit(partial(self._run_turn, decide=decide, name=name))
        future.add_done_callback(self._note_events)
        what = getattr(decide, "func", decide).__name__
        with self.waits.wait("decision", owner=f"decision {what}", for_whom="the ledger", timeout_s=DECIDE_S):
            answer = (await asyncio.wrap_future(future))[0]
        reach(name, 3)
        return answer

    def _run_turn(self, draft: Draft, *, decide: Callable[[Turn], T], name: str) -> tuple[T, list[Event]]:
        turn = Turn(draft, self._setting)
        answer = decide(turn)
        reach(name, 2)
        return answer, turn.events

    def _note_events(self, future: "Future[tuple[Any, list[Event]]]") -> None:
        """In the ledger's thread, where an error would be logged and forgotten, and memory be one event short."""
        if future.cancelled() or future.exception() is not None:
            return
        events = future.result()[1]
        try:
            self.mirror.take_events(events)
            if events:
                self._listener(events)
        except BaseException as error:
            self.ledger.stop(f"an event could not be followed ({error!r:.200})")
            raise
