"""A coordinator as a process: its files, its server, its periodic work, and the order in which they start and stop.

    data/coordinator.key   the coordinator's key          data/ledger.db   the ledger, unless `database` names another
    data/beacon.secret     the end of the beacon chain    data/nonces.db   nonces of requests already seen
    data/descriptor.json   for nodes that want to join    data/blobs/      submissions
    data/operator.key      the operator's key, if none was given; move it elsewhere

Invariants:
- keys are created for a new run only. If there is a ledger but no key, the service refuses to start;
- requests are answered only after the ledger is open and the start is recorded; the ledger is closed last;
- if the periodic work ends, because the ledger stopped or by a bug, the service ends: a coordinator that answers but
  does nothing would be worse than none;
- overdue waits and other alarms are logged once when they begin and once when they end.
"""

import asyncio
import hashlib
import logging
import os
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from prometheus_client import CollectorRegistry
from pydantic import Field, StringConstraints
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from shoal import __version__
from shoal.config.run import Settings
from shoal.coordinator.api.context import ApiContext, ApiLimits
from shoal.coordinator.api.routes import TABLES
from shoal.coordinator.blobs import open_blobs
from shoal.coordinator.blobs.base import BlobStore, DirectStore
from shoal.coordinator.blobs.disk import DiskLimits
from shoal.coordinator.coordinator import Coordinator, open_run
from shoal.coordinator.rules.storage import MIN_FILES, limit_lease_file
from shoal.coordinator.run_files import RunFiles, load_run_files
from shoal.coordinator.state.members import list_joins
from shoal.errors import ConfigError, UnavailableError
from shoal.identity.authenticator import AuthLimits
from shoal.identity.documents import DocumentError
from shoal.identity.keys import Key, read_private, write_private
from shoal.identity.nonces import NonceStore
from shoal.identity.proof_of_work import JoinRate, WorkGate
from shoal.identity.routes import OPENAPI_PATH, RouteApp
from shoal.ledger.db import parse_url
from shoal.ledger.event import Event
from shoal.ledger.ledger import Ledger, WriterStoppedError
from shoal.ledger.reader import read_event
from shoal.net.limits import HttpLimits
from shoal.net.server import HttpServer
from shoal.net.sockets import load_server_tls
from shoal.protocol.beacon import SECRET_BYTES
from shoal.protocol.descriptor import Descriptor, is_store, open_descriptor, sign_descriptor
from shoal.protocol.events import Genesis, read_body
from shoal.protocol.params import RunParams, dump_params
from shoal.util.aio import run_together
from shoal.util.canonical import encode_canonical
from shoal.util.clock import LastAliveFile, SteadyClock, read_clock
from shoal.util.files import write_atomic
from shoal.util.metrics import Counter, add_gauge
from shoal.util.units import format_bytes


def build_app(context: ApiContext) -> RouteApp:
    """The ASGI app for a context."""
    return RouteApp(
        context,
        TABLES,
        title="shoal coordinator",
        version=__version__,
        timeout_s=context.limits.decide_seconds,
        openapi_paths=("/v1/openapi.json", OPENAPI_PATH),
    )


logger = logging.getLogger(__name__)

RECALL_S = 1800
"""how far back joins are counted at a start; older ones no longer matter"""
RECALL_EVENTS = 100_000
"""newest events among which joins are searched at a start"""
WATCH_S = 5.0
"""seconds between two checks of the watchdog"""

PublicKey = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")]
Address = Annotated[str, StringConstraints(pattern=r"^https?://[^/\s]+$", max_length=200)]


