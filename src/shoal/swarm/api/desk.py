"""What all routes share: the coordinator, the checks of callers, and limits for those who are not checked.

Invariants:
- reads of the database happen in a few threads of their own; who finds them all taken is told to come back, so a flood
  of questions takes neither the loop nor the ledger's writer;
- the status is computed once for all who ask within `STATUS_S`;
- strangers, who sign nothing that is checked before their body is read, have a small rate each and one for all.
"""

import asyncio
import math
import os
from collections.abc import Callable
from ipaddress import ip_address
from typing import Annotated, TypeVar

from pydantic import Field

from shoal.config import Settings
from shoal.shardcast.metrics import Registry
from shoal.swarm.api.lounge import Lounge
from shoal.swarm.buckets import Buckets
from shoal.swarm.clock import read_clock
from shoal.swarm.coordinator import Coordinator
from shoal.swarm.nonces import NonceBook
from shoal.swarm.papers import Papers
from shoal.swarm.refusal import AuthError
from shoal.swarm.server_auth import Authenticator, AuthLimits, name_address
from shoal.swarm.work import WorkGate

STATUS_S = 1.0
HEAD_S = 60.0
_SALT_BYTES = 8
_ALL = "all"

T = TypeVar("T")
PerSecond = Annotated[float, Field(gt=0.0, le=1e6)]


class ApiLimits(Settings):
    """What the routes allow."""

    read_rate: PerSecond = 20.0
    """open questions a second from one address"""
    stranger_rate: PerSecond = 1.0
    """statements a second that strangers bring from one address (an appeal, a revocation, a command)"""
    all_strangers_rate: PerSecond = 20.0
    """the same from all addresses, but for commands"""
    all_commands_rate: PerSecond = 300.0
    """what calls itself a command, from all addresses but this machine's own: strangers cannot silence the operator"""
    burst_s: Annotated[float, Field(gt=0.0, le=60.0)] = 5.0
    max_readers: Annotated[int, Field(ge=1, le=64)] = 4
    """questions to the database at a time"""
    max_waiting: Annotated[int, Field(ge=0, le=4096)] = 64
    """questions that wait for their turn"""
    max_waiters: Annotated[int, Field(ge=0, le=1 << 20)] = 4096
    """callers that wait for work, jobs or batches, each; more are answered at once"""
    decide_seconds: Annotated[float, Field(gt=0.0, le=600.0)] = 20.0
    """longest wait for a decision, after which the caller is told to ask again"""
    max_tracked: Annotated[int, Field(ge=1, le=2**22)] = 32768
    """addresses whose rate is remembered"""


