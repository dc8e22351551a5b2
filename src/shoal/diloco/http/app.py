"""The routes of a DiLoCo reducer under /v1/diloco, and the context that they share.

A context either has a reducer or recovers a state from the peers to start one; never both.

Invariants:
- chunks of a payload are read only if they are expected, and only at their expected length;
- a waiting response takes at most `?wait=` seconds; a peer that disconnects meanwhile is noted as lost.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable

from prometheus_client import CollectorRegistry

from shoal import __version__
from shoal.diloco.http.messages import (
    CHUNK_BYTES,
    HeldState,
    JoinAnswer,
    MessageError,
    Payload,
    StateHead,
    UpdateOffer,
    WantedChunks,
    WatchAnswer,
    make_card,
    open_message,
    sign_message,
)
from shoal.diloco.http.reducer import Reducer, refuse_stale
from shoal.diloco.http.settings import ReducerConfig
from shoal.diloco.http.state_recovery import StateRecovery
from shoal.diloco.outer import DilocoPlan
from shoal.diloco.round import RoundKey
from shoal.diloco.state import OuterState
from shoal.identity.authenticator import Authenticator, Caller, Member, name_address, take_token
from shoal.identity.documents import Tag
from shoal.identity.keys import Key
from shoal.identity.nonces import NonceStore
from shoal.identity.proof_of_work import JoinRate, WorkGate
from shoal.identity.routes import BINARY, Access, Route, RouteApp, RouteContext, RouteRequest, RouteTable, WaitSeconds
from shoal.identity.signatures import ResponseSigner
from shoal.net.api_error import ApiError
from shoal.net.http import HttpError
from shoal.net.limits import Buckets
from shoal.protocol.messages import Digest, Number
from shoal.util.aio import wait_any
from shoal.util.canonical import encode_canonical
from shoal.util.clock import read_clock
from shoal.util.metrics import METRICS_TYPE, Counter, render_metrics

PUBLIC_RATE, PUBLIC_BURST = 20.0, 60.0
TIMEOUT_S = 600.0
"""timeout of a handler: the states of large models take a while to write and hash"""
_MAX_TRACKED = 4096
MakeReducer = Callable[[OuterState, StateRecovery], Reducer]

reducer_routes = RouteTable("/v1/diloco", "peers")
operator_routes = RouteTable(tag="operator")


class PeerGate(WorkGate):
    """The price of joining: for named peers, and a higher one for all others, which rises with their rate alone."""

    def __init__(self, run: str, config: ReducerConfig) -> None:
        secret, limits = os.urandom(32), config.limits
        super().__init__(secret, run, JoinRate(base_work=limits.join_work))
        self._open = WorkGate(secret, run, JoinRate(base_work=limits.open_work))
        self._named = frozenset(config.peers)

    def find_rate(self, peer: str) -> JoinRate:
        """The rate that this peer's joins count for."""
        return self.rate if peer in self._named else self._open.rate

    def make_challenge(self, node: str, now_ms: int, salt: bytes) -> str:
        """As `WorkGate.make_challenge`."""
        make = super().make_challenge if node in self._named else self._open.make_challenge
        return make(node, now_ms, salt)

    def check_stamp(self, stamp: str, node: str, now_ms: int) -> None:
        """As `WorkGate.check_stamp`."""
        check = super().check_stamp if node in self._named else self._open.check_stamp
        check(stamp, node, now_ms)


