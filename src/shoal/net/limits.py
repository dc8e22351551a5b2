"""Limits of servers and clients: byte rates, minimum rates, connections by phase and address, requests per caller.

Invariants:
- a `Bucket` lets through `rate` bytes per second on average, with a burst of at most `BURST_S` seconds' worth;
- `AddressTable` is no larger than the number of open connections plus the buckets still in debt;
- `ConnectionTable` evicts first connections that never sent a complete request, the oldest first, and never one that
  serves a caller that the app has verified. Slowly sent bytes of an unfinished head do not make a connection younger;
- `Buckets` keeps one number per name: the time at which its bucket is full again. An unknown name has a full bucket, so
  a lookup costs no memory; forgetting the least recently used name gains it at most one burst.
"""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, TypeVar

from pydantic import Field

from shoal.config.run import Settings
from shoal.net.http import HttpError

BURST_S = 0.015
"""what an idle bucket saves up: enough to compensate for a late timer, too little to be noticed as a burst"""
QUANTUM_S = 0.005
"""what one sender takes at a time, so that senders alternate this often"""
MIN_QUANTUM = 1448
"""bytes of one TCP segment; sending less at a time is useless"""
MAX_QUANTUM = 1 << 22
"""bytes passed to the kernel in one call if the rate is not limited; the event loop runs other tasks in between"""

Seconds = Annotated[float, Field(gt=0.0, le=3600.0)]
ByteRate = Annotated[int, Field(ge=1 << 16)]
Clock = Callable[[], float]
T = TypeVar("T")


class ServeLimits(Settings):
    """Limits of a weights server."""

    max_connections: Annotated[int, Field(ge=1, le=2**16)] = 1024
    """open connections; one more closes the connection that has been idle longest"""
    per_peer_connections: Annotated[int, Field(ge=1, le=2**16)] = 64
    """open connections per address (per /64 network in IPv6)"""
    trust_loopback: bool = True
    """callers from this machine are not limited and may see who is connected; set to false behind a proxy"""
    header_seconds: Seconds = 10.0
    """from a request's first byte (or from accepting the connection) to the end of its head"""
    idle_seconds: Seconds = 30.0
    """from a response to the first byte of the next request"""
    poll_seconds: Seconds = 30.0
    """maximum wait for a new version, and maximum time a growing manifest is kept open"""
    first_seconds: Seconds = 12.0
    """from the request for a shard that has not arrived yet to its first byte"""
    stall_seconds: Seconds = 10.0
    """maximum pause of a shard that is forwarded while it is received"""
    min_rate: Annotated[int, Field(ge=1)] = 16 * 1024
    """minimum rate of a reader in bytes per second"""
    window_seconds: Seconds = 10.0
    """time spent waiting for a reader before its rate is judged"""
    grace_seconds: Annotated[float, Field(ge=0.0, le=3600.0)] = 5.0
    """how long a closing server lets transfers continue"""
    rate: ByteRate | None = None
    """bytes per second of the whole server"""
    peer_rate: ByteRate | None = None
    """bytes per second to one address"""


class HttpLimits(Settings):
    """Limits of the control plane's server."""

    max_connections: Annotated[int, Field(ge=1, le=2**16)] = 8192
    """open connections, which nodes keep between heartbeats; one more closes the connection that has been idle longest
    """
    per_peer_connections: Annotated[int, Field(ge=1, le=2**16)] = 64
    """open connections per address (per /64 network in IPv6)"""
    trust_loopback: bool = True
    """callers from this machine have no limit on connections"""
    behind_proxy: bool = False
    """callers from this machine are a proxy: the last address in X-Forwarded-For is the caller's"""
    header_seconds: Seconds = 5.0
    """from a request's first byte (or from accepting the connection) to the end of its head"""
    idle_seconds: Seconds = 30.0
    """from a response to the first byte of the next request"""
    min_rate: Annotated[int, Field(ge=1)] = 64 * 1024
    """minimum rate in bytes per second at which a body must arrive and a response must be read"""
    window_seconds: Seconds = 5.0
    """time spent waiting for a peer before its rate is judged"""
    grace_seconds: Annotated[float, Field(ge=0.0, le=3600.0)] = 10.0
    """how long a closing server lets requests continue"""


