"""Scripted attacks: identities, honest work and raw requests against a running coordinator, and its responses.

    async with open_attack_session(url, folder) as session:
        await run_script(session, "late")                 # declared in shoal.redteam.attacks.leases
    session.owners, session.evidence                      # owners to look up in the ledger, and the responses

Invariants:
- it only attacks a coordinator on this machine, unless the caller explicitly allows others;
- everything sent to the coordinator is counted before it is sent, and never exceeds the budget;
- all keys that it acts with belong to `owners`, or to the honest probe, which takes no part in the attack;
- keys are kept in memory and clients are closed at the end: nothing outlives the session;
- the code of a refusal is read from the response itself: a script does not judge itself.

This module imports no torch; the engine is loaded when the first work is requested.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.errors import ConfigError, UnreachableError
from shoal.identity.delegation import Grant, Scope, sign_delegation
from shoal.identity.keys import Key
from shoal.identity.signer import RequestSigner
from shoal.net.client import Endpoint, HttpResponse, parse_endpoint
from shoal.net.retry import RefusedError, RetryingClient, RetryPolicy, read_refusal
from shoal.net.sockets import is_loopback
from shoal.node.client import NodeClient
from shoal.node.identity import DAY_MS, MAX_LEASES, Identity
from shoal.node.known_run import find_run
from shoal.node.recipe import fetch_recipe
from shoal.node.session import Role, Session
from shoal.protocol.descriptor import Descriptor
from shoal.protocol.messages import CommitAnswer, Heartbeat, Lease, LeaseAnswer, ReceiptAnswer
from shoal.protocol.params import RunParams
from shoal.recipe import Recipe
from shoal.redteam import raw_requests
from shoal.redteam.campaign import AttackAttempt
from shoal.redteam.raw_requests import Budget, BudgetError
from shoal.redteam.registry import find_attack
from shoal.util.clock import read_clock
from shoal.util.files import write_atomic
from shoal.util.spans import SpanLog
from shoal.util.waits import RoleWaits
from shoal.worker.orders import WorkLimits, take_order

if TYPE_CHECKING:
    from shoal.redteam.workers import HonestEngine
    from shoal.worker.behaviour import PendingSubmission

logger = logging.getLogger(__name__)

RETRIES = RetryPolicy(tries=6, first_s=0.2, longest_s=5.0)
SOFTWARE = "shoal redteam"
POLL_S = 1.0
"""interval between two requests for a lease"""
OVERTAKEN = ("superseded", "lease_ended")
"""codes for work that others have done in the meantime; not a failure of the attack's trial"""
ANNOUNCED_S, ANNOUNCED_TRIES = 0.5, 20
"""interval between two commits for a version that was distributed but is not announced yet"""

TAKEN = ""
"""the code of an accepted request"""
MAX_NOTES = 1000
PROBE_PAUSE_S = 0.02
EVIDENCE = "evidence.json"


@dataclass(frozen=True, slots=True)
class RefusalTrial:
    """A request that must be refused, and its response."""

    what: str
    wanted: tuple[str, ...]
    """codes that are correct refusals"""
    code: str
    """code of the response; empty if it was accepted"""

    @property
    def is_refused(self) -> bool:
        """Whether it was refused for one of the right reasons."""
        return self.code in self.wanted


