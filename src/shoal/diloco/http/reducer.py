"""The reducer: receives updates, closes rounds, and returns one outcome to all.

    offer -> chunks -> whole, finite -> delivered -> round due (open_round) -> close_round -> disk, round log -> answer

Invariants:
- the sender is the signer; an update counts only for its signer, once in a round;
- one task closes rounds, one after the other; a result is on disk and in the round log before it is sent;
- an update for a different round, base or run, of wrong length or not finite is refused and has no effect;
- a peer's claims never decide how much memory is allocated: payloads have the plan's length;
- named peers decide: rounds wait for them, close with their quorum, and take the measures of norms, weights and speeds
  from them. All others together have at most `open_share` of their weight.

A round closes with the updates that are complete at that moment. An update that then lacks a chunk is stale: its peer
is informed, takes the outcome, and continues from the new state.
"""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import median_low

import numpy as np

from shoal.diloco.aggregate import OpenPeers, measure_payload
from shoal.diloco.codecs import CodecError, find_codec
from shoal.diloco.http.membership import PeerRegistry
from shoal.diloco.http.messages import (
    Payload,
    UpdateOffer,
    WantedChunks,
    count_payload,
    encode_outcome,
    read_update,
)
from shoal.diloco.http.open_round import Incoming, OpenRound, ReceivedUpdate, cap_claims
from shoal.diloco.http.round_log import ROUND, UPDATE, RoundLog
from shoal.diloco.http.settings import ReducerConfig
from shoal.diloco.http.snapshots import SnapshotStore
from shoal.diloco.outer import DilocoPlan
from shoal.diloco.reduce import FinishedRound, close_round
from shoal.diloco.round import MAX_TOKENS, RoundKey, Update
from shoal.diloco.state import OuterState
from shoal.identity.keys import Key
from shoal.ledger.event import EventError, encode_body
from shoal.net.api_error import ApiError
from shoal.util.aio import Notifier, wait_any

POLL_S = 0.05
"""polling interval for due rounds: the precision of deadlines"""
_NUM_TIMES = 16