class Bucket:
    """A rate in bytes per second, granted in the order of requests.

    Stored as the time at which a link of that rate would have sent everything granted so far. A sender that wakes late
    loses nothing, because its place was assigned when it asked.
    """

    def __init__(self, rate: float, clock: Clock) -> None:
        self.rate = rate
        self._clock = clock
        self._done_s = clock() - BURST_S

    @property
    def quantum(self) -> int:
        """Number of bytes to take at a time."""
        return min(MAX_QUANTUM, max(MIN_QUANTUM, int(self.rate * QUANTUM_S)))

    @property
    def is_full(self) -> bool:
        """Whether nothing is owed, so that a new bucket would be equivalent."""
        return self._done_s <= self._clock() - BURST_S

    def reserve_bytes(self, num_bytes: int) -> float:
        """Grant the bytes and return in how many seconds they may be sent."""
        now = self._clock()
        start = max(self._done_s, now - BURST_S)
        self._done_s = start + num_bytes / self.rate
        return max(0.0, start - now)


class RateGuard:
    """Judges a reader by the bytes it acknowledged per time spent waiting for it; our own pauses do not count."""

    def __init__(self, min_rate: int, window_s: float) -> None:
        self._min_bytes = min_rate * window_s
        self._window_s = window_s
        self._waited_s = 0.0
        self._base = 0

    @property
    def left_s(self) -> float:
        """Maximum wait before the next judgement."""
        return max(0.0, self._window_s - self._waited_s)

    def begin_wait(self, acked: int) -> None:
        """Start of a wait with `acked` bytes acknowledged; bytes before the first wait of a window do not count."""
        if not self._waited_s:
            self._base = acked

    def end_wait(self, waited_s: float, acked: int) -> bool:
        """End of a wait; False if the reader was too slow over the window."""
        self._waited_s += waited_s
        if self._waited_s < self._window_s:
            return True
        self._waited_s = 0.0
        return acked - self._base >= self._min_bytes


async def keep_rate(guard: RateGuard, count_bytes: Callable[[], int], wait: Callable[[], Awaitable[T]]) -> T:
    """Wait for the peer as long as it keeps its minimum rate; otherwise raise `HttpError` with status 408."""
    clock = asyncio.get_running_loop().time
    while True:
        began_s, found = clock(), []
        guard.begin_wait(count_bytes())
        try:
            async with asyncio.timeout(guard.left_s):
                found.append(await wait())
        except TimeoutError:
            pass  # judged below, by the bytes transferred meanwhile
        if not guard.end_wait(clock() - began_s, count_bytes()):
            raise HttpError("too slow", 408)
        if found:
            return found[0]


class Phase(IntEnum):
    """The state of a connection, in order of eviction."""

    FRESH = 0
    """no complete request so far"""
    IDLE = 1
    """between two requests"""
    PARKED = 2
    """long polling for a new version"""
    UNVERIFIED = 3
    """being served, and so far nobody that the app has verified"""
    KNOWN = 4
    """between two requests, the last of which was of a verified caller"""
    BUSY = 5
    """being served: never evicted"""


class ConnectionTable:
    """Connections by phase, each phase in order of entry."""

    def __init__(self) -> None:
        self._phases: dict[Phase, dict[ConnectionSlot, None]] = {phase: {} for phase in Phase}

    def __len__(self) -> int:
        return sum(map(len, self._phases.values()))

    def has_member(self, member: "ConnectionSlot", phase: Phase) -> bool:
        """Whether a member is in a phase."""
        return member in self._phases[phase]

    def put_member(self, member: "ConnectionSlot", phase: Phase) -> None:
        """Move a member to a phase, as its youngest."""
        self.remove_member(member)
        self._phases[phase][member] = None

    def remove_member(self, member: "ConnectionSlot") -> None:
        """Remove a member if present."""
        for members in self._phases.values():
            members.pop(member, None)

    def find_evictable(self) -> "ConnectionSlot | None":
        """The member to evict, or None if all are busy."""
        for phase in sorted(set(Phase) - {Phase.BUSY}):
            for member in self._phases[phase]:
                return member
        return None