class ServiceConfig(Settings):
    """All settings of one coordinator."""

    run: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    """name of the run"""
    operator: PublicKey = ""
    """public key whose commands are accepted; empty: a new run creates a key in the data folder"""
    host: str = "127.0.0.1"
    """address to listen on; loopback by default"""
    port: Annotated[int, Field(ge=0, lt=1 << 16)] = 8700
    """0: any free port"""
    urls: Annotated[tuple[Address, ...], Field(max_length=8)] = ()
    """addresses for the descriptor; empty: the listening address"""
    database: str = ""
    """URL of the ledger's database; empty: a file in the data folder"""
    blob_store: str = ""
    """s3://BUCKET/PREFIX?endpoint=URL&region=NAME; empty: a folder in the data folder"""
    publisher: PublicKey = ""
    """key that signs the weights, for the descriptor"""
    relays: Annotated[tuple[Address, ...], Field(max_length=8)] = ()
    """where to download the weights, for the descriptor"""
    recipe: str = ""
    """file with the run's recipe, see `shoal prepare`"""
    calibration: str = ""
    """file with the calibration that the recipe names"""
    tasks: str = ""
    """file with the task set that the recipe names, if any"""
    tls_certificate: str = ""
    """PEM file; empty: plain HTTP, for loopback or behind a proxy"""
    tls_key: str = ""
    """PEM file"""
    ca: str = ""
    """file that nodes need to trust the certificate (`--ca`), for the printed commands; empty: none"""
    join_work: Annotated[int, Field(ge=1, le=1 << 40)] = 1 << 22
    """base number of hashes required to join"""
    params: RunParams = RunParams()
    """parameters of a new run; an existing run keeps its own"""
    http: HttpLimits = HttpLimits()
    api: ApiLimits = ApiLimits()
    auth: AuthLimits = AuthLimits()
    blobs: DiskLimits = DiskLimits()


@dataclass(frozen=True, slots=True)
class CoordinatorService:
    """A running coordinator. Created by `open_service`."""

    coordinator: Coordinator
    context: ApiContext
    server: HttpServer
    descriptor: Descriptor

    @property
    def url(self) -> str:
        """The first public address."""
        return self.descriptor.urls[0]

    async def run(self) -> None:
        """Run the periodic work forever, and log versions and alarms; raises the error that ended it."""
        await run_together(self.context.run_chores(), self._watch())

    async def _watch(self) -> None:
        alarms, overdue = set[str](), set[str]()
        registry = self.context.registry
        raised = Counter("shoal_alarms", "Alarms that began, as logged.", registry=registry)
        add_gauge(registry, "shoal_overdue_waits", "Waits past their deadline, as in the status.", lambda: len(overdue))
        newest = self.coordinator.cache.newest_version
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                status = await asyncio.to_thread(self.coordinator.read_status)
            except SQLAlchemyError as error:  # the writer reports it too if it lasts; only monitoring is lost
                logger.warning("cannot read the status: %s", str(error).splitlines()[0])
                continue
            # The text of a wait contains its duration, so identify the wait by its name.
            overdue = {f"overdue: {wait.owner} waits for {wait.for_whom}" for wait in status.waits if wait.overdue}
            found = {text for text in status.alarms if not text.startswith("overdue: ")} | overdue
            for text in sorted(found - alarms):
                logger.warning("alarm: %s", text)
                raised.inc()
            for text in sorted(alarms - found):
                logger.info("alarm over: %s", text)
            alarms = found
            if status.newest_version != newest:
                newest = status.newest_version
                fields = {"trained": status.trained, "finished": status.finished}
                logger.info("version %d", newest, extra={"fields": fields})


@asynccontextmanager
async def open_service(config: ServiceConfig, data: Path) -> AsyncIterator[CoordinatorService]:
    """Start a coordinator, and stop it in order at the end of the block."""
    tls = _load_tls(config)
    if config.database:
        parse_url(config.database)  # an invalid URL must leave nothing behind
    run_files = load_run_files(config.recipe, config.calibration, config.params, config.tasks)
    config = _fit_store(config, data)
    if not (data / "ledger.db").exists() and not config.database:
        _check_sizes(config, config.params)
    key, secret, operator = _load_secrets(data, config)
    async with AsyncExitStack() as stack:
        clock = SteadyClock()
        open_store = partial(open_blobs, config.blob_store, data / "blobs", config.blobs)
        bucket = open_store() if config.blob_store else None  # one that does not work must leave no ledger behind
        ledger = _open_ledger(config, data, key, secret, operator, run_files, clock)
        stack.callback(ledger.close)
        blobs = bucket or open_store()
        stack.push_async_callback(blobs.close)
        nonces = NonceStore(data / "nonces.db", window_s=config.auth.window_s, keep_s=5 * config.auth.window_s)
        stack.callback(nonces.close)
        coordinator = Coordinator(
            ledger,
            run=config.run,
            key=key,
            secret=secret,
            blobs=blobs,
            clock=clock,
            wall=read_clock,
            life=LastAliveFile(data / "alive"),
            max_uploads=config.blobs.max_uploads,
        )
        _check_sizes(config, coordinator.params)
        await coordinator.start()
        stack.push_async_callback(_stop_coordinator, coordinator)
        registry = CollectorRegistry()
        # A challenge from before a restart is refused and requested again, so its secret need not be stored.
        gate = WorkGate(
            os.urandom(32), config.run, JoinRate(base_work=config.join_work), find_payer=coordinator.find_payer
        )
        _recall_joins(coordinator, gate, clock())
        context = ApiContext(
            coordinator,
            gate=gate,
            nonces=nonces,
            registry=registry,
            limits=config.api,
            auth_limits=config.auth,
            run_files=run_files,
        )
        server = HttpServer(build_app(context), limits=config.http, registry=registry, tls=tls)
        await server.start(config.host, config.port)
        stack.push_async_callback(server.close)
        stack.callback(context.long_poll.close)  # otherwise the server would wait for the waiting callers
        descriptor = _describe_run(config, server, ledger, key, _list_stores(blobs))
        context.descriptor = sign_descriptor(key, descriptor)
        write_atomic(data / "descriptor.json", context.descriptor)
        yield CoordinatorService(coordinator, context, server, descriptor)