@dataclass(slots=True)
class AttackEvidence:
    """Everything known about one attack besides the ledger."""

    trials: list[RefusalTrial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> list[RefusalTrial]:
        """Trials that were accepted, or refused for a wrong reason."""
        return [trial for trial in self.trials if not trial.is_refused]

    def note(self, text: str) -> None:
        """Record what happened."""
        if len(self.notes) < MAX_NOTES:
            self.notes.append(text)

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a figure."""
        self.figures[name] = self.figures.get(name, 0) + amount

    def record(self, what: str, wanted: tuple[str, ...], answer: HttpResponse) -> None:
        """Record the response to a request; no response has the code `closed`."""
        known = {0: "closed", 200: TAKEN}
        self.record_code(what, wanted, known[answer.status] if answer.status in known else read_refusal(answer).code)

    def record_code(self, what: str, wanted: tuple[str, ...], code: str) -> None:
        """The same for a response whose code is known."""
        assert wanted, "a trial needs the codes of a correct refusal"
        self.trials.append(RefusalTrial(what, wanted, code))

    @contextmanager
    def refused(self, *wanted: str, what: str, moot: tuple[str, ...] = ()) -> Iterator[None]:
        """Record the outcome of a call that must be refused with one of these codes.

        If it is refused with one of `moot`, it proves nothing: the run has moved on in the meantime.
        """
        code = TAKEN
        try:
            yield
        except RefusedError as error:
            code = error.refusal.code
        if code in moot:
            self.note(f"{what}: too late to try ({code})")
        else:
            self.record_code(what, wanted, code)


@dataclass(frozen=True, slots=True)
class AttackerIdentity:
    """One identity of the attacker: a node, its owner, and the owner's delegation."""

    owner: Key
    key: Key
    delegation: bytes
    client: NodeClient
    folder: Path


class AttackSession:
    """Identities, work and requests of an attacker; created by `open_attack_session`."""

    def __init__(
        self, endpoint: Endpoint, descriptor: Descriptor, folder: Path, budget: Budget, stack: AsyncExitStack
    ) -> None:
        self.endpoint, self.descriptor, self.folder, self.run = endpoint, descriptor, folder, descriptor.run
        self.budget, self.evidence = raw_requests.BudgetMeter(budget), AttackEvidence()
        self.owners: list[str] = []
        """public keys of all owners it acted for; their earnings are in the ledger"""
        self.params = RunParams()
        self._recipe: Recipe | None = None
        self._stack = stack
        self._engine: HonestEngine | None = None
        self._engine_lock = asyncio.Lock()
        self._probe: AttackerIdentity | None = None
        """an honest node that takes no part in the attack"""
        # Not a member: used for public calls, and to fetch recipe and weights.
        self._outsider = outsider = self._make(Key.generate())
        self._node_session = Session(
            outsider.client,
            descriptor,
            Identity(outsider.key, outsider.delegation),
            role=Role.WORKER,
            folder=outsider.folder,
            waits=RoleWaits("worker"),
            spans=SpanLog(None, "worker"),
        )

    @property
    def recipe(self) -> Recipe:
        """The run's recipe; ConfigError for a run without one."""
        if self._recipe is None:
            raise ConfigError(f"run {self.run}: the descriptor has no recipe")
        return self._recipe

    @property
    def left_s(self) -> float:
        """Seconds left for the attack."""
        return self.budget.left_s

    # Identities

    def make_identity(self, owner: Key | None = None, **terms: Any) -> AttackerIdentity:
        """An identity that has not joined: of a new owner, or another one of `owner`. `terms` change the delegation."""
        owner = owner or Key.generate()
        if owner.public not in self.owners:
            self.owners.append(owner.public)
        return self._make(owner, **terms)

    async def join(self, owner: Key | None = None) -> AttackerIdentity:
        """An identity that did the proof of work and has joined."""
        attacker = self.make_identity(owner)
        await attacker.client.join(attacker.delegation, SOFTWARE)
        self.evidence.count("joins")
        return attacker

    def sign_delegation(self, owner: Key, node: str, /, **terms: Any) -> bytes:
        """An owner's delegation for a node, valid for a day."""
        now_ms = read_clock()
        grant = Grant(node, self.run, now_ms - DAY_MS, now_ms + DAY_MS, frozenset({Scope.WORK}), MAX_LEASES)
        return sign_delegation(owner, replace(grant, **terms))

    # Work

    async def ask_lease(self, attacker: AttackerIdentity, key: str | None = None) -> LeaseAnswer:
        """Request a lease, and count the outcome."""
        answer = await attacker.client.ask_lease(key, version=await self._find_version(attacker))
        self.evidence.count("leases" if answer.lease is not None else f"no_lease_{answer.code}")
        return answer

    async def take_lease(self, attacker: AttackerIdentity, key: str | None = None) -> Lease | None:
        """The next lease, waiting while there is time; None if there will be none."""
        while self.left_s:
            answer = await self.ask_lease(attacker, key)
            if answer.lease is not None or answer.code == "finished":
                return answer.lease
            if answer.retry_after_s >= self.left_s:
                return None
            await self.sleep(min(answer.retry_after_s, POLL_S))
        return None

    async def prepare_work(self) -> None:
        """Open the engine and wait for its first weights, for leases whose work is written."""
        engine = await self._open_engine()
        while engine.generator.newest < 0 and self.left_s:
            await self.sleep(POLL_S)

    async def _find_version(self, attacker: AttackerIdentity) -> int:
        """The version for which leases are requested: that of the engine, or the newest one."""
        if self._engine is not None:
            return max(0, self._engine.generator.newest)
        answer = await attacker.client.send_heartbeat(Heartbeat(role="worker"))
        return max(0, answer.newest_version)

    async def write_work(self, attacker: AttackerIdentity, lease: Lease) -> "PendingSubmission":
        """Honest work for a lease, written to the attacker's folder."""
        from shoal.worker.behaviour import pack_work

        engine = await self._open_engine()
        work = await engine.write(take_order(lease, self.recipe, WorkLimits()))
        attacker.folder.mkdir(parents=True, exist_ok=True)
        path = attacker.folder / f"{lease.lease}.parquet"
        return await asyncio.to_thread(pack_work, engine.behaviour, work, lease.fence, path)

    async def commit(self, attacker: AttackerIdentity, pending: "PendingSubmission") -> CommitAnswer | None:
        """Commit to work; None if it is no longer wanted, which can also happen to honest workers."""
        for _ in range(ANNOUNCED_TRIES):
            try:
                return await attacker.client.commit(pending.manifest)
            except RefusedError as error:
                if error.refusal.code in OVERTAKEN:
                    self.note(f"{pending.manifest.lease}: {error}")
                    return None
                # Weights and their announcement travel separately, and the weights may arrive first.
                if error.refusal.code != "version":
                    raise
            await asyncio.sleep(ANNOUNCED_S)
        raise ConfigError(f"run {self.run}: v{pending.manifest.version} was distributed but never announced")

    async def upload(
        self, attacker: AttackerIdentity, committed: CommitAnswer, pending: "PendingSubmission"
    ) -> ReceiptAnswer | None:
        """Upload committed work; None if it is no longer wanted."""
        try:
            return await attacker.client.upload(committed, pending.manifest, pending.path)
        except RefusedError as error:
            if error.refusal.code not in OVERTAKEN:
                raise
            self.note(f"{pending.manifest.lease}: {error}")
            return None

    async def submit(self, attacker: AttackerIdentity, pending: "PendingSubmission") -> ReceiptAnswer | None:
        """Commit and upload, as a worker does."""
        committed = await self.commit(attacker, pending)
        return None if committed is None else await self.upload(attacker, committed, pending)

    # Raw requests

    def sign(
        self, attacker: AttackerIdentity, method: str, target: str, body: bytes = b"", **options: Any
    ) -> list[str]:
        """The lines of a request signed by an attacker, for a body of a different `length` if given.

        The other `options` are those of `RequestSigner`.
        """
        length = options.pop("length", 0)
        run, audience = options.pop("run", self.run), options.pop("audience", self.descriptor.coordinator)
        signer = RequestSigner(attacker.key, run, audience, **options)
        if length:
            signed = signer.sign_stream(method, target, length, hashlib.sha256(body).digest())
        else:
            signed = signer.sign_request(method, target, body)
        return [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in signed)]

    async def send(self, lines: Sequence[str], body: bytes = b"", **options: Any) -> HttpResponse:
        """Send a request unchanged; `options` are those of `send_raw`."""
        self.budget.spend_request()
        return await raw_requests.send_raw(self.endpoint, lines, body, **options)

    async def send_many(self, requests: Sequence[tuple[list[str], bytes]], *, source: str = "") -> dict[int, int]:
        """Send many requests over one connection. Returns counts by status."""
        self.budget.spend_request(len(requests))
        data = [raw_requests.build_request(self.endpoint, lines, body) for lines, body in requests]
        return await raw_requests.send_many_raw(self.endpoint, data, source=source)

    def find_source(self, number: int) -> str:
        """Another local address to call from; empty if there is only one."""
        return f"127.0.0.{10 + number % 200}" if self.endpoint.url.host.startswith("127.") else ""

    # Evidence

    async def try_raw(
        self, what: str, wanted: Sequence[str], lines: Sequence[str], body: bytes = b"", **options: Any
    ) -> None:
        """Send a request that must be refused with one of these codes, and record the response."""
        self.evidence.record(what, tuple(wanted), await self.send(lines, body, **options))

    async def try_signed(
        self, what: str, wanted: Sequence[str], signer: AttackerIdentity, target: str, body: bytes, **options: Any
    ) -> None:
        """The same for a POST signed by an attacker; `options` are those of `sign`."""
        await self.try_raw(what, wanted, self.sign(signer, "POST", target, body, **options), body)

    def refused(self, *wanted: str, what: str, moot: tuple[str, ...] = ()) -> AbstractContextManager[None]:
        """Record the outcome of a call that must be refused with one of these codes (`AttackEvidence.refused`)."""
        return self.evidence.refused(*wanted, what=what, moot=moot)

    def note(self, text: str) -> None:
        """Record what happened."""
        self.evidence.note(text)
        logger.info(text)

    @asynccontextmanager
    async def watch(self, name: str, client: NodeClient | None = None) -> AsyncIterator[None]:
        """Let an honest node make calls meanwhile; its measurements are kept in figures that begin with `name`.

        It is a node of its own, unless a `client` is given."""
        if client is None and self._probe is None:
            self._probe = self._make(Key.generate(), retries=RetryPolicy(tries=1))
            await self._probe.client.join(self._probe.delegation, SOFTWARE)
        if client is None:
            assert self._probe is not None, "created above"
            client = self._probe.client
        waits_s: list[float] = []
        watching = asyncio.create_task(self._send_heartbeats(client, name, waits_s))
        try:
            yield
        finally:
            watching.cancel()
            (ended,) = await asyncio.gather(watching, return_exceptions=True)
            if isinstance(ended, BudgetError):
                self.note(f"the honest probe stopped: {ended}")
            self.evidence.count(f"{name}_answered", len(waits_s))
            for percent in (50, 99):
                wait_s = float(np.percentile(waits_s or [0.0], percent, method="inverted_cdf"))
                self.evidence.figures[f"{name}_p{percent}_ms"] = round(1000 * wait_s, 1)

    async def _send_heartbeats(self, client: NodeClient, name: str, waits_s: list[float]) -> None:
        """Call repeatedly until cancelled, and list the response times of the answered calls."""
        self.evidence.count(f"{name}_unanswered", 0)
        while True:
            begun = time.monotonic()
            try:
                await client.send_heartbeat(Heartbeat(role="worker"))
            except (RefusedError, UnreachableError):
                self.evidence.count(f"{name}_unanswered")
            else:
                waits_s.append(time.monotonic() - begun)
            await asyncio.sleep(PROBE_PAUSE_S)

    async def sleep(self, seconds: float) -> None:
        """Wait, but no longer than the time left."""
        await asyncio.sleep(min(seconds, self.left_s))

    async def _open(self) -> None:
        self.params = await self._outsider.client.read_params()
        if self.descriptor.tasks:
            self._recipe = await fetch_recipe(self._node_session, self.folder)

    def _make(self, owner: Key, *, retries: RetryPolicy = RETRIES, **terms: Any) -> AttackerIdentity:
        self.budget.spend_identity()
        folder = self.folder / "nodes" / str(self.budget.num_identities)
        key = terms.pop("key", None) or Key.generate()
        client = NodeClient(
            self.endpoint,
            key,
            run=self.run,
            coordinator=self.descriptor.coordinator,
            folder=folder,
            link=raw_requests.CountingHttpClient(self.endpoint, self.budget),
            asker=RetryingClient(retries),
        )
        self._stack.callback(client.close)
        return AttackerIdentity(owner, key, self.sign_delegation(owner, key.public, **terms), client, folder)

    async def _open_engine(self) -> "HonestEngine":
        from shoal.redteam.workers import open_honest_engine

        async with self._engine_lock:
            if self._engine is None:
                keep = self.params.async_level + 2
                opened = open_honest_engine(self._node_session, self.recipe, self.folder / "weights", keep=keep)
                self._engine = await self._stack.enter_async_context(opened)
            return self._engine


