"""The reducer: takes updates, closes rounds, answers with one outcome for all.

    offer -> chunks -> whole, finite -> delivered -> round due (open_round) -> close_round -> disk -> chain -> told

Invariants:
- who sends is who signed; an update counts for its signer alone, once in a round;
- rounds close one after the other, by one task; what is told is on disk and in the chain before;
- an update for another round, another base, another run, of another length or not finite is refused and leaves nothing;
- what a peer says never decides how much memory is taken: payloads have the plan's length.

A round closes with what has arrived whole at that moment. An update that is one chunk short then is stale: its peer
hears so, takes the outcome, and goes on from the new state.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np

from shoal.diloco.aggregate import measure_payload
from shoal.diloco.codecs import CodecError, find_codec
from shoal.diloco.http.chain import ROUND, UPDATE, RoundChain
from shoal.diloco.http.messages import Offer, OfferAnswer, count_payload, encode_outcome, read_update
from shoal.diloco.http.open_round import Delivery, Incoming, OpenRound
from shoal.diloco.http.parcel import Parcel
from shoal.diloco.http.roll import Roll
from shoal.diloco.http.settings import Patience, ReducerLimits
from shoal.diloco.http.shelf import Shelf
from shoal.diloco.http.weight import cap_claims
from shoal.diloco.plan import Plan
from shoal.diloco.reduce import Closed, close_round
from shoal.diloco.round import MAX_TOKENS, RoundKey, Update
from shoal.diloco.state import OuterState
from shoal.keys import Key
from shoal.swarm.event import EventError, encode_body
from shoal.swarm.refusal import AuthError

LOOK_S = 0.05
"""between two looks at what is due: deadlines are met this closely"""
_NUM_TIMES = 16


class Reducer:
    """One run's rounds. Call from one event loop."""

    def __init__(
        self,
        plan: Plan,
        key: Key,
        state: OuterState,
        shelf: Shelf,
        chain: RoundChain,
        *,
        patience: Patience,
        limits: ReducerLimits,
        start_peers: int = 1,
        clock_s: Callable[[], float],
    ) -> None:
        self.plan, self.state, self.shelf, self.chain = plan, state, shelf, chain
        self.roll = Roll(patience, limits)
        self._key, self._patience, self._limits, self._clock_s = key, patience, limits, clock_s
        self._start_peers = start_peers
        self._residuals: dict[int, np.ndarray | None] = {}
        self._times: deque[float] = deque(maxlen=_NUM_TIMES)
        self._changed = asyncio.Event()
        self.rounds = [self._open_round(index) for index in range(len(plan.sizes))]
        for peer in state.members[: limits.max_peers]:
            # They were here when this state was made and may come back: without this the first would be a round alone.
            self.roll.join(peer, clock_s())

    @property
    def grace_s(self) -> float:
        """How long a quorum waits for the others."""
        times = sorted(self._times)
        median_s = times[(len(times) - 1) // 2] if times else 0.0
        return max(self._patience.grace_s, self._patience.grace_share * median_s)

    @property
    def counts(self) -> tuple[int, ...]:
        """Rounds that every fragment has behind it."""
        return tuple(part.round for part in self.state.fragments)

    def admit_peer(self, peer: str) -> bool:
        """Take a peer in; whether it reads data from now on, or only from the next round on."""
        self.roll.join(peer, self._clock_s())
        self._reseat_members()
        self._ring()
        return peer in self.state.members

    def take_offer(self, peer: str, offer: Offer, document: bytes) -> OfferAnswer:
        """An update is announced; what of it is wanted."""
        round_ = self._find_round(offer.key)
        if (held := round_.delivered.get(peer)) is not None:
            if held.digest != offer.digest:
                raise AuthError(409, "second", "another update of this peer is in this round already")
            return OfferAnswer(status="delivered")
        self._check_offer(offer)
        check_document(document)
        incoming = round_.incoming.get(peer)
        if incoming is None or incoming.offer != offer:
            size = count_payload(self.plan, offer.fragment)
            incoming = round_.incoming[peer] = Incoming(offer, document, Parcel(size, offer.digest))
        return OfferAnswer(status="open", missing=incoming.parcel.list_missing())

    def find_parcel(self, peer: str, fragment: int, round_number: int, digest: str) -> Parcel:
        """Where a chunk of this peer's update goes."""
        if fragment >= len(self.rounds):
            raise AuthError(404, "not_found", "there is no such fragment")
        round_ = self.rounds[fragment]
        if round_.key.round != round_number or round_.is_closing:
            raise refuse_stale()
        incoming = round_.incoming.get(peer)
        if incoming is None or incoming.offer.digest != digest:
            raise AuthError(409, "no_offer", "this update was not offered, or another one since")
        return incoming.parcel

    async def deliver_parcel(self, peer: str, fragment: int, parcel: Parcel) -> None:
        """All chunks are here: look whether it is sound, and count it."""
        round_ = self.rounds[fragment]
        incoming = round_.incoming.get(peer)
        if incoming is None or incoming.parcel is not parcel or round_.is_closing:
            raise refuse_stale()
        payload = await asyncio.to_thread(parcel.open)
        if payload is None:
            raise AuthError(422, "digest", "the payload is not the one that was offered")
        update = read_update(incoming.offer, peer, payload)
        reason = await asyncio.to_thread(self._find_fault, update)
        if reason:
            round_.refuse(peer, reason)
            self._ring()
            raise AuthError(422, "refused", reason)
        if round_.is_closing or self.rounds[fragment] is not round_:
            raise refuse_stale()
        round_.deliver(peer, Delivery(update, incoming.document, parcel.digest), self._clock_s())
        self.roll.note_delivery(peer)
        self._ring()

    def note_lost(self, peer: str) -> None:
        """A connection of this peer broke."""
        self.roll.note_lost(peer, self._clock_s())
        self._ring()

    def note_seen(self, peer: str) -> None:
        """This peer was heard of."""
        self.roll.note_seen(peer, self._clock_s())

    def remove_peer(self, peer: str) -> None:
        """This peer leaves."""
        self.roll.leave(peer)
        self._ring()

    def describe(self) -> dict[str, object]:
        """Rounds, who is here and whom each round waits for."""
        now_s = self._clock_s()
        awaited = self._list_awaited(now_s)
        rounds: list[object] = [
            {"delivered": sorted(round_.delivered), "late": round_.list_late(awaited), "round": round_.key.round}
            for round_ in self.rounds
        ]
        here = list(self.roll.list_here(now_s))
        return {"here": here, "members": list(self.state.members), "outer": self.state.hash, "rounds": rounds}

    @property
    def bell(self) -> asyncio.Event:
        """Rings at the next change. Take it before you look at what you wait for."""
        return self._changed

    async def run(self) -> None:
        """Close rounds for ever."""
        while True:
            with suppress(TimeoutError):  # time alone makes rounds due, too
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            self._reseat_members()
            for index in range(len(self.rounds)):
                if self._is_due(self.rounds[index]):
                    await self._close_round(index)

    def _open_round(self, index: int) -> OpenRound:
        return OpenRound(self.plan.name_round(self.state, index), self._clock_s())

    def _find_round(self, key: RoundKey) -> OpenRound:
        if key.run != self.plan.run or key.fragment >= len(self.rounds):
            raise AuthError(404, "not_found", "there is no such run or fragment")
        round_ = self.rounds[key.fragment]
        if key.round != round_.key.round or round_.is_closing:
            raise refuse_stale()
        if key.base != round_.key.base:
            raise AuthError(409, "wrong_base", "this round starts from another outer state; fetch it")
        return round_

    def _check_offer(self, offer: Offer) -> None:
        if offer.codec != self.plan.rules.codec:
            raise AuthError(422, "codec", f"updates are written in {self.plan.rules.codec} here")
        if offer.size != count_payload(self.plan, offer.fragment):
            raise AuthError(422, "length", "an update of another length than this fragment's")
        if any(lane >= self.plan.num_lanes for lane, _ in offer.lanes):
            raise AuthError(422, "lanes", "a data lane that there is not")

    def _find_fault(self, update: Update) -> str:
        """Why an update cannot be used; empty if it can."""
        try:
            measure_payload(find_codec(update.codec), update.payload, self.plan.sizes[update.key.fragment])
        except CodecError as error:
            return str(error)
        return ""

    def _list_awaited(self, now_s: float) -> set[str]:
        return {peer for peer in self.state.members if self.roll.is_awaited(peer, now_s)}

    def _reseat_members(self) -> None:
        """Change the members without a round, where there is nobody whom it could take by surprise.

        That is at the start, once there are enough, and when no member is here any more and nothing is on its way.
        """
        now_s = self._clock_s()
        here = self.roll.list_here(now_s)
        is_busy = any(round_.delivered or round_.incoming for round_ in self.rounds)
        enough = 1 if self.state.members else self._start_peers
        if len(here) >= enough and not is_busy and not self._list_awaited(now_s):
            self.state = OuterState(self.state.fragments, self.state.step, here, self.state.lanes)
            self._ring()

    def _is_due(self, round_: OpenRound) -> bool:
        now_s = self._clock_s()
        return round_.is_due(self._list_awaited(now_s), now_s, self.grace_s, self._patience.longest_s)

    async def _close_round(self, index: int) -> None:
        round_, now_s = self.rounds[index], self._clock_s()
        round_.is_closing = True
        late = round_.list_late(self._list_awaited(now_s))
        deliveries = dict(round_.delivered)
        claims = {peer: held.update.tokens for peer, held in deliveries.items()}
        weights = cap_claims(claims, self.roll.read_records(), self._limits.record_factor)
        updates = [replace(held.update, tokens=weights[peer]) for peer, held in deliveries.items()]
        members = self.roll.list_here(now_s)
        closed = await asyncio.to_thread(
            close_round,
            self.plan,
            self.state,
            round_.key,
            updates,
            members=members,
            residual=self._residuals.get(index),
        )
        if not isinstance(closed, Closed):
            for refusal in closed.refused:
                round_.refuse(refusal.peer, refusal.reason)
            round_.is_closing, round_.first_s, round_.quorum_s = False, None, None
            return
        await asyncio.to_thread(self._keep_round, closed, deliveries, weights, late)
        self._finish_round(index, closed, weights, late)

    def _keep_round(
        self, closed: Closed, deliveries: dict[str, Delivery], weights: dict[str, int], late: list[str]
    ) -> None:
        """Bring a round to disk, outcome first: a start after a kill finds it there and continues the chain."""
        outcome = closed.outcome
        self.shelf.add_outcome(outcome, encode_outcome(self._key, outcome))
        subject = name_subject(outcome.key)
        taken: list[tuple[str, str, dict[str, object]]] = [
            (UPDATE, subject, {"document": deliveries[peer].document.decode(), "weight": weights[peer]})
            for peer in outcome.peers
        ]
        self.chain.append_all([*taken, (ROUND, subject, describe_round(closed, late))])
        self.chain.write_head()
        if self.shelf.is_snap_due():
            self.shelf.snap(closed.state)

    def _finish_round(self, index: int, closed: Closed, weights: dict[str, int], late: list[str]) -> None:
        round_, now_s = self.rounds[index], self._clock_s()
        for peer in closed.outcome.peers:
            self.roll.note_weight(peer, weights[peer])
        for peer in late:
            self.roll.note_miss(peer)
        self._times.append(now_s - round_.opened_s)
        self.state = closed.state
        self._residuals[index] = closed.aggregate.residual
        self.rounds[index] = self._open_round(index)
        self._ring()

    def _ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def refuse_stale() -> AuthError:
    """What a peer hears that is too late, or too early."""
    return AuthError(410, "stale", "this round is not open; take its outcome, or fetch the state")


def check_document(document: bytes) -> None:
    """Refuse an offer that is too long for the chain, where it stands once its round is closed."""
    try:
        encode_body({"document": document.decode("ascii"), "weight": MAX_TOKENS})
    except (EventError, UnicodeDecodeError):
        raise AuthError(422, "length", "an offer longer than the chain takes, or not in ASCII") from None


def name_subject(key: RoundKey) -> str:
    """A round in the chain."""
    return f"fragment/{key.fragment}/round/{key.round}"


def describe_round(closed: Closed, late: list[str]) -> dict[str, object]:
    """A round as the chain tells of it."""
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