def _fit_store(config: ServiceConfig, data: Path) -> ServiceConfig:
    """The settings with no more room for a new run's files than its store has: leases promise room to nodes."""
    room = config.blobs.max_bytes
    if not config.blob_store:
        folder = next(path for path in (data.absolute(), *data.absolute().parents) if path.exists())
        room = min(room, shutil.disk_usage(folder).free - config.blobs.min_free_bytes)
    params = config.params.model_copy(update={"store_bytes": max(1, min(room, config.params.store_bytes))})
    return config.model_copy(update={"params": params})


def _check_sizes(config: ServiceConfig, params: RunParams) -> None:
    """Reject a store that is too small for the files for which leases are granted."""
    for name, limit in (("blob_max_bytes", "max_blob_bytes"), ("store_bytes", "max_bytes")):
        if (value := getattr(params, name)) > (most := getattr(config.blobs, limit)):
            raise ConfigError(f"params.{name}={value}: more than the store accepts, blobs.{limit}={most}")
    least = MIN_FILES * limit_lease_file(params, params.most_per_lease)
    if params.store_bytes < least:
        raise ConfigError(
            f"the store has room for {format_bytes(params.store_bytes)} of files, but {format_bytes(least)} are needed "
            f"for {MIN_FILES} files of a lease of {params.most_per_lease} groups: free disk space, raise "
            "blobs.max_bytes, set params.groups_per_lease=1, or lower params.max_prompt_tokens"
        )


def _recall_joins(coordinator: Coordinator, gate: WorkGate, now_ms: int) -> None:
    """Recall recent joins: a restart during a flood does not make them cheaper."""
    with coordinator.ledger.read() as connection:
        for node, joined_ms in list_joins(connection, now_ms - 1000 * RECALL_S, RECALL_EVENTS):
            gate.find_rate(node).note_join(joined_ms / 1000)


async def _stop_coordinator(coordinator: Coordinator) -> None:
    """Record the stop, and sign a final head: the ledger can then be checked without the coordinator."""
    with suppress(WriterStoppedError):  # then that ended the service, and is reported
        await coordinator.stop()
        await coordinator.ledger.sign_head()


def list_differences(config: ServiceConfig, params: RunParams) -> list[str]:
    """A sentence for each parameter in the settings that differs from that of the run, which keeps its own."""
    given, kept = dump_params(config.params), dump_params(params)
    lines = {
        name: f"the settings give another {name} ({given[name]}), ignored; the run has {kept[name]}"
        for name in sorted(config.params.model_fields_set)
        if given[name] != kept[name]
    }
    if params.store_bytes < config.params.store_bytes and "store_bytes" in lines:  # see `_fit_store`
        numbers = f"store_bytes is {params.store_bytes}, not {config.params.store_bytes} as in the settings"
        lines["store_bytes"] = f"{numbers}: the store had room for no more when the run began"
    return list(lines.values())