class Desk:
    """Where requests are answered from. One per process, for one loop."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        gate: WorkGate,
        nonces: NonceBook,
        registry: Registry | None = None,
        limits: ApiLimits | None = None,
        auth_limits: AuthLimits | None = None,
        descriptor: bytes | None = None,
        papers: Papers | None = None,
        clock_ms: Callable[[], int] = read_clock,
    ) -> None:
        self.coordinator, self.gate, self.nonces = coordinator, gate, nonces
        self.registry = registry or Registry()
        self.limits = limits or ApiLimits()
        self.papers = papers or Papers()
        self.descriptor = descriptor
        self.lounge = Lounge(coordinator, self.limits.max_waiters)
        self.clock_ms = clock_ms
        self.authenticator = Authenticator(
            run=coordinator.run,
            audience=coordinator.public,
            find_member=coordinator.find_member,
            find_owner=coordinator.find_owner,
            nonces=nonces,
            gate=gate,
            limits=auth_limits,
        )
        self.refusals = self.registry.add_counter("shoal_refusals_total", "Requests refused, by code.", "code")
        self._readers = asyncio.Semaphore(self.limits.max_readers)
        self._num_waiting = 0
        self._reads = self._make_buckets(self.limits.read_rate)
        self._strangers = self._make_buckets(self.limits.stranger_rate)
        self._all_strangers = self._make_buckets(self.limits.all_strangers_rate)
        self._all_commands = self._make_buckets(self.limits.all_commands_rate)
        self._status: tuple[float, asyncio.Future[bytes]] | None = None
        self._add_gauges()

    def make_challenge(self, node: str) -> str:
        """The work that a node must do before it joins."""
        return self.gate.make_challenge(node, self.clock_ms(), os.urandom(_SALT_BYTES))

    def note_join(self) -> None:
        """A node that was not known joined: the next ones may have to work more."""
        self.gate.rate.note_join(self.clock_ms() / 1000)

    def check_reader(self, address: str) -> None:
        """Refuse an address that asks too much."""
        _take_token(self._reads, name_address(address), self.clock_ms() / 1000)

    def check_stranger(self, address: str) -> None:
        """Refuse an address that brings too many statements, or any while all together bring too many."""
        now_s = self.clock_ms() / 1000
        _take_token(self._strangers, name_address(address), now_s)
        _take_token(self._all_strangers, _ALL, now_s)

    def check_operator(self, address: str) -> None:
        """Refuse an address that brings too many commands; as many as are checked in a part of a core, from all."""
        now_s = self.clock_ms() / 1000
        _take_token(self._strangers, name_address(address), now_s)
        if not _is_here(address):
            _take_token(self._all_commands, _ALL, now_s)

    async def read(self, work: Callable[[], T]) -> T:
        """Run a question to the database in a thread."""
        if self._num_waiting >= self.limits.max_waiting:
            raise AuthError(503, "busy", "too many questions at once; try again soon", retry_after_s=1)
        self._num_waiting += 1
        try:
            async with self._readers:
                return await asyncio.to_thread(work)
        finally:
            self._num_waiting -= 1

    async def read_status(self) -> bytes:
        """The run at a glance, as JSON; the same for all who ask at about one time."""
        now_s = asyncio.get_running_loop().time()
        if self._status is None or now_s - self._status[0] > STATUS_S:
            self._status = now_s, asyncio.ensure_future(self.read(self._dump_status))
        # Shielded, for others wait for the same.
        return await asyncio.shield(self._status[1])

    async def run_chores(self) -> None:
        """What is to be done beside answering, for ever: what time has come for, nonces to disk, a head each minute."""
        last_head_s = -math.inf
        loop = asyncio.get_running_loop()
        while True:
            await self.coordinator.tick()
            await asyncio.to_thread(self.nonces.tidy)
            if loop.time() - last_head_s >= HEAD_S:
                await self.coordinator.ledger.sign_head()
                last_head_s = loop.time()
            await asyncio.sleep(1.0)

    def _dump_status(self) -> bytes:
        return self.coordinator.read_status().model_dump_json().encode()

    def _make_buckets(self, rate: float) -> Buckets:
        return Buckets(rate, max(1.0, rate * self.limits.burst_s), self.limits.max_tracked)

    def _add_gauges(self) -> None:
        add = self.registry.add_gauge
        add("shoal_ledger_events", "Events in the ledger.", lambda: self.coordinator.ledger.size)
        add("shoal_nonces", "Nonces remembered.", lambda: len(self.nonces))
        add("shoal_join_work", "Hashes that joining costs now.", self._find_work)
        add("shoal_waiters", "Callers that wait for work, jobs or batches.", lambda: self.lounge.num_waiting)
        add("shoal_canaries_caught", "Bad work of canaries that was rejected.", lambda: self._count_canaries("caught"))
        add("shoal_canaries_missed", "Bad work that a validator accepted.", lambda: self._count_canaries("missed"))
        add("shoal_canaries_wronged", "Good work that a validator rejected.", lambda: self._count_canaries("wronged"))
        add("shoal_waits", "Questions to the database that wait.", lambda: self._num_waiting)

    def _count_canaries(self, state: str) -> int:
        return self.coordinator.mirror.canaries[state]

    def _find_work(self) -> float:
        return self.gate.rate.find_work(self.clock_ms() / 1000)


def _is_here(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def _take_token(buckets: Buckets, name: str, now_s: float) -> None:
    wait_s = buckets.find_wait(name, now_s)
    if wait_s > 0.0:
        after_s = math.ceil(wait_s)
        raise AuthError(429, "too_many", f"too many requests; try again in {after_s} s", retry_after_s=after_s)
    buckets.take_tokens(name, now_s)
