"""What the coordinator's routes share: the coordinator, the checks of callers, and limits for unsigned requests.

Invariants:
- database reads run in a small thread pool of their own; if it is full, callers are asked to retry, so a flood of reads
  blocks neither the event loop nor the ledger's writer;
- the status is computed once for all requests within `STATUS_S`;
- a statement whose signature is in its body is short, and its signature is checked before it is decided. Only valid
  ones use up the rate of their owner, so nobody can keep an owner from appealing or from revoking a stolen key;
- a failure that is not our bug becomes an `ApiError`, whatever layer it came from (`explain_error`).
"""

import asyncio
import math
import os
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from typing import Annotated, TypeVar

from prometheus_client import CollectorRegistry
from pydantic import Field

from shoal.config.run import Settings
from shoal.coordinator.api.long_poll import LongPoll
from shoal.coordinator.blobs.base import BlobError, FullError, MissingBlobError, WrongBlobError
from shoal.coordinator.coordinator import Coordinator
from shoal.coordinator.run_files import RunFiles
from shoal.identity.authenticator import Authenticator, AuthLimits, name_address, take_token
from shoal.identity.nonces import NonceStore
from shoal.identity.proof_of_work import WorkGate
from shoal.identity.routes import Access, RouteContext
from shoal.identity.signatures import ResponseSigner
from shoal.ledger.ledger import WriterBusyError, WriterStoppedError
from shoal.net.api_error import ApiError
from shoal.net.limits import Buckets
from shoal.protocol.messages import MemberInfo
from shoal.util.clock import read_clock
from shoal.util.metrics import Counter, add_gauge

STATUS_S = 1.0
HEAD_S = 60.0
FULL_RETRY_S = 30
BUSY_RETRY_S = 2
STATEMENT_CHECKS_S = 100.0
"""statements in the name of one owner from one address whose signature is checked, per second"""
_SALT_BYTES = 8
_ALL = "all"

T = TypeVar("T")
PerSecond = Annotated[float, Field(gt=0.0, le=1e6)]


class ApiLimits(Settings):
    """Limits of the routes."""

    read_rate: PerSecond = 20.0
    """unsigned requests per second from one address"""
    stranger_rate: PerSecond = 1.0
    """commands per second from one address; other statements per second (an appeal, a revocation) of one owner"""
    all_commands_rate: PerSecond = 300.0
    """commands per second from all addresses except loopback: strangers cannot lock out the operator"""
    burst_s: Annotated[float, Field(gt=0.0, le=60.0)] = 5.0
    max_readers: Annotated[int, Field(ge=1, le=64)] = 4
    """concurrent database reads"""
    max_waiting: Annotated[int, Field(ge=0, le=4096)] = 64
    """database reads that may be queued"""
    max_waiters: Annotated[int, Field(ge=0, le=1 << 20)] = 4096
    """callers that wait for leases, jobs or batches, for each; further callers are answered at once"""
    decide_seconds: Annotated[float, Field(gt=0.0, le=600.0)] = 20.0
    """longest wait for a decision, after which the caller is asked to retry"""
    max_tracked: Annotated[int, Field(ge=1, le=2**22)] = 32768
    """addresses whose rate is tracked"""


