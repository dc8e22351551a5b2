"""A reducer as a process: its files, its server, and the order in which they start and stop.

    data/reducer.key    the reducer's key, which peers pin      data/rounds.jsonl, head.json   the chain of rounds
    data/plan.json      what the run has agreed on              data/nonces.db                 requests that were seen
    data/snapshot.bin, outcomes/, states/                       the outer state (see `shelf`)

Invariants:
- a run begins from a given state, goes on from what is on disk, or is rebuilt from its peers; which of them is said;
- requests are answered only after the state is on disk and the start is in the chain.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from shoal.config import Settings
from shoal.diloco.http.app import ReducerApp
from shoal.diloco.http.chain import REBUILT, ROUND, UP, RoundChain
from shoal.diloco.http.desk import Desk
from shoal.diloco.http.messages import (
    MAX_FRAGMENTS,
    MAX_LANES,
    MAX_SEED,
    Card,
    TalkError,
    make_card,
    read_card,
    read_message,
)
from shoal.diloco.http.rebuild import Rebuild
from shoal.diloco.http.reducer import Reducer, name_subject
from shoal.diloco.http.settings import Patience, ReducerLimits
from shoal.diloco.http.shelf import Shelf
from shoal.diloco.plan import Plan
from shoal.diloco.state import OuterState
from shoal.errors import ConfigError
from shoal.files import write_atomic
from shoal.keys import Key
from shoal.shardcast.metrics import Registry
from shoal.swarm.clock import read_clock
from shoal.swarm.exchange import HttpLimits
from shoal.swarm.nonces import NonceBook
from shoal.swarm.serve import Server, load_tls
from shoal.swarm.server_auth import AuthLimits
from shoal.swarm.wire import BULK_BYTES
from shoal.swarm.work import JoinRate, WorkGate

PublicKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_AUTH = AuthLimits(address_rate=2000.0, owner_rate=1000.0)
"""a payload goes in chunks, a request each"""
_HTTP = HttpLimits(max_connections=1024, per_peer_connections=32, min_rate=16 * 1024, grace_seconds=2.0)


class ReducerConfig(Settings):
    """Everything about one reducer, but for the plan."""

    host: str = "127.0.0.1"
    """address to listen on; this machine only by default"""
    port: Annotated[int, Field(ge=0, lt=1 << 16)] = 8710
    """0: any that is free"""
    start_peers: Annotated[int, Field(ge=1, le=128)] = 1
    """peers that must have joined before the first round"""
    peers: Annotated[tuple[PublicKey, ...], Field(max_length=128)] = ()
    """who may take part; empty: whoever does the work of joining"""
    tls_certificate: str = ""
    """PEM file; empty: plain HTTP, for this machine or behind a proxy"""
    tls_key: str = ""
    """PEM file"""
    patience: Patience = Patience()
    limits: ReducerLimits = ReducerLimits()
    http: HttpLimits = _HTTP
    auth: AuthLimits = _AUTH


class Service:
    """A reducer that answers. Made by `open_reducer`."""

    def __init__(self, desk: Desk, server: Server, scheme: str, public: str) -> None:
        self.desk, self._server, self._scheme, self.public = desk, server, scheme, public

    @property
    def url(self) -> str:
        """Where it is reached."""
        host, port = self._server.address
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def run(self) -> None:
        """Close rounds for ever, once there is a state."""
        while self.desk.is_searching:
            await asyncio.sleep(0.02)
        await self.desk.reducer.run()


def read_plan(data: Path) -> Plan | None:
    """The plan that a reducer's folder holds, if it holds one."""
    path = data / "plan.json"
    if not path.exists():
        return None
    try:
        return read_card(read_message(path.read_bytes(), Card))
    except TalkError as error:
        raise ConfigError(f"{path}: no plan of a run ({error})") from None


