"""An open round: what has arrived for it, and when it closes.

Symbols: A the members that are waited for, D the peers that delivered, F those whose update was refused,
k = |A u D \\ F|, q = ceil(k / 2) the quorum, t_1 and t_q when the first and the q-th delivery came, g the grace.

    close when  A \\ D \\ F is empty       all that are present have delivered
            or  |D| >= q and now >= t_q + g
            or  now >= t_1 + longest        whatever the quorum

Invariants:
- no round closes without a delivery; absent peers (`membership`) are not waited for, so a round with a delivery ends;
- only the first complete update of each peer counts; a peer may replace an incomplete one.

The second part limits how many trained tokens a peer may claim.

Symbols: c_i tokens that peer i claims in this round, R_i the median of its accepted weights in its last rounds,
M the lower median of all c_j of this round, f the factor (2).

    weight_i = min(c_i, f M, f R_i)        without the last term for a peer that has no record yet

Nobody can prove how many tokens it read, so a claim is limited by the peer's own record and the others' claims. With a
minority of liars M is at most an honest claim. So a liar among k peers has at most the share f / (f + k - 1) of the
weight, whatever it claims, and cannot use a record of low claims for one sudden high claim.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from shoal.diloco.http.messages import Payload, UpdateOffer
from shoal.diloco.round import RoundKey, Update


@dataclass(slots=True)
class Incoming:
    """An update that is being received."""

    offer: UpdateOffer
    document: bytes
    """the offer as signed by its peer"""
    payload: Payload


@dataclass(slots=True)
class ReceivedUpdate:
    """An update that has arrived and is valid."""

    update: Update
    document: bytes
    digest: str


@dataclass(slots=True)
class OpenRound:
    """One fragment's round."""

    key: RoundKey
    opened_s: float
    incoming: dict[str, Incoming] = field(default_factory=dict)
    delivered: dict[str, ReceivedUpdate] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """reason by peer"""
    first_s: float | None = None
    quorum_s: float | None = None
    is_closing: bool = False

    def deliver(self, peer: str, delivery: ReceivedUpdate, now_s: float) -> None:
        """Add a complete, valid update."""
        self.incoming.pop(peer, None)
        self.refused.pop(peer, None)
        self.delivered.setdefault(peer, delivery)
        if self.first_s is None:
            self.first_s = now_s

    def refuse(self, peer: str, reason: str) -> None:
        """Refuse a peer's update; the round does not wait for it."""
        self.incoming.pop(peer, None)
        self.delivered.pop(peer, None)
        self.refused[peer] = reason

    def list_late(self, awaited: Collection[str]) -> list[str]:
        """The peers that the round waits for."""
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


def cap_claims(claims: Mapping[str, int], records: Mapping[str, Sequence[int]], factor: float) -> dict[str, int]:
    """The weight of each peer, at least 1."""
    if not claims:
        return {}
    ceiling = factor * median_low(claims.values())
    weights = {}
    for peer, claim in claims.items():
        record = records.get(peer)
        limit = min(ceiling, factor * median_low(record)) if record else ceiling
        weights[peer] = max(1, min(claim, int(limit)))
    return weights