class Reducer:
    """The rounds of one run. Call from one event loop."""

    def __init__(
        self,
        plan: DilocoPlan,
        key: Key,
        config: ReducerConfig,
        state: OuterState,
        snapshots: SnapshotStore,
        round_log: RoundLog,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan, self.state, self.snapshots, self.round_log = plan, state, snapshots, round_log
        self.peers = PeerRegistry(config.patience, config.limits, frozenset(config.peers))
        self.changed = Notifier()
        self._key, self._config, self._clock_s = key, config, clock_s
        self._residuals: dict[int, np.ndarray | None] = {}
        self._times: deque[float] = deque(maxlen=_NUM_TIMES)
        self.rounds = [self._open_round(index) for index in range(len(plan.sizes))]
        for peer in [peer for peer in state.members if peer in self.peers.named][: config.limits.max_peers]:
            # They were present when this state was made and may come back; without this the first peer would close a
            # round alone.
            self.peers.join(peer, clock_s())

    @property
    def grace_s(self) -> float:
        """How long a round waits for the others after a quorum has delivered."""
        median_s = median_low(self._times) if self._times else 0.0
        timeouts = self._config.patience
        return max(timeouts.grace_s, timeouts.grace_share * median_s)

    def admit_peer(self, peer: str) -> bool:
        """Admit a peer; returns whether it reads data from now on, or only from the next round on."""
        self.peers.join(peer, self._clock_s())
        self._replace_members()
        self.changed.notify()
        return peer in self.state.members

    def take_offer(self, peer: str, offer: UpdateOffer, document: bytes) -> WantedChunks:
        """Accept an announced update; returns which chunks are missing."""
        round_ = self._find_round(offer.key)
        if peer not in self.peers.named and peer not in self.state.members:
            raise ApiError(409, "not_member", "a peer that is not named may deliver once it is a member")
        if (held := round_.delivered.get(peer)) is not None:
            if held.digest != offer.digest:
                raise ApiError(409, "second", "this peer has already delivered a different update in this round")
            return WantedChunks(status="delivered")
        self._check_offer(offer)
        check_document(document)
        incoming = round_.incoming.get(peer)
        if incoming is None or incoming.offer != offer:
            size = count_payload(self.plan, offer.fragment)
            incoming = round_.incoming[peer] = Incoming(offer, document, Payload(size, offer.digest))
        return WantedChunks(status="open", missing=incoming.payload.list_missing())

    def find_payload(self, peer: str, fragment: int, round_number: int, digest: str) -> Payload:
        """The buffer for a chunk of this peer's update."""
        round_ = self._find_fragment(fragment)
        if round_.key.round != round_number or round_.is_closing:
            raise refuse_stale()
        incoming = round_.incoming.get(peer)
        if incoming is None or incoming.offer.digest != digest:
            raise ApiError(409, "no_offer", "this update was not offered, or was replaced by a newer offer")
        return incoming.payload

    async def deliver(self, peer: str, fragment: int, payload: Payload) -> None:
        """All chunks have arrived: check the update and count it."""
        round_ = self.rounds[fragment]
        incoming = round_.incoming.get(peer)
        if incoming is None or incoming.payload is not payload or round_.is_closing:
            raise refuse_stale()
        data = await asyncio.to_thread(payload.open)
        if data is None:
            raise ApiError(422, "digest", "the payload does not match the offered digest")
        update = read_update(incoming.offer, peer, data)
        reason = await asyncio.to_thread(self._find_fault, update)
        if reason:
            round_.refuse(peer, reason)
            self.changed.notify()
            raise ApiError(422, "refused", reason)
        if round_.is_closing or self.rounds[fragment] is not round_:
            raise refuse_stale()
        received = ReceivedUpdate(update, incoming.document, payload.digest)
        round_.deliver(peer, received, self._clock_s(), is_named=peer in self.peers.named)
        self.peers.note_delivery(peer)
        self.changed.notify()

    def note_lost(self, peer: str) -> None:
        """Note that a connection of this peer broke."""
        self.peers.note_lost(peer, self._clock_s())
        self.changed.notify()

    def note_seen(self, peer: str) -> None:
        """Note that this peer was heard from."""
        self.peers.note_seen(peer, self._clock_s())

    def remove_peer(self, peer: str) -> None:
        """Remove a peer that leaves."""
        self.peers.leave(peer)
        self.changed.notify()

    def describe(self) -> dict[str, object]:
        """Completed rounds, present peers, and whom each round waits for."""
        now_s = self._clock_s()
        awaited = self._list_awaited(now_s)
        rounds: list[object] = [
            {"delivered": sorted(round_.delivered), "late": round_.list_late(awaited), "round": round_.key.round}
            for round_ in self.rounds
        ]
        here = list(self.peers.list_here(now_s))
        return {"here": here, "members": list(self.state.members), "outer": self.state.hash, "rounds": rounds}

    def check_round(self, fragment: int, number: int, base: str) -> None:
        """Refuse to wait for a round that can never close."""
        open_key = self._find_fragment(fragment).key
        if number > open_key.round or (number == open_key.round and base != open_key.base):
            raise _refuse_base()

    def is_closed(self, fragment: int, number: int) -> bool:
        """Whether a round is over."""
        return self.state.rounds[fragment] > number

    def may_fetch(self, peer: str) -> bool:
        """Whether this peer can start from the current state; a new peer cannot before it is a member.

        An evicted peer is not a member until it delivers again, and it can only deliver from the newest state.
        """
        return peer in self.state.members or self.peers.is_evicted(peer)

    async def run(self) -> None:
        """Close rounds forever."""
        while True:
            await wait_any([self.changed], POLL_S)  # rounds also become due by time alone
            self._replace_members()
            for index in range(len(self.rounds)):
                if self._is_due(self.rounds[index]):
                    await self._close_round(index)

    def _open_round(self, index: int) -> OpenRound:
        return OpenRound(self.plan.name_round(self.state, index), self._clock_s())

    def _find_round(self, key: RoundKey) -> OpenRound:
        if key.run != self.plan.run or key.fragment >= len(self.rounds):
            raise ApiError(404, "not_found", "unknown run or fragment")
        round_ = self.rounds[key.fragment]
        if key.round != round_.key.round or round_.is_closing:
            raise refuse_stale()
        if key.base != round_.key.base:
            raise _refuse_base()
        return round_

    def _find_fragment(self, fragment: int) -> OpenRound:
        """The open round of a fragment."""
        if fragment >= len(self.rounds):
            raise ApiError(404, "not_found", "unknown fragment")
        return self.rounds[fragment]

    def _check_offer(self, offer: UpdateOffer) -> None:
        if offer.codec != self.plan.rules.codec:
            raise ApiError(422, "codec", f"wrong codec; this run uses {self.plan.rules.codec}")
        if offer.size != count_payload(self.plan, offer.fragment):
            raise ApiError(422, "length", "the update's length does not match this fragment")
        if any(lane >= self.plan.num_lanes for lane, _ in offer.lanes):
            raise ApiError(422, "lanes", "unknown data lane")

    def _find_fault(self, update: Update) -> str:
        """Why an update cannot be used; empty if it can."""
        try:
            measure_payload(find_codec(update.codec), update.payload, self.plan.sizes[update.key.fragment])
        except CodecError as error:
            return str(error)
        return ""

    def _list_awaited(self, now_s: float) -> set[str]:
        return {peer for peer in self.state.members if self.peers.is_awaited(peer, now_s)}

    def _replace_members(self) -> None:
        """Change the members between rounds, when that surprises no peer.

        That is at the start, once there are enough peers, and when no member is present and nothing is in flight.
        """
        now_s = self._clock_s()
        here, named = self.peers.list_here(now_s), self.peers.named
        is_busy = any(named & (round_.delivered.keys() | round_.incoming.keys()) for round_ in self.rounds)
        enough = 1 if self.state.members else self._config.start_peers
        if len(named.intersection(here)) >= enough and not is_busy and not self._list_awaited(now_s):
            self.state = replace(self.state, members=here, number=0)
            self.changed.notify()

    def _is_due(self, round_: OpenRound) -> bool:
        now_s = self._clock_s()
        return round_.is_due(self._list_awaited(now_s), now_s, self.grace_s, self._config.patience.longest_s)

    async def _close_round(self, index: int) -> None:
        round_, now_s = self.rounds[index], self._clock_s()
        round_.is_closing = True
        late = round_.list_late(self._list_awaited(now_s))
        deliveries = dict(round_.delivered)
        claims = {peer: held.update.tokens for peer, held in deliveries.items()}
        named, limits = self.peers.named, self._config.limits
        records = self.peers.read_records()
        weights = cap_claims(claims, records, limits.record_factor, named=named, full_rounds=limits.record_rounds)
        updates = [replace(held.update, tokens=weights[peer]) for peer, held in deliveries.items()]
        members, residual = self.peers.list_here(now_s), self._residuals.get(index)
        closed = await asyncio.to_thread(
            close_round,
            self.plan,
            self.state,
            round_.key,
            updates,
            members=members,
            residual=residual,
            open_peers=OpenPeers(frozenset(claims.keys() - named), self._config.open_share),
        )
        if not isinstance(closed, FinishedRound):
            for refusal in closed.refused:
                round_.refuse(refusal.peer, refusal.reason)
            round_.is_closing, round_.first_s, round_.quorum_s = False, None, None
            return
        await asyncio.to_thread(self._keep_round, closed, deliveries, weights, late)
        for peer in closed.outcome.peers:
            self.peers.note_weight(peer, weights[peer])
        for peer in late:
            self.peers.note_miss(peer)
        self._times.append(self._clock_s() - round_.opened_s)
        self.state = closed.state
        self._residuals[index] = closed.aggregate.residual
        self.rounds[index] = self._open_round(index)
        self.changed.notify()

    def _keep_round(
        self, closed: FinishedRound, deliveries: dict[str, ReceivedUpdate], weights: dict[str, int], late: list[str]
    ) -> None:
        """Write a round to disk, outcome first: a start after a kill finds it there and continues the log."""
        outcome = closed.outcome
        self.snapshots.add_outcome(outcome, encode_outcome(self._key, outcome))
        subject = name_subject(outcome.key)
        taken: list[tuple[str, str, dict[str, object]]] = [
            (UPDATE, subject, {"document": deliveries[peer].document.decode(), "weight": weights[peer]})
            for peer in outcome.peers
        ]
        self.round_log.append_all([*taken, (ROUND, subject, describe_round(closed, late))])
        if self.snapshots.is_snap_due():
            self.snapshots.snap(closed.state)


def refuse_stale() -> ApiError:
    """The refusal for a peer that is too late or too early."""
    return ApiError(410, "stale", "this round is not open; take its outcome, or fetch the state")


def _refuse_base() -> ApiError:
    return ApiError(409, "wrong_base", "this round starts from a different outer state; fetch it")


def check_document(document: bytes) -> None:
    """Refuse an offer that is too long for the round log, which stores it when the round closes."""
    try:
        encode_body({"document": document.decode("ascii"), "weight": MAX_TOKENS})
    except (EventError, UnicodeDecodeError):
        raise ApiError(422, "length", "the offer is too long for the round log, or not ASCII") from None


def name_subject(key: RoundKey) -> str:
    """The name of a round in the round log."""
    return f"fragment/{key.fragment}/round/{key.round}"


def describe_round(closed: FinishedRound, late: list[str]) -> dict[str, object]:
    """A round as recorded in the round log."""
    outcome, aggregate = closed.outcome, closed.aggregate
    return {
        "base": outcome.key.base,
        "clipped": list(aggregate.clipped),
        "late": late,
        "outer": closed.state.hash,
        "payload": hashlib.sha256(outcome.payload).hexdigest(),
        "peers": list(outcome.peers),
        "refused": [[refusal.peer, refusal.reason] for refusal in aggregate.refused],
        "state": outcome.state,
        "step": outcome.step,
    }