@dataclass(eq=False, slots=True)
class AddressUsage:
    """One address: its connections, its rate and the bytes sent to it."""

    name: str
    bucket: Bucket | None
    is_trusted: bool
    connections: ConnectionTable = field(default_factory=ConnectionTable)
    sent_bytes: int = 0
    version: int | None = None
    """newest version of which it requested a shard"""


class ConnectionSlot:
    """A connection's entry in the tables that decide which one is evicted."""

    def __init__(self, address: tuple[str, int], connections: ConnectionTable, usage: AddressUsage) -> None:
        self.address, self.usage = address, usage
        self._tables: tuple[ConnectionTable, ...] = (connections, usage.connections)
        self.enter_phase(Phase.FRESH)

    def enter_phase(self, phase: Phase) -> None:
        """Record the current phase of the connection."""
        for table in self._tables:
            table.put_member(self, phase)

    def leave(self) -> None:
        """Stop counting as an open connection, permanently."""
        for table in self._tables:
            table.remove_member(self)
        self._tables = ()


class AddressTable:
    """All addresses with an open connection, and those whose bucket is still in debt."""

    def __init__(self, clock: Clock, *, trust_loopback: bool, peer_rate: int | None = None) -> None:
        self._clock, self._trust_loopback, self._peer_rate = clock, trust_loopback, peer_rate
        self._usages: dict[str, AddressUsage] = {}
        self._debtors: set[str] = set()

    def __len__(self) -> int:
        return len(self._usages)

    def find(self, address: str) -> AddressUsage:
        """Return the usage of an address; created on first use."""
        name, is_loopback = name_peer(address)
        if name not in self._usages:
            for debtor in list(self._debtors):
                self._debtors.discard(debtor)
                self.release(self._usages[debtor])
            is_trusted = is_loopback and self._trust_loopback
            rate = None if is_trusted else self._peer_rate
            self._usages[name] = AddressUsage(name, None if rate is None else Bucket(rate, self._clock), is_trusted)
        return self._usages[name]

    def release(self, usage: AddressUsage) -> None:
        """Forget an address without connections. One in debt stays, so a new connection cannot clear its debt."""
        if len(usage.connections):
            return
        if usage.bucket is None or usage.bucket.is_full:
            self._usages.pop(usage.name, None)
            self._debtors.discard(usage.name)
        else:
            self._debtors.add(usage.name)

    def list_connected(self) -> list[AddressUsage]:
        """The addresses with open connections."""
        return [usage for usage in self._usages.values() if len(usage.connections)]


@lru_cache(maxsize=4096)
def name_peer(address: str) -> tuple[str, bool]:
    """The unit that counts as one peer, and whether it is this machine; in IPv6 one host controls a whole /64."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            name = str(parsed) if parsed.is_loopback else str(ipaddress.ip_network((parsed, 64), strict=False))
            return name, parsed.is_loopback
        parsed = parsed.ipv4_mapped
    return str(parsed), parsed.is_loopback


class Buckets:
    """One token bucket for each name."""

    def __init__(self, rate: float, burst: float, capacity: int) -> None:
        self._token_s = 1.0 / rate
        self._burst_s = burst / rate
        self._capacity = capacity
        self._full_s: dict[str, float] = {}
        """by name, least recently used first"""

    def __len__(self) -> int:
        return len(self._full_s)

    def find_wait(self, name: str, now_s: float) -> float:
        """Seconds until the name has a token, 0 if it has one. Changes nothing."""
        full_s = self._full_s.get(name)
        if full_s is None:
            return 0.0
        debt_s = full_s - now_s
        # More than the maximum debt: the clock was set back, which nobody is charged for.
        if debt_s > 3 * self._burst_s:
            return 0.0
        return max(0.0, debt_s + self._token_s - self._burst_s)

    def take_tokens(self, name: str, now_s: float, count: float = 1.0) -> None:
        """Take tokens from a bucket; it may go negative by at most one burst."""
        full_s = self._full_s.pop(name, now_s)
        if not now_s <= full_s <= now_s + 3 * self._burst_s:
            full_s = now_s
        self._full_s[name] = min(full_s + count * self._token_s, now_s + 2 * self._burst_s)
        if len(self._full_s) > self._capacity:
            del self._full_s[next(iter(self._full_s))]
