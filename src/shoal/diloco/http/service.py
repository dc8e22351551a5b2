"""A reducer as a process: its files, its server, and the order in which they start and stop.

    data/reducer.key    the reducer's key, which peers pin      data/rounds.jsonl, head.json   the log of rounds
    data/plan.json      the agreed settings of the run          data/nonces.db                 requests that were seen
    data/snapshot.bin, outcomes/, states/                       the outer state (see `snapshots`)

Invariants:
- a run begins from a given state, continues from what is on disk, or is rebuilt from its peers; the log records which;
- requests are answered only after the state is on disk and the start is in the round log.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from shoal.diloco.http.app import ReducerContext, build_reducer_app
from shoal.diloco.http.messages import (
    MAX_FRAGMENTS,
    MAX_LANES,
    MAX_SEED,
    MessageError,
    ReducerInfo,
    make_card,
    read_card,
    read_message,
)
from shoal.diloco.http.reducer import Reducer, name_subject
from shoal.diloco.http.round_log import REBUILT, ROUND, UP, RoundLog
from shoal.diloco.http.settings import ReducerConfig
from shoal.diloco.http.snapshots import SnapshotStore
from shoal.diloco.http.state_recovery import StateRecovery
from shoal.diloco.outer import DilocoPlan
from shoal.diloco.state import OuterState
from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.identity.nonces import NonceStore
from shoal.net.server import BULK_BYTES, HttpServer
from shoal.net.sockets import load_server_tls
from shoal.util.files import write_atomic


class ReducerService:
    """A running reducer. Created by `open_reducer`."""

    def __init__(self, context: ReducerContext, server: HttpServer, scheme: str, public: str) -> None:
        self.context, self._server, self._scheme, self.public = context, server, scheme, public

    @property
    def url(self) -> str:
        """The address of the reducer."""
        host, port = self._server.address
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def run(self) -> None:
        """Close rounds forever, once there is a state."""
        while self.context.is_recovering:
            await asyncio.sleep(0.02)
        await self.context.reducer.run()


def read_plan(data: Path) -> DilocoPlan | None:
    """The plan in a reducer's folder, if any."""
    path = data / "plan.json"
    if not path.exists():
        return None
    try:
        return read_card(read_message(path.read_bytes(), ReducerInfo))
    except MessageError as error:
        raise ConfigError(f"{path}: invalid plan ({error})") from None


@asynccontextmanager
async def open_reducer(
    config: ReducerConfig, data: Path, plan: DilocoPlan, *, initial: OuterState | None = None
) -> AsyncIterator[ReducerService]:
    """Start a reducer. Without a state on disk or an initial one, it asks its peers for theirs."""
    _check_peers(config)
    data.mkdir(parents=True, exist_ok=True)
    plan = settle_plan(plan)
    _keep_plan(data, plan)
    key = load_key(data)
    tls = load_server_tls(Path(config.tls_certificate), Path(config.tls_key)) if config.tls_certificate else None
    async with AsyncExitStack() as stack:
        nonces = NonceStore(data / "nonces.db", window_s=config.auth.window_s, keep_s=5 * config.auth.window_s)
        stack.callback(nonces.close)
        builder = _ReducerBuilder(config, plan, key, data)
        start = await asyncio.to_thread(builder.start, initial)
        registry = CollectorRegistry()
        context = ReducerContext(
            plan, key, config, start=start, make_reducer=builder.rebuild, nonces=nonces, registry=registry
        )
        server = HttpServer(
            build_reducer_app(context), limits=config.http, registry=registry, tls=tls, read_bytes=BULK_BYTES
        )
        await server.start(config.host, config.port)
        stack.push_async_callback(server.close)
        yield ReducerService(context, server, "http" if tls is None else "https", key.public)


class _ReducerBuilder:
    """Builds the reducer from disk, from a given state or from a peer's."""

    def __init__(self, config: ReducerConfig, plan: DilocoPlan, key: Key, data: Path) -> None:
        self._config, self._plan, self._key = config, plan, key
        limits = config.limits
        self._snapshots = SnapshotStore(
            data, plan, key.public, keep=limits.keep_outcomes, snapshot_every=limits.snapshot_every
        )
        self._round_log = RoundLog(data, plan.run, key)

    def start(self, initial: OuterState | None) -> Reducer | StateRecovery:
        state = self._snapshots.load()
        if state is not None:
            self._repair_log()
        elif initial is not None:
            self._snapshots.begin(initial)
            state = initial
        if state is None:
            return StateRecovery(self._plan, self._config.start_peers, time.monotonic)
        self._round_log.append(UP, self._plan.run, {"outer": state.hash})
        return self._make_reducer(state)

    def rebuild(self, state: OuterState, recovery: StateRecovery) -> Reducer:
        self._snapshots.begin(state)
        body = {"holders": recovery.list_holders(), "offers": recovery.num_offers, "outer": state.hash}
        self._round_log.append(REBUILT, self._plan.run, body)
        return self._make_reducer(state)

    def _make_reducer(self, state: OuterState) -> Reducer:
        return Reducer(self._plan, self._key, self._config, state, self._snapshots, self._round_log)

    def _repair_log(self) -> None:
        """Append rounds whose outcome is on disk but whose event is missing: the process was killed in between."""
        logged = self._round_log.list_subjects(ROUND)
        for outcome in self._snapshots.list_outcomes():
            subject = name_subject(outcome.key)
            if subject not in logged:
                body = {"base": outcome.key.base, "mended": True, "peers": list(outcome.peers), "state": outcome.state}
                self._round_log.append(ROUND, subject, body)


def settle_plan(plan: DilocoPlan) -> DilocoPlan:
    """The plan as its peers will read it; `ConfigError` if it exceeds the limits of this engine."""
    if plan.num_lanes > MAX_LANES or len(plan.sizes) > MAX_FRAGMENTS:
        raise ConfigError(f"too many data lanes (maximum {MAX_LANES}) or fragments (maximum {MAX_FRAGMENTS})")
    if plan.seed > MAX_SEED:
        raise ConfigError(f"seed {plan.seed}: must not exceed {MAX_SEED}")
    return read_card(make_card(plan))


def load_key(data: Path) -> Key:
    """The reducer's key, created for a new folder."""
    path = data / "reducer.key"
    if not path.exists() and (data / "rounds.jsonl").exists():
        raise ConfigError(f"{path}: key file missing, but its round log exists; restore the key")
    return Key.open(path)


def _check_peers(config: ReducerConfig) -> None:
    """A mean has no defence against a majority, and anyone can make keys: somebody has to say who counts."""
    named = len(set(config.peers))
    if named < config.start_peers:
        raise ConfigError(
            f"peers: {named} named, but {config.start_peers} must join before the first round; name every peer with "
            "--peer KEY (`shoal diloco key` prints the key of a site)"
        )
    if named > config.limits.max_peers:
        raise ConfigError(f"peers: {named} named, but limits.max_peers is {config.limits.max_peers}")


def _keep_plan(data: Path, plan: DilocoPlan) -> None:
    known = read_plan(data)
    if known is None:
        write_atomic(data / "plan.json", make_card(plan).model_dump_json().encode())
    elif known != plan:
        raise ConfigError(f"{data / 'plan.json'}: differs from the given plan; the plan of a run cannot change")
