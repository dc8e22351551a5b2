"""A coordinator as a process: its files, its server, its chores, and the order in which they start and stop.

    data/coordinator.key   the coordinator's key          data/ledger.db   the ledger, unless `database` names another
    data/beacon.secret     the end of the beacon chain    data/nonces.db   requests that were seen
    data/descriptor.json   for those who want to join     data/blobs/      submissions
    data/operator.key      the operator's key, if none was named; to be moved away from here

Invariants:
- keys are made for a new run only. Where there is a ledger and no key, the service refuses to start;
- requests are answered only after the ledger is open and the start is recorded; the ledger is closed last;
- chores that end, for the ledger stopped or by a bug, end the service: a coordinator that answers and does nothing
  would be worse than none;
- what passed its deadline, and whatever else is an alarm, is told once when it begins and once when it is over.
"""

import asyncio
import hashlib
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from shoal.canonical import encode_canonical
from shoal.config import Settings
from shoal.errors import ConfigError
from shoal.files import sync_dir, write_atomic
from shoal.keys import Key
from shoal.shardcast.metrics import Registry
from shoal.swarm.api.app import build_app
from shoal.swarm.api.desk import ApiLimits, Desk
from shoal.swarm.beacon import SECRET_BYTES
from shoal.swarm.blobs import open_blobs
from shoal.swarm.blobs.base import BlobStore
from shoal.swarm.blobs.direct import DirectStore
from shoal.swarm.blobs.disk import DiskLimits
from shoal.swarm.clock import LifeSign, SteadyClock, read_clock
from shoal.swarm.coordinator import Coordinator, open_run
from shoal.swarm.db import parse_url
from shoal.swarm.descriptor import Descriptor, is_store, open_descriptor, sign_descriptor
from shoal.swarm.exchange import HttpLimits
from shoal.swarm.ledger import Ledger
from shoal.swarm.nonces import NonceBook
from shoal.swarm.papers import Papers, load_papers
from shoal.swarm.params import RunParams, dump_params
from shoal.swarm.rows import read_event
from shoal.swarm.serve import Server, load_tls
from shoal.swarm.server_auth import AuthLimits
from shoal.swarm.state.nodes import list_joins
from shoal.swarm.tags import DocumentError
from shoal.swarm.work import JoinRate, WorkGate
from shoal.swarm.writer import WriterStoppedError

RECALL_S = 1800
"""how far back joins are looked up at a start; what came before counts for nothing by then"""
WATCH_S = 5.0
"""between two looks of the watchdog"""

PublicKey = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")]
Address = Annotated[str, StringConstraints(pattern=r"^https?://[^/\s]+$", max_length=200)]
Tell = Callable[..., None]
"""tell(event, **fields): one line of the log"""


class ServiceConfig(Settings):
    """Everything about one coordinator."""

    run: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    """name of the run"""
    operator: PublicKey = ""
    """key whose commands are obeyed; empty: a new run makes one in the data folder"""
    host: str = "127.0.0.1"
    """address to listen on; this machine only by default"""
    port: Annotated[int, Field(ge=0, lt=1 << 16)] = 8700
    """0: any that is free"""
    urls: Annotated[tuple[Address, ...], Field(max_length=8)] = ()
    """addresses for the descriptor; empty: the one that is listened on"""
    database: str = ""
    """URL of the ledger's database; empty: a file in the data folder"""
    blob_store: str = ""
    """s3://BUCKET/PREFIX?endpoint=URL&region=NAME; empty: a folder in the data folder"""
    publisher: PublicKey = ""
    """key that signs the weights, for the descriptor"""
    relays: Annotated[tuple[Address, ...], Field(max_length=8)] = ()
    """where the weights are to be had, for the descriptor"""
    recipe: str = ""
    """file with the run's recipe, see `shoal prepare`"""
    calibration: str = ""
    """file with the calibration that the recipe names"""
    tasks: str = ""
    """file with the task set that the recipe names, if it names one"""
    tls_certificate: str = ""
    """PEM file; empty: plain HTTP, for this machine or behind a proxy"""
    tls_key: str = ""
    """PEM file"""
    join_work: Annotated[int, Field(ge=1, le=1 << 40)] = 1 << 22
    """hashes that joining costs at rest"""
    params: RunParams = RunParams()
    """of a new run; a run that exists keeps its own"""
    http: HttpLimits = HttpLimits()
    api: ApiLimits = ApiLimits()
    auth: AuthLimits = AuthLimits()
    blobs: DiskLimits = DiskLimits()


