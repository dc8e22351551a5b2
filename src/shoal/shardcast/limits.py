"""What a server allows its peers: rates, connections, and who gives way when there are too many.

Invariants:
- a bucket lets through `rate` bytes a second over any time, ahead of it by at most `BURST_S` seconds' worth;
- the table of peers is no larger than the connections open now plus the buckets still in debt;
- when a connection must go, it is one that is not being served, first those that never asked for anything, and of these
  the one that has been so for longest. Bytes dripped into an unfinished head make nobody younger.
"""

import ipaddress
from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Generic, TypeVar

from pydantic import Field

from shoal.config import Settings

BURST_S = 0.015
"""what a bucket saves up while nobody sends: enough to forgive a late timer, too little to be seen as a burst"""
QUANTUM_S = 0.005
"""what one sender takes at a time: senders alternate this often"""
MIN_QUANTUM = 1448
"""bytes of one TCP segment; less at a time is no use to anybody"""
MAX_QUANTUM = 1 << 22
"""bytes handed to the kernel in one call when nothing limits the rate: the loop sees to others in between"""

Seconds = Annotated[float, Field(gt=0.0, le=3600.0)]
ByteRate = Annotated[int, Field(ge=1 << 16)]
Clock = Callable[[], float]
T = TypeVar("T")


class ServeLimits(Settings):
    """What a server allows."""

    max_connections: Annotated[int, Field(ge=1, le=2**16)] = 1024
    """open connections; one more closes the longest idle one"""
    per_peer_connections: Annotated[int, Field(ge=1, le=2**16)] = 64
    """open connections of one address (of one /64 network in IPv6)"""
    trust_loopback: bool = True
    """callers from this machine have no limits of their own and may see who else is connected; not behind a proxy"""
    header_seconds: Seconds = 10.0
    """from a request's first byte (or from accepting the connection) to the end of its head"""
    idle_seconds: Seconds = 30.0
    """from an answer to the first byte of the next request"""
    poll_seconds: Seconds = 30.0
    """longest wait for a new version, and longest time a growing manifest is kept open"""
    first_seconds: Seconds = 12.0
    """from the request for a shard that is still to come to its first byte"""
    stall_seconds: Seconds = 10.0
    """longest pause of a shard that is being received while it is sent"""
    min_rate: Annotated[int, Field(ge=1)] = 16 * 1024
    """bytes a second that a reader must take"""
    window_seconds: Seconds = 10.0
    """time waited for a reader before its rate is judged"""
    grace_seconds: Annotated[float, Field(ge=0.0, le=3600.0)] = 5.0
    """how long a closing server lets transfers go on"""
    rate: ByteRate | None = None
    """bytes a second of the whole server"""
    peer_rate: ByteRate | None = None
    """bytes a second to one address"""


class Bucket:
    """A rate in bytes a second, handed out in order of asking.

    Kept as the time at which a link of that rate would be done with all it was given. A sender that wakes late loses
    nothing, for its place was given when it asked.
    """

    def __init__(self, rate: float, clock: Clock) -> None:
        self.rate = rate
        self._clock = clock
        self._done_s = clock() - BURST_S

    @property
    def quantum(self) -> int:
        """Bytes to take at a time."""
        return min(MAX_QUANTUM, max(MIN_QUANTUM, int(self.rate * QUANTUM_S)))

    @property
    def is_full(self) -> bool:
        """Whether nothing is owed, so that a new bucket would be the same."""
        return self._done_s <= self._clock() - BURST_S

    def reserve_bytes(self, num_bytes: int) -> float:
        """Grant the bytes, and say in how many seconds they may go."""
        now = self._clock()
        start = max(self._done_s, now - BURST_S)
        self._done_s = start + num_bytes / self.rate
        return max(0.0, start - now)


