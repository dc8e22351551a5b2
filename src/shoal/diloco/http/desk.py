"""What stands between the reducer's routes and its decisions: who may call, what is read from disk, and the search.

A desk has a reducer, or searches for a state to make one from (`rebuild`); never both.
"""

import asyncio
from collections.abc import Callable

from shoal.canonical import encode_canonical
from shoal.diloco.http.messages import (
    CHUNK_BYTES,
    Holding,
    HoldingAnswer,
    JoinAnswer,
    Offer,
    StateHead,
    WatchAnswer,
    make_card,
    open_message,
    read_message,
    sign_message,
)
from shoal.diloco.http.parcel import Parcel
from shoal.diloco.http.rebuild import Rebuild
from shoal.diloco.http.reducer import Reducer, refuse_stale
from shoal.diloco.plan import Plan
from shoal.diloco.round import RoundKey
from shoal.diloco.state import OuterState
from shoal.keys import Key
from shoal.shardcast.metrics import Registry
from shoal.swarm.buckets import Buckets
from shoal.swarm.nonces import NonceBook
from shoal.swarm.refusal import AuthError
from shoal.swarm.request_head import RawHeaders
from shoal.swarm.server_auth import Authenticator, AuthLimits, Caller, Member, name_address
from shoal.swarm.tags import Tag
from shoal.swarm.work import WorkGate

OPEN_RATE, OPEN_BURST = 20.0, 60.0
_MAX_TRACKED = 4096
MakeReducer = Callable[[OuterState, Rebuild], Reducer]