class Service:
    """A coordinator that answers. Made by `open_service`."""

    def __init__(self, coordinator: Coordinator, desk: Desk, server: Server, descriptor: Descriptor) -> None:
        self.coordinator, self.desk, self.server, self.descriptor = coordinator, desk, server, descriptor

    @property
    def url(self) -> str:
        """Where it is reached."""
        return self.descriptor.urls[0]

    async def run(self, tell: Tell | None = None) -> None:
        """Do the chores for ever; raises what ended them. `tell` hears of versions, alarms and what is overdue."""
        if tell is None:
            await self.desk.run_chores()
            return
        tasks = [asyncio.create_task(work) for work in (self.desk.run_chores(), self._watch(tell))]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, tell: Tell) -> None:
        alarms: set[str] = set()
        newest = self.coordinator.mirror.newest_version
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                status = await asyncio.to_thread(self.coordinator.read_status)
            except SQLAlchemyError as error:  # the writer says so too if it lasts; looking on is all that is lost
                tell("status unread", text=str(error).splitlines()[0])
                continue
            # The text of a wait says how long it lasts, so it is known by its name.
            overdue = {f"overdue: {wait.owner} waits for {wait.for_whom}" for wait in status.waits if wait.overdue}
            found = {text for text in status.alarms if not text.startswith("overdue: ")} | overdue
            for text in sorted(found - alarms):
                tell("alarm", text=text)
            for text in sorted(alarms - found):
                tell("alarm over", text=text)
            alarms = found
            if status.newest_version != newest:
                newest = status.newest_version
                tell("version", version=newest, trained=status.trained, finished=status.finished)


@asynccontextmanager
async def open_service(config: ServiceConfig, data: Path) -> AsyncIterator[Service]:
    """Start a coordinator, and stop it in order at the end of the block."""
    tls = _load_tls(config)
    if config.database:
        parse_url(config.database)  # a mistake there leaves nothing behind
    papers = load_papers(config.recipe, config.calibration, config.params, config.tasks)
    if not (data / "ledger.db").exists() and not config.database:
        _check_sizes(config, config.params)
    key, secret, operator = _load_secrets(data, config)
    async with AsyncExitStack() as stack:
        clock = SteadyClock()
        ledger = _open_ledger(config, data, key, secret, operator, papers, clock)
        stack.callback(ledger.close)
        blobs = open_blobs(config.blob_store, data / "blobs", config.blobs)
        stack.push_async_callback(blobs.close)
        nonces = NonceBook(data / "nonces.db", window_s=config.auth.window_s, keep_s=5 * config.auth.window_s)
        stack.callback(nonces.close)
        coordinator = Coordinator(
            ledger,
            run=config.run,
            key=key,
            secret=secret,
            blobs=blobs,
            clock=clock,
            wall=read_clock,
            life=LifeSign(data / "alive"),
        )
        _check_sizes(config, coordinator.params)
        await coordinator.start()
        stack.push_async_callback(_stop_coordinator, coordinator)
        registry = Registry()
        # A challenge of before a restart is refused, and a new one asked for: its secret need not be kept.
        gate = WorkGate(os.urandom(32), config.run, _recall_joins(coordinator, config.join_work, clock()))
        desk = Desk(
            coordinator,
            gate=gate,
            nonces=nonces,
            registry=registry,
            limits=config.api,
            auth_limits=config.auth,
            papers=papers,
        )
        server = Server(build_app(desk), limits=config.http, registry=registry, tls=tls)
        await server.start(config.host, config.port)
        stack.push_async_callback(server.close)
        stack.callback(desk.lounge.close)  # or those who wait would be waited for
        descriptor = _describe_run(config, server, ledger, key, _list_stores(blobs))
        desk.descriptor = sign_descriptor(key, descriptor)
        write_atomic(data / "descriptor.json", desk.descriptor)
        yield Service(coordinator, desk, server, descriptor)


def _check_sizes(config: ServiceConfig, params: RunParams) -> None:
    """Refuse a store that does not take the files for which leases are given."""
    if params.blob_max_bytes > config.blobs.max_blob_bytes:
        least = f"params.blob_max_bytes={params.blob_max_bytes}"
        raise ConfigError(f"{least}: more than the store takes, blobs.max_blob_bytes={config.blobs.max_blob_bytes}")


def _recall_joins(coordinator: Coordinator, base_work: int, now_ms: int) -> JoinRate:
    """What joining costs now: a restart makes it no cheaper in the middle of a flood."""
    rate = JoinRate(base_work=base_work)
    with coordinator.ledger.read() as connection:
        for joined_ms in list_joins(connection, now_ms - 1000 * RECALL_S):
            rate.note_join(joined_ms / 1000)
    return rate


async def _stop_coordinator(coordinator: Coordinator) -> None:
    """Record the stop, and sign all there is: whoever checks the ledger later needs nobody for it."""
    with suppress(WriterStoppedError):  # then that is what ended the service, and is told
        await coordinator.stop()
        await coordinator.ledger.sign_head()


def list_differences(config: ServiceConfig, params: RunParams) -> list[str]:
    """Parameters that the settings give and that are not those of the run, which keeps its own."""
    given = config.params.model_fields_set
    return sorted(name for name in given if getattr(config.params, name) != getattr(params, name))