class RateGuard:
    """Judges a reader by what it acknowledged over the time spent waiting for it; our own pauses do not count."""

    def __init__(self, min_rate: int, window_s: float) -> None:
        self._min_bytes = min_rate * window_s
        self._window_s = window_s
        self._waited_s = 0.0
        self._base = 0

    @property
    def left_s(self) -> float:
        """How long to wait at most before the next judgement."""
        return max(0.0, self._window_s - self._waited_s)

    def begin_wait(self, acked: int) -> None:
        """A wait begins, with `acked` bytes acknowledged so far; what came before a window's first wait is no merit."""
        if not self._waited_s:
            self._base = acked

    def end_wait(self, waited_s: float, acked: int) -> bool:
        """A wait ended; False if the reader was too slow over the window."""
        self._waited_s += waited_s
        if self._waited_s < self._window_s:
            return True
        self._waited_s = 0.0
        return acked - self._base >= self._min_bytes


class Phase(IntEnum):
    """What a connection is doing, in the order in which it may be given up."""

    FRESH = 0
    """has not yet sent a complete request"""
    IDLE = 1
    """between two requests"""
    PARKED = 2
    """waits for news"""
    BUSY = 3
    """is being served: never given up"""


class Roster(Generic[T]):
    """Members by phase, each phase in the order in which they entered it."""

    def __init__(self) -> None:
        self._phases: dict[Phase, dict[T, None]] = {phase: {} for phase in Phase}

    def __len__(self) -> int:
        return sum(map(len, self._phases.values()))

    def has_member(self, member: T, phase: Phase) -> bool:
        """Whether a member is in a phase."""
        return member in self._phases[phase]

    def put_member(self, member: T, phase: Phase) -> None:
        """A member enters a phase, as its youngest, and leaves the one it was in."""
        self.remove_member(member)
        self._phases[phase][member] = None

    def remove_member(self, member: T) -> None:
        """A member leaves, if it was there."""
        for members in self._phases.values():
            members.pop(member, None)

    def find_victim(self) -> T | None:
        """The member to give up, or None if all are being served."""
        for phase in (Phase.FRESH, Phase.IDLE, Phase.PARKED):
            for member in self._phases[phase]:
                return member
        return None


class Peer(Generic[T]):
    """One address: its connections, its rate and what it got."""

    def __init__(self, name: str, bucket: Bucket | None, is_trusted: bool) -> None:
        self.name = name
        self.bucket = bucket
        self.is_trusted = is_trusted
        self.roster: Roster[T] = Roster()
        self.sent_bytes = 0
        self.version: int | None = None
        """newest version that it asked a shard of"""


class PeerTable(Generic[T]):
    """All peers with an open connection, and those that still owe time to their bucket."""

    def __init__(self, limits: ServeLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._peers: dict[str, Peer[T]] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def find_peer(self, address: str) -> Peer[T]:
        """The peer of an address, made when first seen."""
        name, is_loopback = name_peer(address)
        if name not in self._peers:
            self._sweep_peers()
            is_trusted = is_loopback and self._limits.trust_loopback
            rate = None if is_trusted else self._limits.peer_rate
            self._peers[name] = Peer(name, None if rate is None else Bucket(rate, self._clock), is_trusted)
        return self._peers[name]

    def list_peers(self) -> list[Peer[T]]:
        """The peers connected now."""
        return [peer for peer in self._peers.values() if len(peer.roster)]

    def _sweep_peers(self) -> None:
        """Forget who left. One with debt stays: coming back must not wipe it out."""
        for name, peer in list(self._peers.items()):
            if not len(peer.roster) and (peer.bucket is None or peer.bucket.is_full):
                del self._peers[name]


def name_peer(address: str) -> tuple[str, bool]:
    """What counts as one peer, and whether it is this machine: in IPv6 one host commands a whole /64."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            name = str(parsed) if parsed.is_loopback else str(ipaddress.ip_network((parsed, 64), strict=False))
            return name, parsed.is_loopback
        parsed = parsed.ipv4_mapped
    return str(parsed), parsed.is_loopback
