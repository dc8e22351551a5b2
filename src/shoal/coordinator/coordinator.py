"""The coordinator: makes all decisions of a run and records each in the ledger.

    join -> lease -> commit -> upload, receipt -> claim -> verdict -> batch -> version -> next step

Invariants:
- each method that changes anything is one decision of the ledger: when it returns, the decision is complete and on
  disk; when it raises, nothing is stored. Repeated with the same key (lease, request, statement) it gives the same
  answer;
- the caller is an argument that the server took from a verified signature. Its permission is checked here, in the
  decision;
- a refusal is an `ApiError` with a status, a code and a sentence;
- nothing here waits for anything except the ledger and the blob store.

A lease covers a range of consecutive groups of a step, which is granted, returned, backed up, delivered and accepted as
a whole. A group is trained at most once: a range is accepted by one submission at a time, and permanently once it is in
a batch.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from shoal.coordinator import explain, status
from shoal.coordinator.blobs.base import BlobReader, BlobStore, FullError
from shoal.coordinator.cache import RunCache
from shoal.coordinator.decide import admin, batches, claims, credit, evidence, leases, membership, submissions, verdicts
from shoal.coordinator.decide.context import Decision, RunContext
from shoal.coordinator.state import PROJECTIONS
from shoal.coordinator.state.run import read_run
from shoal.coordinator.state.submissions import SubmissionRow
from shoal.errors import ConfigError
from shoal.identity.authenticator import Member
from shoal.identity.keys import Key
from shoal.ledger.event import Event
from shoal.ledger.ledger import LINGER_S, Ledger, LedgerTransaction, WriterStoppedError, reach
from shoal.ledger.schema import RULES, check_rules_version
from shoal.net.api_error import ApiError
from shoal.protocol.beacon import BeaconChain
from shoal.protocol.messages import (
    AppealAnswer,
    Heartbeat,
    HeartbeatAnswer,
    KeyAnswer,
    LeaderLine,
    OwnerAccount,
    ReceiptAnswer,
    SignedAppeal,
    Status,
    SubmissionState,
)
from shoal.protocol.params import RunParams, dump_params
from shoal.util.clock import LastAliveFile, read_clock
from shoal.util.waits import WaitTable

P = ParamSpec("P")
T = TypeVar("T")

DECIDE_S, STORE_S = 10, 60
"""time after which a decision, or a request to the store, is overdue in the status"""

_CRASH_POINTS: dict[Callable[..., Any], str] = {
    leases.grant_lease: "lease",
    submissions.commit_manifest: "commit",
    submissions.plan_upload: "upload",
    submissions.record_receipt: "receipt",
    claims.claim_jobs: "claim",
    verdicts.post_verdict: "verdict",
    batches.cut_batch: "cut",
    batches.publish_version: "publish",
    credit.request_redeem: "redeem",
}
"""decisions in which a test may end the process, see `ledger.ledger`"""
_CHORES: tuple[Callable[[Decision], bool], ...] = (
    leases.expire_leases,
    submissions.expire_uploads,
    claims.expire_claims,
    verdicts.expire_opinions,
    credit.release_holds,
    credit.release_bonds,
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
    linger_s: float = LINGER_S,
) -> Ledger:
    """Open the ledger of a run with all its tables; a new one gets these parameters, an existing one keeps its own."""
    check_rules_version(url)
    genesis = {
        "beacon": BeaconChain(secret, params.steps).tip,
        "operator": operator,
        "params": dump_params(params),
        "recipe": recipe,
        "rules": RULES,
    }
    return Ledger.open(url, run=run, key=key, genesis=genesis, projections=PROJECTIONS, clock=clock, linger_s=linger_s)


def _as_method(
    decide: Callable[Concatenate[Decision, P], T],
) -> "Callable[Concatenate[Coordinator, P], Coroutine[Any, Any, T]]":
    """A method of the coordinator that runs a decision."""
    return lambda self, /, *args, **kwargs: self._decide(decide, *args, **kwargs)


class Coordinator:
    """A run's decisions. Call `start` first, then `tick` about every second, in the event loop that serves requests."""

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
        life: LastAliveFile | None = None,
        max_uploads: int = submissions.MAX_UPLOADS,
    ) -> None:
        """`clock` is the ledger's clock; `wall` is the system clock, if that is a different one. `max_uploads` is the
        number of concurrent uploads that the store takes."""
        self._life = life or LastAliveFile(None)
        self.ledger, self.blobs = ledger, blobs
        self._clock, self._wall = lambda: clock() + ledger.ahead_ms, wall or clock
        with ledger.read() as connection:
            state = read_run(connection)
            self.cache = RunCache(connection, state)
        chain = BeaconChain(secret, state.params.steps)
        if chain.tip != state.beacon:
            raise ConfigError("wrong beacon secret: it does not match this run's genesis")
        self._context = RunContext(run, key, chain, self.cache)
        self.waits = WaitTable(self._clock)
        self._gate = submissions.BlobGate(max_uploads)
        self._swept_ms = 0
        self._listener: Callable[[Sequence[Event]], None] = lambda _: None

    @property
    def run(self) -> str:
        return self._context.run

    @property
    def public(self) -> str:
        """The coordinator's public key."""
        return self.key.public

    @property
    def key(self) -> Key:
        """The key that the coordinator signs leases, receipts, heads and answers with."""
        return self._context.key

    @property
    def params(self) -> RunParams:
        return self.cache.params

    async def start(self) -> None:
        """Record that the coordinator is up again; deadlines move by its downtime."""
        await self._decide(membership.record_start, alive_ms=self._life.read())

    async def stop(self) -> None:
        """Record that the coordinator shuts down, before its ledger is closed."""
        with suppress(WriterStoppedError):  # then its downtime already began with the last event
            await self._decide(membership.record_stop)

    async def tick(self) -> None:
        """Process everything whose time has come: leases, uploads, claims and opinions, credit, standing, files."""
        for work in _CHORES:
            while await self._decide(work):
                pass
        self._life.write(self._clock())
        if self._clock() - self._swept_ms >= 1000 * submissions.CLEANUP_EVERY_S:
            self._swept_ms = self._clock()
            while await self._drop_blobs():
                pass

    def listen(self, listener: Callable[[Sequence[Event]], None]) -> None:
        """Report all events on disk to one listener; called in the ledger's thread, so it must not block."""
        self._listener = listener

    # Membership

    def find_member(self, node: str) -> Member | None:
        """Membership check of `Authenticator` for each request; from memory, does not block."""
        return self.cache.find_member(node)

    def find_owner(self, key: str) -> str | None:
        """The owner that a key belongs to, banned or not; from memory, does not block."""
        return self.cache.find_owner(key)

    def knows_owner(self, key: str) -> bool:
        """Whether a key is that of an owner, banned or not; from memory, does not block."""
        return key in self.cache.standings

    def find_payer(self, node: str) -> str:
        """The owner of record that a node belongs to; empty if there is none. From memory."""
        member = self.cache.find_member(node)
        return member.owner if member is not None and self.cache.has_record(member.owner) else ""

    join = _as_method(membership.join_node)
    """Add a node that has done its proof of work, or renew its owner's delegation."""
    revoke = _as_method(membership.revoke_node)
    """Record an owner's revocation; anyone may submit it."""
    leave = _as_method(membership.leave_node)
    """Remove a node: its leases are treated as returned."""

    def heartbeat(self, node: str, beat: Heartbeat) -> HeartbeatAnswer:
        """Record that a node is alive. Not in the ledger; in memory, does not block."""
        return self.cache.answer_heartbeat(node, beat, self._clock(), self.ledger.head_text)

    # Leases

    grant_lease = _as_method(leases.grant_lease)
    """Grant a node work, or return the reason why not. The same request key gets the same lease again."""
    return_lease = _as_method(leases.return_lease)
    """Take a lease back before its deadline."""

    # Submissions

    commit_submission = _as_method(submissions.commit_manifest)
    """Record what a node will upload."""

    async def put_blob(self, node: str, submission: str, chunks: AsyncIterator[bytes]) -> ReceiptAnswer:
        """Store the file of a submission and record its receipt. `BlobError` if the bytes differ from the manifest."""
        plan = await self._decide(submissions.plan_upload, node=node, submission=submission)
        if isinstance(plan, ReceiptAnswer):
            return plan
        with self._gate.upload(plan, has_record=self.cache.has_record(plan.owner)):
            try:
                with self.waits.wait("upload", owner=submission, waiting_for=f"its file from node {node[:8]}"):
                    await self.blobs.put(plan.blob, plan.size, chunks)
            except FullError:
                self.cache.full_ms = self.cache.full_ms or self._clock()
                raise
            self.cache.full_ms = 0
            return await self._record_receipt(plan)

    async def receive(self, node: str, submission: str) -> ReceiptAnswer:
        """The receipt of a submission; for a file uploaded directly to the store, it is recorded now."""
        plan = await self._decide(submissions.plan_upload, node=node, submission=submission, past_us=True)
        if isinstance(plan, ReceiptAnswer):
            return plan
        with self._gate.upload(plan, has_record=self.cache.has_record(plan.owner)):
            with self._await_store(submission):
                is_there = await self.blobs.has(plan.blob)
            if not is_there:
                raise ApiError(409, "no_file", "the file has not arrived; upload it first", retry_after_s=1)
            return await self._record_receipt(plan)

    async def _record_receipt(self, row: SubmissionRow) -> ReceiptAnswer:
        """Record that a file has arrived. A file that came too late is deleted, if its room was released before."""
        try:
            return await self._decide(submissions.record_receipt, node=row.node, submission=row.submission)
        except ApiError:
            for blob in await self._decide(submissions.confirm_unneeded, blobs=[row.blob]):
                await self.blobs.remove(blob)
            raise

    async def open_blob(self, reader: str, submission: str) -> BlobReader:
        """The file of a submission, only for a validator with a claim on it or a trainer."""
        name = await self._decide(verdicts.allow_reading, node=reader, submission=submission)
        with self._await_store(submission):
            return await self.blobs.open(name)

    # Validation

    claim_jobs = _as_method(claims.claim_jobs)
    """Assign submissions to a validator; returns its current claims, if it has any."""
    post_verdict = _as_method(verdicts.post_verdict)
    """Record a verdict, with all its consequences."""

    async def appeal(self, signed: SignedAppeal) -> AppealAnswer:
        """Record an owner's appeal; anyone may submit it."""
        return await self._decide(verdicts.open_appeal, signed, removing=self._gate.removals)

    show_evidence = _as_method(evidence.show_evidence)
    """The basis on which a decided submission was judged; only for its owner and the owner's nodes."""

    async def open_evidence(self, key: str, submission: str) -> BlobReader:
        """The file of a decided submission; only for its owner and the owner's nodes."""
        name = await self._decide(evidence.allow_evidence, key=key, submission=submission)
        with self._await_store(submission):
            return await self.blobs.open(name)

    # Batches and versions

    cut_batch = _as_method(batches.cut_batch)
    """Fix the batch of a step, once; or report what is missing."""
    get_batch = _as_method(batches.show_batch)
    """A batch that was cut."""
    publish_version = _as_method(batches.publish_version)
    """Record a published version, and open the steps that it opens."""

    # Credit, the operator, and public data

    unbond = _as_method(credit.unbond_stake)
    """Start returning an owner's bond; anyone may submit the request."""
    redeem = _as_method(credit.request_redeem)
    """Reserve an owner's available credit for a payout; anyone may submit the request."""
    command = _as_method(admin.run_command)
    """Execute an operator's command."""

    def read_status(self) -> Status:
        """Overview of the run, and who waits for whom. Reads the database: call it in a thread."""
        with self.ledger.read() as connection:
            now_ms = self._clock()
            return status.build_status(connection, self._context, self.waits, now_ms, now_ms - self._wall())

    def explain(self, submission: str) -> str:
        """Everything known about a submission, as text. Reads the database: call it in a thread."""
        with self.ledger.read() as connection:
            return explain.explain_submission(connection, submission, now_ms=self._clock())

    def list_findings(self, submission: str) -> list[str]:
        """Every finding about a submission, one line each. Reads the database: call it in a thread."""
        with self.ledger.read() as connection:
            return explain.list_findings(connection, submission)

    def read_state(self, submission: str) -> SubmissionState:
        """State of a submission; ConfigError if it does not exist. Reads the database: call it in a thread."""
        with self.ledger.read() as connection:
            return explain.read_state(connection, submission)

    def find_key(self, prefix: str) -> KeyAnswer:
        """The owners whose key, or whose node's key, begins with a prefix. Reads the database: call it in a thread."""
        with self.ledger.read() as connection:
            return status.find_key(connection, prefix)

    def read_leaders(self, limit: int = 100) -> list[LeaderLine]:
        """Owners by accepted tokens. Reads the database: call it in a thread."""
        with self.ledger.read() as connection:
            return status.read_leaders(connection, limit)

    def read_account(self, owner: str) -> OwnerAccount | None:
        """The record and the credit of an owner. Reads the database: call it in a thread."""
        with self.ledger.read() as connection:
            return status.read_account(connection, owner)

    async def _drop_blobs(self) -> bool:
        """Delete files that are no longer needed; return whether there may be more."""
        found = await self._decide(submissions.find_unneeded)
        with self._gate.removal(found) as taken:
            blobs = await self._decide(submissions.confirm_unneeded, blobs=taken) if taken else []
            if not blobs:
                return False
            reach("drop", 1)
            for blob in blobs:
                await self.blobs.remove(blob)
            reach("drop", 2)
            await self._decide(submissions.record_drop, blobs=blobs)
            reach("drop", 3)
        return len(found) == submissions.MAX_DROPPED

    def _await_store(self, submission: str) -> AbstractContextManager[object]:
        """Register a wait for the blob store."""
        return self.waits.wait("store", owner=submission, waiting_for="the blob store", timeout_s=STORE_S)

    async def _decide(self, decide: Callable[Concatenate[Decision, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a decision; its events reach the cache once they are on disk, even if the caller is gone."""
        crash_point = _CRASH_POINTS.get(decide, "")

        def run(transaction: LedgerTransaction) -> tuple[T, list[Event]]:
            decision = Decision(transaction, self._context)
            answer = decide(decision, *args, **kwargs)
            reach(crash_point, 2)
            return answer, decision.events

        reach(crash_point, 1)
        future = self.ledger.submit(run)
        future.add_done_callback(self._note_events)
        with self.waits.wait(
            "decision", owner=f"decision {decide.__name__}", waiting_for="the ledger", timeout_s=DECIDE_S
        ):
            answer = (await asyncio.wrap_future(future))[0]
        reach(crash_point, 3)
        return answer

    def _note_events(self, future: "Future[tuple[Any, list[Event]]]") -> None:
        """Runs in the ledger's thread, where an exception would only be logged and the cache would miss an event."""
        if future.cancelled() or future.exception() is not None:
            return
        events = future.result()[1]
        try:
            self.cache.take_events(events)
            if events:
                self._listener(events)
        except BaseException as error:
            self.ledger.stop(f"applying an event to the cache failed ({error!r:.200})")
            raise