def _open_ledger(
    config: ServiceConfig,
    data: Path,
    key: Key,
    secret: bytes,
    operator: str,
    run_files: RunFiles,
    clock: Callable[[], int],
) -> Ledger:
    try:
        ledger = open_run(
            config.database or f"sqlite:///{data}/ledger.db",
            run=config.run,
            key=key,
            operator=operator,
            secret=secret,
            params=config.params,
            recipe=run_files.recipe_hash,
            clock=clock,
        )
    except OperationalError as error:
        raise UnavailableError(f"cannot open the ledger's database ({str(error.orig).splitlines()[0]})") from None
    except ModuleNotFoundError as error:
        install = 'in a checkout, pip install ".[postgres]"'
        raise ConfigError(f"PostgreSQL needs the package {error.name}: {install}") from None
    try:
        _check_genesis(read_body(_read_genesis(ledger), Genesis), config.operator, run_files)
    except ConfigError:
        ledger.close()
        raise
    return ledger


def _read_genesis(ledger: Ledger) -> Event:
    with ledger.read() as connection:
        genesis = read_event(connection, 0)
    assert genesis is not None, "an open ledger has a genesis"
    return genesis


def _check_genesis(body: Genesis, given: str, run_files: RunFiles) -> None:
    if given and given != body.operator:
        raise ConfigError(f"operator: fixed by the genesis of this run as {body.operator}; it cannot change")
    if body.recipe != run_files.recipe_hash:
        raise ConfigError("recipe: the genesis of this run names a different recipe; it cannot change")


def _describe_run(
    config: ServiceConfig, server: HttpServer, ledger: Ledger, key: Key, stores: tuple[str, ...]
) -> Descriptor:
    host, port = server.address
    scheme = "https" if config.tls_certificate else "http"
    shown = f"[{host}]" if ":" in host else host
    genesis = _read_genesis(ledger)
    body = read_body(genesis, Genesis)
    return Descriptor(
        run=config.run,
        coordinator=key.public,
        operator=body.operator,
        urls=config.urls or (f"{scheme}://{shown}:{port}",),
        genesis=genesis.hash.hex(),
        params=hashlib.sha256(encode_canonical(body.params)).hexdigest(),
        publisher=config.publisher,
        relays=config.relays,
        tasks=body.recipe,
        stores=stores,
    )


def _list_stores(blobs: BlobStore) -> tuple[str, ...]:
    """Stores that nodes may access directly; a store without TLS is used only through the coordinator."""
    return (blobs.address,) if isinstance(blobs, DirectStore) and is_store(blobs.address) else ()


def _load_tls(config: ServiceConfig) -> ssl.SSLContext | None:
    if bool(config.tls_certificate) != bool(config.tls_key):
        raise ConfigError("TLS needs both a certificate and its key")
    return load_server_tls(Path(config.tls_certificate), Path(config.tls_key)) if config.tls_certificate else None


def _load_secrets(data: Path, config: ServiceConfig) -> tuple[Key, bytes, str]:
    """The coordinator's key, the beacon's secret and the operator; created if there is no ledger yet."""
    key_path, secret_path = data / "coordinator.key", data / "beacon.secret"
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create {data}/: {error.strerror}") from None
    has_ledger = not config.database and (data / "ledger.db").exists()
    for path in (key_path, secret_path):
        if has_ledger and not path.exists():
            raise ConfigError(f"{path}: missing, but the existing ledger was created with it; restore it")
    operator = _find_operator(data, config.operator)  # before the other keys: if they exist, the operator was found
    if not key_path.exists():
        Key.generate().save(key_path)
    if not secret_path.exists():
        write_private(secret_path, os.urandom(SECRET_BYTES).hex().encode())
    return Key.load(key_path), _read_secret(secret_path), operator


def _find_operator(data: Path, given: str) -> str:
    """The operator's public key: as given, or from its key file or the descriptor in the folder, or of a new key."""
    path, descriptor = data / "operator.key", data / "descriptor.json"
    if given:
        return given
    if path.exists():
        return Key.load(path).public
    if descriptor.exists():
        try:
            return open_descriptor(descriptor.read_bytes()).operator
        except DocumentError as error:
            raise ConfigError(f"{descriptor}: {error}; delete it and set the operator") from None
    if (data / "coordinator.key").exists():
        raise ConfigError(f"{path}: missing; restore it, or set the operator's public key")
    key = Key.generate()
    key.save(path)
    return key.public


def _read_secret(path: Path) -> bytes:
    data = read_private(path, "secret")
    try:
        return bytes.fromhex(data.decode("ascii"))
    except ValueError:
        raise ConfigError(f"{path}: not a beacon secret") from None
