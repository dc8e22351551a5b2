"""A round that is open: what has arrived for it, and when it closes.

Symbols: A the members that are waited for, D who delivered, F whose update was refused, k = |A u D \\ F|,
q = ceil(k / 2) the quorum, t_1 and t_q when the first and the q-th delivery came, g the grace.

    close when  A \\ D \\ F is empty       all that are here have delivered
            or  |D| >= q and now >= t_q + g
            or  now >= t_1 + longest        whatever the quorum

Invariants:
- nothing closes without a delivery; who is not here (roll) is not waited for, so a round with a delivery always ends;
- one whole update of each peer counts, the first; a peer may replace what has not arrived whole.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from shoal.diloco.http.messages import Offer
from shoal.diloco.http.parcel import Parcel
from shoal.diloco.round import RoundKey, Update


@dataclass(slots=True)
class Incoming:
    """An update on its way."""

    offer: Offer
    document: bytes
    """the offer as its peer signed it"""
    parcel: Parcel


@dataclass(slots=True)
class Delivery:
    """An update that is here, and was found sound."""

    update: Update
    document: bytes
    digest: str


@dataclass(slots=True)
class OpenRound:
    """One fragment's round."""

    key: RoundKey
    opened_s: float
    incoming: dict[str, Incoming] = field(default_factory=dict)
    delivered: dict[str, Delivery] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """why, by peer"""
    first_s: float | None = None
    quorum_s: float | None = None
    is_closing: bool = False

    def deliver(self, peer: str, delivery: Delivery, now_s: float) -> None:
        """A whole, sound update is here."""
        self.incoming.pop(peer, None)
        self.refused.pop(peer, None)
        self.delivered.setdefault(peer, delivery)
        if self.first_s is None:
            self.first_s = now_s

    def refuse(self, peer: str, reason: str) -> None:
        """What a peer sent cannot be used; the round does not wait for it."""
        self.incoming.pop(peer, None)
        self.delivered.pop(peer, None)
        self.refused[peer] = reason

    def list_late(self, awaited: Collection[str]) -> list[str]:
        """Who is waited for."""
        return sorted(set(awaited) - self.delivered.keys() - self.refused.keys())

    def is_due(self, awaited: Collection[str], now_s: float, grace_s: float, longest_s: float) -> bool:
        """Whether to close now."""
        if not self.delivered or self.first_s is None:
            return False
        if not self.list_late(awaited):
            return True
        quorum = math.ceil(len((set(awaited) | self.delivered.keys()) - self.refused.keys()) / 2)
        if len(self.delivered) < quorum:
            self.quorum_s = None
        elif self.quorum_s is None:
            self.quorum_s = now_s
        if self.quorum_s is not None and now_s >= self.quorum_s + grace_s:
            return True
        return now_s >= self.first_s + longest_s