@asynccontextmanager
async def open_attack_session(
    source: str, folder: Path, *, budget: Budget | None = None, anywhere: bool = False
) -> AsyncIterator[AttackSession]:
    """A session with the coordinator at an address, or with that of a descriptor file.

    `anywhere`: the caller owns the coordinator, so it may be on another machine.
    """
    if source.startswith(("http://", "https://")):
        _check_endpoint(parse_endpoint(source), anywhere)  # before anything is sent there
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, url = await find_run(source, folder, RoleWaits("worker"))
    endpoint = parse_endpoint(url)
    _check_endpoint(endpoint, anywhere)
    async with AsyncExitStack() as stack:
        session = AttackSession(endpoint, descriptor, folder, budget or Budget(), stack)
        await session._open()
        yield session


async def run_script(session: AttackSession, name: str) -> None:
    """Run a scripted attack within its budget; record what ends it early."""
    script = find_attack(name).script
    assert script is not None, f"{name} is not a scripted attack"
    try:
        async with asyncio.timeout(session.left_s) as limit:
            await script(session)
    except TimeoutError:
        if not limit.expired():
            raise
        session.note("time is up")
    except BudgetError as error:
        session.note(str(error))


def _check_endpoint(endpoint: Endpoint, anywhere: bool) -> None:
    if not anywhere and not is_loopback(endpoint.url.host):
        text = "not this machine. Attacks are only for your own runs; if this is one, allow it explicitly"
        raise ConfigError(f"{endpoint}: {text}")


async def make_scripted_attempt(attempt: AttackAttempt, url: str, folder: Path, *, seconds: float) -> None:
    """Run a scripted attack with its own session, and fill in the outcome."""
    async with open_attack_session(url, folder, budget=Budget(seconds=seconds)) as session:
        attempt.owners = session.owners  # grows while it runs: also complete if the attempt fails
        try:
            await run_script(session, attempt.attack)
        finally:
            evidence = session.evidence
            write_atomic(folder / EVIDENCE, json.dumps(asdict(evidence), indent=1).encode())
            attempt.trials = len(evidence.trials)
            attempt.taken = [f"{trial.what}: {trial.code or 'taken'}" for trial in evidence.failures]
    attempt.ended = "done"
    attempt.text = f"{attempt.trials} trials, {len(attempt.taken)} not refused correctly"
