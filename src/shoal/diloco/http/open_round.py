"""An open round: what has arrived for it, and when it closes.

Symbols: A the members that are waited for, D the peers that delivered, F those whose update was refused,
k = |A u D \\ F|, q = ceil(k / 2) the quorum, t_1 and t_q when the first and the q-th delivery came, g the grace.

    close when  A \\ D \\ F is empty       all that are present have delivered
            or  |D| >= q and now >= t_q + g
            or  now >= t_1 + longest        whatever the quorum

All of these are named peers. Others (`open_share`) may deliver as well, but no round waits for them, closes because of
them or closes with nothing but their updates.

Invariants:
- no round closes without a delivery of a named peer; absent peers (`membership`) are not waited for, so a round with
  such a delivery ends;
- only the first complete update of each peer counts; a peer may replace an incomplete one.

The second part limits how many trained tokens a peer may claim.

Symbols: c_i tokens that peer i claims in this round, R_i the median of its accepted weights in its last rounds,
M the lower median of the c_j of the named peers in this round, f the factor (2), n_i the accepted rounds in the record
of peer i, N the rounds of a full record (16).

    weight_i = min(c_i, f M, f R_i)        of a named peer; without the last term if it has no record yet
    weight_i = min(c_i, f M) n_i / N       of another peer, which has to deliver for N rounds before it counts in full

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
    named: set[str] = field(default_factory=set)
    """those of `delivered` that are named peers"""
    refused: dict[str, str] = field(default_factory=dict)
    """reason by peer"""
    first_s: float | None = None
    quorum_s: float | None = None
    is_closing: bool = False

    def deliver(self, peer: str, delivery: ReceivedUpdate, now_s: float, *, is_named: bool = True) -> None:
        """Add a complete, valid update."""
        self.incoming.pop(peer, None)
        self.refused.pop(peer, None)
        self.delivered.setdefault(peer, delivery)
        if is_named:
            self.named.add(peer)
            self.first_s = now_s if self.first_s is None else self.first_s

    def refuse(self, peer: str, reason: str) -> None:
        """Refuse a peer's update; the round does not wait for it."""
        self.incoming.pop(peer, None)
        self.delivered.pop(peer, None)
        self.named.discard(peer)
        self.refused[peer] = reason

    def list_late(self, awaited: Collection[str]) -> list[str]:
        """The peers that the round waits for."""
        return sorted(set(awaited) - self.delivered.keys() - self.refused.keys())

    def is_due(self, awaited: Collection[str], now_s: float, grace_s: float, longest_s: float) -> bool:
        """Whether to close now."""
        if not self.named or self.first_s is None:
            return False
        if not self.list_late(awaited):
            return True
        quorum = math.ceil(len((set(awaited) | self.named) - self.refused.keys()) / 2)
        if len(self.named) < quorum:
            self.quorum_s = None
        elif self.quorum_s is None:
            self.quorum_s = now_s
        if self.quorum_s is not None and now_s >= self.quorum_s + grace_s:
            return True
        return now_s >= self.first_s + longest_s


def cap_claims(
    claims: Mapping[str, int],
    records: Mapping[str, Sequence[int]],
    factor: float,
    *,
    named: Collection[str],
    full_rounds: int,
) -> dict[str, int]:
    """The weight of each peer, at least 1; `full_rounds`: the rounds of a full record."""
    known = [claim for peer, claim in claims.items() if peer in named]
    if not known:
        return dict.fromkeys(claims, 1)
    ceiling = factor * median_low(known)
    weights = {}
    for peer, claim in claims.items():
        record = records.get(peer)
        limit = min(ceiling, factor * median_low(record)) if record and peer in named else ceiling
        trust = 1.0 if peer in named else min(1.0, len(record or ()) / full_rounds)
        weights[peer] = max(1, int(trust * min(claim, int(limit))))
    return weights