class ReducerContext(RouteContext):
    """Shared state of the handlers. One per process, for one event loop."""

    def __init__(
        self,
        plan: DilocoPlan,
        key: Key,
        config: ReducerConfig,
        *,
        start: Reducer | StateRecovery,
        make_reducer: MakeReducer,
        nonces: NonceStore,
        registry: CollectorRegistry,
    ) -> None:
        self.plan, self.key, self.clock_ms = plan, key, read_clock
        self.responses = ResponseSigner(key, plan.run, read_clock)
        self.gate = PeerGate(plan.run, config)
        self.signed_plan = sign_message(key, Tag.PLAN, make_card(plan))
        text = "Requests refused, by code."
        self.registry = registry
        self.refusals = Counter("shoal_diloco_refused_total", text, ["code"], registry=registry)
        self._named, self._is_open = frozenset(config.peers), config.open_share > 0.0
        self._active, self._make_reducer = start, make_reducer
        self._finishing = asyncio.Lock()
        self._joined: set[str] = set()
        """peers that joined while there was no reducer"""
        self._addresses = Buckets(PUBLIC_RATE, PUBLIC_BURST, _MAX_TRACKED)
        self.authenticator = Authenticator(
            run=plan.run,
            audience=key.public,
            find_member=self._find_member,
            nonces=nonces,
            gate=self.gate,
            limits=config.auth,
        )

    @property
    def max_stream_bytes(self) -> int:
        """Bytes of a chunk."""
        return CHUNK_BYTES

    @property
    def is_recovering(self) -> bool:
        """Whether there is no state yet."""
        return isinstance(self._active, StateRecovery)

    @property
    def reducer(self) -> Reducer:
        """The reducer; `ApiError` during recovery."""
        if not isinstance(self._active, Reducer):
            raise ApiError(503, "rebuilding", "this reducer has no state yet; offer the one you hold")
        return self._active

    @property
    def recovery(self) -> StateRecovery:
        """The recovery of a state; `ApiError` after it has finished."""
        if not isinstance(self._active, StateRecovery):
            raise ApiError(410, "serving", "this reducer already has a state")
        return self._active

    def check_address(self, access: Access, method: str, address: str) -> None:
        """See `RouteContext.check_address`."""
        take_token(self._addresses, name_address(address), self.clock_ms() / 1000)

    def check_caller(self, route: Route, request: RouteRequest) -> Caller | None:
        """See `RouteContext.check_caller`; a call marks a member as present."""
        caller = super().check_caller(route, request)
        if caller is not None and caller.member is not None and not self.is_recovering:
            self.reducer.note_seen(caller.node)
        return caller

    def explain_error(self, error: Exception) -> ApiError | None:
        """See `RouteContext.explain_error`; also covers malformed documents."""
        if isinstance(error, MessageError):
            return ApiError(422, "invalid", str(error))
        return super().explain_error(error)

    def note_disconnect(self, caller: Caller) -> None:
        """Note that a connection of this peer broke."""
        if not self.is_recovering:
            self.reducer.note_lost(caller.node)

    def join(self, peer: str) -> JoinAnswer:
        """Admit a peer."""
        if peer not in self._named and not self._is_open:
            text = f"{peer} is not in the run's list of peers; its operator adds it with --peer"
            raise ApiError(403, "not_invited", text)
        if peer not in self._named and self.is_recovering:
            raise ApiError(503, "rebuilding", "this reducer has no state yet, and asks only its named peers for it")
        self.gate.find_rate(peer).note_join(self.clock_ms() / 1000)
        if self.is_recovering:
            self._joined.add(peer)
            return JoinAnswer(rounds=(), is_member=False)
        is_member = self.reducer.admit_peer(peer)
        return JoinAnswer(rounds=self.reducer.state.rounds, is_member=is_member)

    async def finish_recovery(self, payload: Payload) -> None:
        """Serve the state that has arrived completely, if it is valid."""
        async with self._finishing:  # a repeated chunk must not create two reducers for one folder
            if not self.is_recovering or not payload.is_whole:
                return
            recovery = self.recovery
            state = await asyncio.to_thread(recovery.open_state, payload)
            if state is None:
                raise ApiError(422, "digest", "the state does not match the offered digest")
            self._active = reducer = await asyncio.to_thread(self._make_reducer, state, recovery)
        for peer in self._joined:
            reducer.admit_peer(peer)

    async def wait_until(
        self, is_ready: Callable[[], bool], caller: Caller, request: RouteRequest, wait_s: float
    ) -> None:
        """Wait until something is true or `wait_s` have passed, as long as the peer is connected."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + wait_s
        disconnect = asyncio.ensure_future(request.wait_disconnect())
        try:
            while not is_ready() and (left_s := end_s - loop.time()) > 0:
                await wait_any([self.reducer.changed], left_s, disconnect)
                if disconnect.done():
                    self.note_disconnect(caller)
                    raise HttpError("the peer disconnected")
        finally:
            disconnect.cancel()

    def describe(self) -> dict[str, object]:
        """Summary of the run: rounds, peers present, peers awaited."""
        if self.is_recovering:
            return {"phase": "rebuilding", "offers": self.recovery.num_offers, "run": self.plan.run}
        return {"phase": "serving", "run": self.plan.run, **self.reducer.describe()}

    def _find_member(self, peer: str) -> Member | None:
        known = self._joined if self.is_recovering else self.reducer.peers
        return Member(owner=peer, scopes=frozenset()) if peer in known else None


def build_reducer_app(context: ReducerContext) -> RouteApp:
    """The ASGI app of a reducer."""
    return RouteApp(
        context,
        (reducer_routes, operator_routes),
        title="shoal DiLoCo reducer",
        version=__version__,
        timeout_s=TIMEOUT_S,
        media_type=BINARY,
    )


@reducer_routes.get("/plan", Access.PUBLIC, answer=BINARY)
def get_plan(context: ReducerContext) -> bytes:
    """The agreed settings of the run, signed."""
    return context.signed_plan


@reducer_routes.get("/status", Access.PUBLIC, answer=BINARY)
def get_status(context: ReducerContext) -> bytes:
    """Summary of the run, as JSON."""
    return encode_canonical(context.describe())


@operator_routes.get("/metrics", Access.PUBLIC, answer=METRICS_TYPE)
def get_metrics(context: ReducerContext) -> bytes:
    """Metrics for Prometheus."""
    return render_metrics(context.registry)


@reducer_routes.get("/challenges/{node}", Access.PUBLIC, answer=BINARY)
def get_challenge(context: ReducerContext, node: Digest) -> bytes:
    """The proof of work that this peer must do to join."""
    return context.gate.make_challenge(node, context.clock_ms(), os.urandom(8)).encode()


@reducer_routes.post("/join", Access.JOIN)
def post_join(context: ReducerContext, caller: Caller) -> JoinAnswer:
    """Join the run; requires a proof of work in the header Shoal-Work."""
    return context.join(caller.node)


@reducer_routes.post("/leave", Access.MEMBER, answer=BINARY)
def post_leave(context: ReducerContext, caller: Caller) -> bytes:
    """Leave the run: rounds no longer wait for this peer."""
    context.reducer.remove_peer(caller.node)
    return b"{}"


@reducer_routes.get("/watch/{known}", Access.MEMBER)
async def watch_rounds(
    context: ReducerContext, caller: Caller, request: RouteRequest, known: Number, wait_s: WaitSeconds
) -> WatchAnswer:
    """Completed rounds of every fragment, once their sum differs from `known`."""
    await context.wait_until(lambda: sum(context.reducer.state.rounds) != known, caller, request, wait_s)
    return WatchAnswer(rounds=context.reducer.state.rounds)


@reducer_routes.post("/offers", Access.MEMBER)
def post_offer(context: ReducerContext, caller: Caller, body: bytes) -> WantedChunks:
    """Announce an update; the body is signed by the peer that made it."""
    signer, offer = open_message(None, Tag.UPDATE, body, UpdateOffer)
    if signer != caller.node:
        raise ApiError(403, "other_peer", "an update must be offered by the peer that signed it")
    return context.reducer.take_offer(caller.node, offer, body)


@reducer_routes.put("/updates/{fragment}/{number}/{digest}/{index}", Access.MEMBER, answer=BINARY)
async def put_update_chunk(
    context: ReducerContext,
    caller: Caller,
    chunks: AsyncIterator[bytes],
    fragment: Number,
    number: Number,
    digest: Digest,
    index: Number,
) -> bytes:
    """Upload a chunk of an offered update."""
    reducer = context.reducer
    payload = reducer.find_payload(caller.node, fragment, number, digest)
    await _receive_chunk(caller, chunks, payload, index)
    if payload.is_whole:
        await reducer.deliver(caller.node, fragment, payload)
    return b"{}"


@reducer_routes.post("/holdings", Access.MEMBER)
def post_held_state(context: ReducerContext, caller: Caller, message: HeldState) -> WantedChunks:
    """Announce which state this peer holds, to a reducer that has none."""
    return context.recovery.take_holding(caller.node, message)


@reducer_routes.put("/holdings/{digest}/{index}", Access.MEMBER, answer=BINARY)
async def put_state_chunk(
    context: ReducerContext, caller: Caller, chunks: AsyncIterator[bytes], digest: Digest, index: Number
) -> bytes:
    """Upload a chunk of the state that this peer was asked for."""
    recovery = context.recovery
    payload = recovery.find_payload(caller.node, digest)
    await _receive_chunk(caller, chunks, payload, index, recovery.note_progress)
    if payload.is_whole:
        await context.finish_recovery(payload)
    return b"{}"


@reducer_routes.get("/outcomes/{fragment}/{number}/{base}/{index}", Access.MEMBER, answer=BINARY)
async def get_outcome(
    context: ReducerContext,
    caller: Caller,
    request: RouteRequest,
    fragment: Number,
    number: Number,
    base: Digest,
    index: Number,
    wait_s: WaitSeconds,
) -> bytes:
    """A chunk of the outcome of a closed round; the first begins with the head. Empty while the round is open."""
    reducer = context.reducer
    reducer.check_round(fragment, number, base)
    await context.wait_until(lambda: reducer.is_closed(fragment, number), caller, request, wait_s)
    if not reducer.is_closed(fragment, number):
        return b""
    key = RoundKey(context.plan.run, number, fragment, base)
    data = await asyncio.to_thread(reducer.snapshots.read_outcome, key, index)
    if data is None:
        raise refuse_stale()
    return data


@reducer_routes.get("/state", Access.MEMBER, answer=BINARY)
async def get_state(context: ReducerContext, caller: Caller, request: RouteRequest, wait_s: WaitSeconds) -> bytes:
    """The signed head of the newest state, once this peer may start from it."""
    reducer, peer = context.reducer, caller.node
    await context.wait_until(lambda: reducer.may_fetch(peer), caller, request, wait_s)
    if not reducer.may_fetch(peer):
        raise ApiError(503, "not_yet", "this peer takes part from the next round on; ask again", retry_after_s=0)
    state = reducer.state
    size, digest = await asyncio.to_thread(reducer.snapshots.export, state)
    head = StateHead(run=context.plan.run, hash=state.hash, size=size, digest=digest, rounds=state.rounds)
    return sign_message(context.key, Tag.STATE, head)


@reducer_routes.get("/states/{digest}/{index}", Access.MEMBER, answer=BINARY)
async def get_state_chunk(context: ReducerContext, digest: Digest, index: Number) -> bytes:
    """A chunk of a state whose head was fetched."""
    data = await asyncio.to_thread(context.reducer.snapshots.read_state, digest, index)
    if data is None:
        raise ApiError(410, "stale", "this state is no longer available; fetch the newest one")
    return data


async def _receive_chunk(
    caller: Caller,
    chunks: AsyncIterator[bytes],
    payload: Payload,
    index: int,
    note_progress: Callable[[], None] = lambda: None,
) -> None:
    if caller.length != payload.measure_chunk(index) or caller.length == 0:
        raise ApiError(422, "length", "wrong chunk length")
    pieces = []
    async for piece in chunks:
        pieces.append(piece)
        note_progress()
    payload.put_chunk(index, b"".join(pieces))