class ApiContext(RouteContext):
    """State shared by the handlers. One per process, for one event loop."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        gate: WorkGate,
        nonces: NonceStore,
        registry: CollectorRegistry | None = None,
        limits: ApiLimits | None = None,
        auth_limits: AuthLimits | None = None,
        descriptor: bytes | None = None,
        run_files: RunFiles | None = None,
        clock_ms: Callable[[], int] = read_clock,
    ) -> None:
        self.coordinator, self.gate, self.nonces = coordinator, gate, nonces
        self.registry = registry or CollectorRegistry()
        self.limits = limits or ApiLimits()
        self.run_files = run_files or RunFiles()
        self.descriptor = descriptor
        self.long_poll = LongPoll(coordinator, self.limits.max_waiters)
        self.clock_ms = clock_ms
        self.responses = ResponseSigner(coordinator.key, coordinator.run, clock_ms)
        self.authenticator = Authenticator(
            run=coordinator.run,
            audience=coordinator.public,
            find_member=coordinator.find_member,
            find_owner=coordinator.find_owner,
            nonces=nonces,
            gate=gate,
            limits=auth_limits,
        )
        text = "Requests refused, by code."
        self.refusals = Counter("shoal_refusals_total", text, ["code"], registry=self.registry)
        self._readers = asyncio.Semaphore(self.limits.max_readers)
        self._num_waiting = 0
        self._reads = self._make_buckets(self.limits.read_rate)
        self._strangers = self._make_buckets(self.limits.stranger_rate)
        self._statements = self._make_buckets(STATEMENT_CHECKS_S)
        self._owners = self._make_buckets(self.limits.stranger_rate)
        self._all_commands = self._make_buckets(self.limits.all_commands_rate)
        self._status: tuple[float, asyncio.Future[bytes]] | None = None
        self._add_gauges()

    def make_challenge(self, node: str) -> str:
        """The proof of work that a node must compute before it joins."""
        return self.gate.make_challenge(node, self.clock_ms(), os.urandom(_SALT_BYTES))

    async def join(self, node: str, stamp: str, delegation: bytes) -> MemberInfo:
        """Add or renew a node. A stamp pays for one event; later ones may need more work."""
        is_paid = self.gate.spend_stamp(stamp, self.clock_ms())
        try:
            info = await self.coordinator.join(node, delegation, is_paid=is_paid)
        except ApiError:
            if is_paid:
                self.gate.return_stamp(stamp)
            raise
        if is_paid:
            self.gate.find_rate(node).note_join(self.clock_ms() / 1000)
        return info

    @property
    def max_stream_bytes(self) -> int:
        """Bytes of the largest file."""
        return self.coordinator.params.blob_max_bytes

    def check_address(self, access: Access, method: str, address: str) -> None:
        """Reject an address above its rate. No stranger elsewhere can lock out the operator."""
        now_s, name = self.clock_ms() / 1000, name_address(address)
        if access is Access.OPERATOR:
            take_token(self._strangers, name, now_s)
            if not _is_loopback(address):
                take_token(self._all_commands, _ALL, now_s)
        elif method == "GET":
            take_token(self._reads, name, now_s)

    def check_statement(self, address: str, owner: str, check: Callable[[], object]) -> None:
        """Check a statement of an owner before it is decided; `check` raises if its signature is invalid."""
        now_s = self.clock_ms() / 1000
        if not self.coordinator.knows_owner(owner):
            raise ApiError(404, "unknown_owner", "this run has no such owner")
        take_token(self._statements, f"{name_address(address)} {owner}", now_s)
        check()
        take_token(self._owners, owner, now_s)

    def explain_error(self, error: Exception) -> ApiError | None:
        """Like `RouteContext.explain_error`, also for failures of the ledger and the blob store."""
        match error:
            case BlobError():
                return _explain_blob_error(error)
            case WriterBusyError() | TimeoutError():
                text = "the ledger is busy; repeat the request, it is processed only once"
                return ApiError(503, "busy", text, retry_after_s=BUSY_RETRY_S)
            case WriterStoppedError():
                text = "the ledger is not available; repeat the request when the coordinator is back"
                return ApiError(503, "stopped", text, retry_after_s=FULL_RETRY_S)
        return super().explain_error(error)

    async def read(self, work: Callable[[], T]) -> T:
        """Run a database read in a thread."""
        if self._num_waiting >= self.limits.max_waiting:
            raise ApiError(503, "busy", "too many concurrent requests; try again soon", retry_after_s=1)
        self._num_waiting += 1
        try:
            async with self._readers:
                return await asyncio.to_thread(work)
        finally:
            self._num_waiting -= 1

    async def read_status(self) -> bytes:
        """The status of the run as JSON; computed once for requests at about the same time."""
        now_s = asyncio.get_running_loop().time()
        if self._status is None or now_s - self._status[0] > STATUS_S:
            self._status = (
                now_s,
                asyncio.ensure_future(self.read(lambda: self.coordinator.read_status().model_dump_json().encode())),
            )
        # Shielded, because other requests wait for the same result.
        return await asyncio.shield(self._status[1])

    async def run_chores(self) -> None:
        """Periodic work, forever: deadlines that have passed, nonces to disk, a signed head each minute."""
        last_head_s = -math.inf
        loop = asyncio.get_running_loop()
        while True:
            await self.coordinator.tick()
            await asyncio.to_thread(self.nonces.tidy)
            if loop.time() - last_head_s >= HEAD_S:
                await self.coordinator.ledger.sign_head()
                last_head_s = loop.time()
            await asyncio.sleep(1.0)

    def _make_buckets(self, rate: float) -> Buckets:
        return Buckets(rate, max(1.0, rate * self.limits.burst_s), self.limits.max_tracked)

    def _sum_rates(self, role: str) -> int:
        return self.coordinator.cache.sum_rates(role, self.clock_ms())

    def _add_gauges(self) -> None:
        add = partial(add_gauge, self.registry)
        add("shoal_ledger_events", "Events in the ledger.", lambda: self.coordinator.ledger.size)
        add("shoal_nonces", "Nonces remembered.", lambda: len(self.nonces))
        add(
            "shoal_join_work",
            "Current number of hashes required to join.",
            lambda: self.gate.rate.find_work(self.clock_ms() / 1000),
        )
        add("shoal_waiters", "Callers waiting for work, jobs or batches.", lambda: self.long_poll.num_waiting)
        for role, verb in (("worker", "generate"), ("validator", "replay")):
            text = f"Tokens per second that live {role}s say they {verb}; not checked."
            add(f"shoal_{role}s_tokens_per_second", text, partial(self._sum_rates, role))
        canaries = self.coordinator.cache.canaries
        add("shoal_canaries_caught", "Bad canary submissions that were rejected.", lambda: canaries["caught"])
        add("shoal_canaries_missed", "Bad canary submissions that a validator accepted.", lambda: canaries["missed"])
        add("shoal_canaries_wronged", "Good canary submissions that a validator rejected.", lambda: canaries["wronged"])
        add("shoal_database_waits", "Reads that wait for a thread of the database.", lambda: self._num_waiting)


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def _explain_blob_error(error: BlobError) -> ApiError:
    match error:
        case WrongBlobError():
            return ApiError(400, "blob", str(error))
        case FullError():
            return ApiError(503, "full", str(error), retry_after_s=FULL_RETRY_S)
        case MissingBlobError():
            return ApiError(404, "not_found", str(error))
    return ApiError(503, "blobs", "the blob store does not respond", retry_after_s=FULL_RETRY_S)