@asynccontextmanager
async def open_reducer(
    config: ReducerConfig, data: Path, plan: Plan, *, initial: OuterState | None = None
) -> AsyncIterator[Service]:
    """Start a reducer; without a state on disk or an initial one it asks its peers for theirs."""
    data.mkdir(parents=True, exist_ok=True)
    plan = settle_plan(plan)
    _keep_plan(data, plan)
    key = load_key(data)
    tls = load_tls(Path(config.tls_certificate), Path(config.tls_key)) if config.tls_certificate else None
    async with AsyncExitStack() as stack:
        nonces = NonceBook(data / "nonces.db", window_s=config.auth.window_s, keep_s=5 * config.auth.window_s)
        stack.callback(nonces.close)
        maker = _Maker(config, plan, key, data)
        start = await asyncio.to_thread(maker.start, initial)
        registry = Registry()
        desk = Desk(
            plan,
            key,
            start=start,
            make_reducer=maker.rebuild,
            gate=WorkGate(os.urandom(32), plan.run, JoinRate(base_work=config.limits.join_work)),
            nonces=nonces,
            registry=registry,
            allowed=frozenset(config.peers),
            auth_limits=config.auth,
            clock_ms=read_clock,
        )
        server = Server(ReducerApp(desk), limits=config.http, registry=registry, tls=tls, held_bytes=BULK_BYTES)
        await server.start(config.host, config.port)
        stack.push_async_callback(server.close)
        yield Service(desk, server, "http" if tls is None else "https", key.public)


class _Maker:
    """Makes the reducer, from disk, from a given state or from a peer's."""

    def __init__(self, config: ReducerConfig, plan: Plan, key: Key, data: Path) -> None:
        self._config, self._plan, self._key = config, plan, key
        limits = config.limits
        self._shelf = Shelf(data, plan, key.public, keep=limits.keep_outcomes, snapshot_every=limits.snapshot_every)
        self._chain = RoundChain(data, plan.run, key)

    def start(self, initial: OuterState | None) -> Reducer | Rebuild:
        state = self._shelf.load()
        if state is not None:
            self._mend_chain()
        elif initial is not None:
            self._shelf.begin(initial)
            state = initial
        if state is None:
            return Rebuild(self._plan, self._config.start_peers, time.monotonic)
        self._chain.append(UP, self._plan.run, {"outer": state.hash})
        self._chain.write_head()
        return self._make(state)

    def rebuild(self, state: OuterState, search: Rebuild) -> Reducer:
        self._shelf.begin(state)
        body = {"holders": search.list_holders(), "offers": search.num_offers, "outer": state.hash}
        self._chain.append(REBUILT, self._plan.run, body)
        self._chain.write_head()
        return self._make(state)

    def _make(self, state: OuterState) -> Reducer:
        config = self._config
        return Reducer(
            self._plan,
            self._key,
            state,
            self._shelf,
            self._chain,
            patience=config.patience,
            limits=config.limits,
            start_peers=config.start_peers,
            clock_s=time.monotonic,
        )

    def _mend_chain(self) -> None:
        """Append rounds whose outcome is on disk and whose event is not: a kill came between the two."""
        told = self._chain.list_subjects(ROUND)
        for outcome in self._shelf.list_outcomes():
            subject = name_subject(outcome.key)
            if subject not in told:
                body = {"base": outcome.key.base, "mended": True, "peers": list(outcome.peers), "state": outcome.state}
                self._chain.append(ROUND, subject, body)


def settle_plan(plan: Plan) -> Plan:
    """The plan as its peers will read it; `ConfigError` if it is more than this engine takes."""
    if plan.num_lanes > MAX_LANES or len(plan.sizes) > MAX_FRAGMENTS:
        raise ConfigError(f"this engine takes up to {MAX_LANES} data lanes and {MAX_FRAGMENTS} fragments")
    if plan.seed > MAX_SEED:
        raise ConfigError(f"seed {plan.seed}: this engine takes seeds up to {MAX_SEED}")
    return read_card(make_card(plan))


def load_key(data: Path) -> Key:
    """The reducer's key, made for a new folder."""
    path = data / "reducer.key"
    if path.exists():
        return Key.load(path)
    if (data / "rounds.jsonl").exists():
        raise ConfigError(f"{path}: missing, but there is a chain that it signed; put the key back")
    key = Key.generate()
    key.save(path)
    return key


def _keep_plan(data: Path, plan: Plan) -> None:
    known = read_plan(data)
    if known is None:
        write_atomic(data / "plan.json", make_card(plan).model_dump_json().encode())
    elif known != plan:
        raise ConfigError(f"{data / 'plan.json'}: another plan than the one given; a run keeps its own")