def hash_params(params: RunParams | dict[str, object]) -> str:
    """The hash of a run's parameters, as in its descriptor."""
    content = dump_params(params) if isinstance(params, RunParams) else params
    return hashlib.sha256(encode_canonical(content)).hexdigest()


def _open_ledger(
    config: ServiceConfig, data: Path, key: Key, secret: bytes, operator: str, papers: Papers, clock: Callable[[], int]
) -> Ledger:
    try:
        ledger = open_run(
            config.database or f"sqlite:///{data}/ledger.db",
            run=config.run,
            key=key,
            operator=operator,
            secret=secret,
            params=config.params,
            recipe=papers.recipe_hash,
            clock=clock,
        )
    except OperationalError as error:
        raise ConfigError(f"the ledger's database cannot be opened ({str(error.orig).splitlines()[0]})") from None
    except ModuleNotFoundError as error:
        raise ConfigError(f"PostgreSQL needs the package {error.name}: pip install shoal[postgres]") from None
    try:
        _check_genesis(ledger, config.operator, papers)
    except ConfigError:
        ledger.close()
        raise
    return ledger


def _check_genesis(ledger: Ledger, given: str, papers: Papers) -> None:
    with ledger.read() as connection:
        genesis = read_event(connection, 0)
    assert genesis is not None, "an open ledger has its first event"
    operator = genesis.content["operator"]
    if given and given != operator:
        raise ConfigError(f"operator: this run has {operator}, for good; it stands in the first event of its ledger")
    if genesis.content.get("recipe", "") != papers.recipe_hash:
        raise ConfigError("recipe: this run was begun with another one, for good; its hash is in the first event")


def _describe_run(
    config: ServiceConfig, server: Server, ledger: Ledger, key: Key, stores: tuple[str, ...]
) -> Descriptor:
    host, port = server.address
    scheme = "https" if config.tls_certificate else "http"
    shown = f"[{host}]" if ":" in host else host
    with ledger.read() as connection:
        genesis = read_event(connection, 0)
    assert genesis is not None, "an open ledger has its first event"
    params = genesis.content["params"]
    return Descriptor(
        run=config.run,
        coordinator=key.public,
        operator=str(genesis.content["operator"]),
        urls=config.urls or (f"{scheme}://{shown}:{port}",),
        genesis=genesis.hash.hex(),
        params=hash_params(params),
        publisher=config.publisher,
        relays=config.relays,
        tasks=str(genesis.content.get("recipe", "")),
        stores=stores,
    )


def _list_stores(blobs: BlobStore) -> tuple[str, ...]:
    """Stores that nodes may use themselves; one that they would reach without TLS is used through us alone."""
    return (blobs.address,) if isinstance(blobs, DirectStore) and is_store(blobs.address) else ()


def _load_tls(config: ServiceConfig) -> ssl.SSLContext | None:
    if bool(config.tls_certificate) != bool(config.tls_key):
        raise ConfigError("TLS needs both a certificate and its key")
    return load_tls(Path(config.tls_certificate), Path(config.tls_key)) if config.tls_certificate else None


def _load_secrets(data: Path, config: ServiceConfig) -> tuple[Key, bytes, str]:
    """The coordinator's key, the beacon's secret and the operator; made where there is no ledger yet."""
    key_path, secret_path = data / "coordinator.key", data / "beacon.secret"
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{data}: cannot be used for a coordinator ({error.strerror})") from None
    has_ledger = not config.database and (data / "ledger.db").exists()
    for path in (key_path, secret_path):
        if has_ledger and not path.exists():
            raise ConfigError(f"{path}: is missing, and the ledger beside it was made with it; put it back")
    operator = _find_operator(data, config.operator)  # before the other keys, whose presence means that it was found
    if not key_path.exists():
        Key.generate().save(key_path)
    if not secret_path.exists():
        _make_secret(secret_path)
    return Key.load(key_path), _read_secret(secret_path), operator


def _find_operator(data: Path, given: str) -> str:
    """The operator's public key: as given, or from its key or the descriptor in the folder, or of a new key there."""
    path, descriptor = data / "operator.key", data / "descriptor.json"
    if given:
        return given
    if path.exists():
        return Key.load(path).public
    if descriptor.exists():
        try:
            return open_descriptor(descriptor.read_bytes()).operator
        except DocumentError as error:
            raise ConfigError(f"{descriptor}: {error}; remove it and name the operator") from None
    if (data / "coordinator.key").exists():
        raise ConfigError(f"{path}: is missing; put it back, or name the operator's public key")
    key = Key.generate()
    key.save(path)
    return key.public


def _make_secret(path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(os.urandom(SECRET_BYTES).hex().encode())
        file.flush()
        os.fsync(descriptor)
    temporary.rename(path)
    sync_dir(path.parent)


def _read_secret(path: Path) -> bytes:
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"{path}: a secret that others may read; make it yours alone with chmod 600")
    try:
        return bytes.fromhex(path.read_text("ascii"))
    except (OSError, ValueError):
        raise ConfigError(f"{path}: holds no beacon secret") from None