class Desk:
    """Everything a route needs."""

    def __init__(
        self,
        plan: Plan,
        key: Key,
        *,
        start: Reducer | Rebuild,
        make_reducer: MakeReducer,
        gate: WorkGate,
        nonces: NonceBook,
        registry: Registry,
        allowed: frozenset[str],
        auth_limits: AuthLimits,
        clock_ms: Callable[[], int],
    ) -> None:
        self.plan, self.clock_ms = plan, clock_ms
        self.card = sign_message(key, Tag.PLAN, make_card(plan))
        self.refusals = registry.add_counter("shoal_diloco_refused_total", "Requests refused, by code.", "code")
        self._key, self._gate, self._allowed = key, gate, allowed
        self._start, self._make_reducer = start, make_reducer
        self._ending = asyncio.Lock()
        self._guests: set[str] = set()
        """who joined while there is no reducer"""
        self._strangers = Buckets(OPEN_RATE, OPEN_BURST, _MAX_TRACKED)
        self._authenticator = Authenticator(
            run=plan.run,
            audience=key.public,
            find_member=self._find_member,
            nonces=nonces,
            gate=gate,
            limits=auth_limits,
        )

    @property
    def is_searching(self) -> bool:
        """Whether there is no state yet."""
        return isinstance(self._start, Rebuild)

    @property
    def reducer(self) -> Reducer:
        """Who decides."""
        if not isinstance(self._start, Reducer):
            raise self.refuse_phase()
        return self._start

    @property
    def search(self) -> Rebuild:
        """What looks for a state."""
        if not isinstance(self._start, Rebuild):
            raise self.refuse_phase()
        return self._start

    @property
    def num_rounds(self) -> int:
        """Rounds closed, of all fragments."""
        return sum(self.reducer.counts)

    def refuse_phase(self) -> AuthError:
        """What is heard for a request that comes at the wrong time."""
        if self.is_searching:
            return AuthError(503, "rebuilding", "this reducer looks for a state; offer the one you hold")
        return AuthError(410, "serving", "this reducer has a state")

    def check_stranger(self, address: str) -> None:
        """Refuse an address that asks too often."""
        now_s, name = self.clock_ms() / 1000, name_address(address)
        if self._strangers.find_wait(name, now_s) > 0.0:
            raise AuthError(429, "too_many", "too many requests; try again in 1 s", retry_after_s=1)
        self._strangers.take_tokens(name, now_s)

    def check_caller(
        self, method: str, target: str, headers: RawHeaders, address: str, now_ms: int, *, max_body_bytes: int
    ) -> Caller:
        """Who calls, if it is a peer of this run."""
        caller = self._authenticator.check_head(method, target, headers, address, now_ms, max_body_bytes=max_body_bytes)
        if not self.is_searching:
            self.reducer.note_seen(caller.node)
        return caller

    def check_join(self, method: str, target: str, headers: RawHeaders, address: str, now_ms: int) -> Caller:
        """The same for who wants to be one."""
        return self._authenticator.check_join(method, target, headers, address, now_ms)

    def make_challenge(self, node: str, salt: bytes) -> bytes:
        """Work to do before joining."""
        return self._gate.make_challenge(node, self.clock_ms(), salt).encode()

    def join(self, peer: str) -> bytes:
        """Take a peer in."""
        if self._allowed and peer not in self._allowed:
            raise AuthError(403, "not_invited", "this run names its peers, and this key is none of them")
        self._gate.rate.note_join(self.clock_ms() / 1000)
        if self.is_searching:
            self._guests.add(peer)
            return JoinAnswer(rounds=(), is_member=False).model_dump_json().encode()
        is_member = self.reducer.admit_peer(peer)
        return JoinAnswer(rounds=self.reducer.counts, is_member=is_member).model_dump_json().encode()

    def leave(self, peer: str) -> bytes:
        """Let a peer go."""
        self.reducer.remove_peer(peer)
        return b"{}"

    def note_lost(self, peer: str) -> None:
        """A connection of this peer broke."""
        if not self.is_searching:
            self.reducer.note_lost(peer)

    @property
    def bell(self) -> asyncio.Event:
        """As `Reducer.bell`."""
        return self.reducer.bell

    def tell_rounds(self) -> bytes:
        """Where every fragment is."""
        return WatchAnswer(rounds=self.reducer.counts).model_dump_json().encode()

    def take_offer(self, peer: str, document: bytes) -> bytes:
        """An update is announced, by its maker."""
        signer, offer = open_message(None, Tag.UPDATE, document, Offer)
        if signer != peer:
            raise AuthError(403, "other_peer", "an update is offered by who signed it")
        return self.reducer.take_offer(peer, offer, document).model_dump_json().encode()

    def take_holding(self, peer: str, body: bytes) -> bytes:
        """A peer says what state it holds."""
        answer: HoldingAnswer = self.search.take_holding(peer, read_message(body, Holding))
        return answer.model_dump_json().encode()

    async def end_search(self, parcel: Parcel) -> None:
        """All of a state is here: serve it if it is right."""
        async with self._ending:  # a chunk that comes twice must not make two reducers of one folder
            if not self.is_searching or not parcel.is_whole:
                return
            search = self.search
            state = await asyncio.to_thread(search.open_state, parcel)
            if state is None:
                raise AuthError(422, "digest", "the state is not the one that was offered")
            self._start = reducer = await asyncio.to_thread(self._make_reducer, state, search)
        for peer in self._guests:
            reducer.admit_peer(peer)

    def check_round(self, fragment: int, number: int, base: str) -> None:
        """Refuse to wait for what will never be."""
        if fragment >= len(self.plan.sizes):
            raise AuthError(404, "not_found", "there is no such fragment")
        open_key = self.reducer.rounds[fragment].key
        if number > open_key.round or (number == open_key.round and base != open_key.base):
            raise AuthError(409, "wrong_base", "this round starts from another outer state; fetch it")

    def is_closed(self, fragment: int, number: int) -> bool:
        """Whether a round is over."""
        return self.reducer.counts[fragment] > number

    async def read_outcome(self, key: RoundKey, index: int) -> bytes:
        """A chunk of an outcome; the first holds its head. Empty: not there yet."""
        if not self.is_closed(key.fragment, key.round):
            return b""
        read = self.reducer.shelf.read_outcome
        data = await asyncio.to_thread(read, key, index * CHUNK_BYTES, CHUNK_BYTES)
        if data is None:
            raise refuse_stale()
        return data

    def may_fetch(self, peer: str) -> bool:
        """Whether this peer can start from the state as it is: a newcomer not before it is a member.

        Who was evicted is none until it delivers again, and can deliver only from the newest state.
        """
        return peer in self.reducer.state.members or self.reducer.roll.is_evicted(peer)

    async def offer_state(self, peer: str) -> bytes:
        """The head of the newest state, signed, ready for download."""
        if not self.may_fetch(peer):
            raise AuthError(503, "not_yet", "this peer counts from the next round on; ask again", retry_after_s=0)
        state = self.reducer.state
        size, digest = await asyncio.to_thread(self.reducer.shelf.export, state)
        rounds = tuple(part.round for part in state.fragments)
        head = StateHead(run=self.plan.run, hash=state.hash, size=size, digest=digest, rounds=rounds)
        return sign_message(self._key, Tag.STATE, head)

    async def read_state(self, digest: str, index: int) -> bytes:
        """A chunk of a state."""
        read = self.reducer.shelf.read_state
        data = await asyncio.to_thread(read, digest, index * CHUNK_BYTES, CHUNK_BYTES)
        if data is None:
            raise AuthError(410, "stale", "this state is gone; ask for the newest")
        return data

    def describe(self) -> bytes:
        """The run at a glance: rounds, who is here, who is waited for."""
        if self.is_searching:
            return encode_canonical({"phase": "rebuilding", "offers": self.search.num_offers, "run": self.plan.run})
        return encode_canonical({"phase": "serving", "run": self.plan.run, **self.reducer.describe()})

    def _find_member(self, peer: str) -> Member | None:
        known = self._guests if self.is_searching else self.reducer.roll
        return Member(owner=peer, scopes=frozenset()) if peer in known else None
