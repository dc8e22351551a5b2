"""Who takes part: who is here, who broke off, who is not waited for any more.

    absent -> here -> (connection broke) lost -> here | absent
                   -> (missed 2 rounds) evicted -> (delivered) here

Invariants:
- being here is a matter of when a peer was last heard of, and of nothing it says;
- a connection that breaks counts at once, but for `reset_s` in which the peer may come back;
- an evicted peer is not waited for, and may deliver all the same: that brings it back;
- the table has at most `max_peers` entries: a newcomer takes the place of who is longest away.

Times are seconds of any clock that never goes back.
"""

from collections import deque
from dataclasses import dataclass, field

from shoal.diloco.http.settings import Patience, ReducerLimits
from shoal.swarm.refusal import AuthError


@dataclass(slots=True)
class Seat:
    """What is known of a peer."""

    seen_s: float
    lost_s: float | None = None
    misses: int = 0
    has_left: bool = False
    record: deque[int] = field(default_factory=deque)
    """token weights of its last accepted updates"""


class Roll:
    """The peers of one reducer."""

    def __init__(self, patience: Patience, limits: ReducerLimits) -> None:
        self._patience, self._limits = patience, limits
        self._seats: dict[str, Seat] = {}

    def __contains__(self, peer: str) -> bool:
        return peer in self._seats

    def __len__(self) -> int:
        return len(self._seats)

    def join(self, peer: str, now_s: float) -> None:
        """Take a peer in, or back."""
        seat = self._seats.get(peer)
        if seat is None:
            self._make_room(now_s)
            self._seats[peer] = Seat(now_s, record=deque(maxlen=self._limits.record_rounds))
            return
        seat.has_left = False
        self.note_seen(peer, now_s)

    def leave(self, peer: str) -> None:
        """A peer says that it is not coming back soon."""
        if (seat := self._seats.get(peer)) is not None:
            seat.has_left = True

    def note_seen(self, peer: str, now_s: float) -> None:
        """Something that it signed came in."""
        if (seat := self._seats.get(peer)) is not None:
            seat.seen_s, seat.lost_s = now_s, None

    def note_lost(self, peer: str, now_s: float) -> None:
        """A connection of its broke."""
        if (seat := self._seats.get(peer)) is not None and seat.lost_s is None:
            seat.lost_s = now_s

    def is_here(self, peer: str, now_s: float) -> bool:
        """Whether it may be expected to do anything."""
        seat = self._seats.get(peer)
        if seat is None or seat.has_left or now_s - seat.seen_s > self._patience.presence_s:
            return False
        return seat.lost_s is None or now_s - seat.lost_s <= self._patience.reset_s

    def list_here(self, now_s: float) -> tuple[str, ...]:
        """Peers that are here and not evicted, in order of id."""
        return tuple(sorted(peer for peer in self._seats if self.is_awaited(peer, now_s)))

    def is_awaited(self, peer: str, now_s: float) -> bool:
        """Whether a round should wait for it, if it is a member."""
        return self.is_here(peer, now_s) and not self.is_evicted(peer)

    def is_evicted(self, peer: str) -> bool:
        """Whether it missed too many rounds."""
        seat = self._seats.get(peer)
        return seat is not None and seat.misses >= self._patience.max_misses

    def note_delivery(self, peer: str) -> None:
        """A whole update of its is here."""
        if (seat := self._seats.get(peer)) is not None:
            seat.misses = 0

    def note_miss(self, peer: str) -> None:
        """A round closed without it while it was waited for."""
        if (seat := self._seats.get(peer)) is not None:
            seat.misses += 1

    def note_weight(self, peer: str, weight: int) -> None:
        """An update of its is in an outcome, with this weight."""
        if (seat := self._seats.get(peer)) is not None:
            seat.record.append(weight)

    def read_records(self) -> dict[str, list[int]]:
        """Accepted weights by peer."""
        return {peer: list(seat.record) for peer, seat in self._seats.items()}

    def _make_room(self, now_s: float) -> None:
        if len(self._seats) < self._limits.max_peers:
            return
        gone = [(seat.seen_s, peer) for peer, seat in self._seats.items() if not self.is_here(peer, now_s)]
        if not gone:
            raise AuthError(503, "full", "there are as many peers as this reducer takes; try later", retry_after_s=30)
        del self._seats[min(gone)[1]]
