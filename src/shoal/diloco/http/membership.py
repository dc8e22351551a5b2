"""Membership: which peers are present, which lost their connection, which are no longer waited for.

    absent -> here -> (connection broke) lost -> here | absent
                   -> (missed 2 rounds) evicted -> (delivered) here

Invariants:
- presence depends only on when a peer was last heard from, never on what it claims;
- a broken connection counts at once, except for `reset_s` in which the peer may come back;
- rounds do not wait for an evicted peer, but it may still deliver: that brings it back;
- the table has at most `max_peers` named peers and `max_open_peers` others: a new peer replaces the one of its kind
  that has been away longest, so others never take the place of a named peer.

Times are seconds of any monotonic clock.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from shoal.diloco.http.settings import ReducerLimits, ReducerTimeouts
from shoal.net.api_error import ApiError


@dataclass(slots=True)
class PeerRecord:
    """What is known about a peer."""

    seen_s: float
    lost_s: float | None = None
    misses: int = 0
    has_left: bool = False
    weights: deque[int] = field(default_factory=deque)
    """token weights of its last accepted updates"""


class PeerRegistry:
    """The peers of one reducer."""

    def __init__(self, timeouts: ReducerTimeouts, limits: ReducerLimits, named: frozenset[str]) -> None:
        self._timeouts, self._limits = timeouts, limits
        self.named = named
        self._peers: dict[str, PeerRecord] = {}

    def __contains__(self, peer: str) -> bool:
        return peer in self._peers

    def __len__(self) -> int:
        return len(self._peers)

    def join(self, peer: str, now_s: float) -> None:
        """Add a peer, or add it back."""
        record = self._peers.get(peer)
        if record is None:
            self._make_room(peer in self.named, now_s)
            self._peers[peer] = PeerRecord(now_s, weights=deque(maxlen=self._limits.record_rounds))
            return
        record.has_left = False
        self.note_seen(peer, now_s)

    def leave(self, peer: str) -> None:
        """Note that a peer is leaving."""
        self._find(peer).has_left = True

    def note_seen(self, peer: str, now_s: float) -> None:
        """Note that a message signed by this peer arrived."""
        record = self._find(peer)
        record.seen_s, record.lost_s = now_s, None

    def note_lost(self, peer: str, now_s: float) -> None:
        """Note that a connection of this peer broke."""
        record = self._find(peer)
        if record.lost_s is None:
            record.lost_s = now_s

    def is_here(self, peer: str, now_s: float) -> bool:
        """Whether the peer is present."""
        record = self._find(peer)
        if record.has_left or now_s - record.seen_s > self._timeouts.presence_s:
            return False
        return record.lost_s is None or now_s - record.lost_s <= self._timeouts.reset_s

    def list_here(self, now_s: float) -> tuple[str, ...]:
        """Peers that are present and not evicted, in order of id."""
        return tuple(sorted(peer for peer in self._peers if self._is_active(peer, now_s)))

    def is_awaited(self, peer: str, now_s: float) -> bool:
        """Whether a round should wait for this peer, if it is a member."""
        return peer in self.named and self._is_active(peer, now_s)

    def _is_active(self, peer: str, now_s: float) -> bool:
        return self.is_here(peer, now_s) and not self.is_evicted(peer)

    def is_evicted(self, peer: str) -> bool:
        """Whether it missed too many rounds."""
        return self._find(peer).misses >= self._timeouts.max_misses

    def note_delivery(self, peer: str) -> None:
        """Note that a complete update of this peer has arrived."""
        self._find(peer).misses = 0

    def note_miss(self, peer: str) -> None:
        """Note that a round that waited for this peer closed without it."""
        self._find(peer).misses += 1

    def note_weight(self, peer: str, weight: int) -> None:
        """Note that an outcome includes an update of this peer with this weight."""
        self._find(peer).weights.append(weight)

    def read_records(self) -> dict[str, list[int]]:
        """Accepted weights by peer."""
        return {peer: list(record.weights) for peer, record in self._peers.items()}

    def _find(self, peer: str) -> PeerRecord:
        """The record of a peer; a temporary one if the peer was replaced by another."""
        return self._peers.get(peer) or PeerRecord(-math.inf)

    def _make_room(self, is_named: bool, now_s: float) -> None:
        same = {peer: record for peer, record in self._peers.items() if (peer in self.named) == is_named}
        if len(same) < (self._limits.max_peers if is_named else self._limits.max_open_peers):
            return
        gone = [(record.seen_s, peer) for peer, record in same.items() if not self.is_here(peer, now_s)]
        if not gone:
            raise ApiError(503, "full", "the reducer's maximum number of peers is reached; try later", retry_after_s=30)
        del self._peers[min(gone)[1]]
