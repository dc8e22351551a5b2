"""A coordinator as a process: its files, its server, its chores, and the order in which they start and stop.

    data/coordinator.key   the coordinator's key          data/ledger.db   the ledger, unless `database` names another
    data/beacon.secret     the end of the beacon chain    data/nonces.db   requests that were seen
    data/descriptor.json   for those who want to join     data/blobs/      submissions

Invariants:
- keys are made for a new run only. Where there is a ledger and no key, the service refuses to start;
- requests are answered only after the ledger is open and the start is recorded; the ledger is closed last;
- chores that end, for the ledger stopped or by a bug, end the service: a coordinator that answers and does nothing
  would be worse than none.
"""

import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from shoal.canonical import encode_canonical
from shoal.config import Settings
from shoal.errors import ConfigError
from shoal.files import sync_dir, write_atomic
from shoal.keys import Key
from shoal.shardcast.metrics import Registry
from shoal.swarm.api.app import build_app
from shoal.swarm.api.desk import ApiLimits, Desk
from shoal.swarm.beacon import SECRET_BYTES
from shoal.swarm.blobs.disk import DiskLimits, DiskStore
from shoal.swarm.coordinator import Coordinator, open_run
from shoal.swarm.descriptor import Descriptor, sign_descriptor
from shoal.swarm.exchange import HttpLimits
from shoal.swarm.ledger import Ledger
from shoal.swarm.nonces import NonceBook
from shoal.swarm.params import RunParams, dump_params
from shoal.swarm.rows import read_event
from shoal.swarm.serve import Server, load_tls
from shoal.swarm.server_auth import AuthLimits
from shoal.swarm.work import JoinRate, WorkGate

PublicKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Address = Annotated[str, StringConstraints(pattern=r"^https?://[^/\s]+$", max_length=200)]


class ServiceConfig(Settings):
    """Everything about one coordinator."""

    run: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    """name of the run"""
    operator: PublicKey
    """key whose commands are obeyed"""
    host: str = "127.0.0.1"
    """address to listen on; this machine only by default"""
    port: Annotated[int, Field(ge=0, lt=1 << 16)] = 8700
    """0: any that is free"""
    urls: Annotated[tuple[Address, ...], Field(max_length=8)] = ()
    """addresses for the descriptor; empty: the one that is listened on"""
    database: str = ""
    """URL of the ledger's database; empty: a file in the data folder"""
    tls_certificate: str = ""
    """PEM file; empty: plain HTTP, for this machine or behind a proxy"""
    tls_key: str = ""
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
        """Where it listens."""
        return self.descriptor.urls[0]

    async def run(self) -> None:
        """Do the chores for ever; raises what ended them."""
        await self.desk.run_chores()


@asynccontextmanager
async def open_service(config: ServiceConfig, data: Path) -> AsyncIterator[Service]:
    """Start a coordinator, and stop it in order at the end of the block."""
    tls = load_tls(Path(config.tls_certificate), Path(config.tls_key)) if config.tls_certificate else None
    key, secret = _load_secrets(data, config.database)
    async with AsyncExitStack() as stack:
        ledger = open_run(
            config.database or f"sqlite:///{data}/ledger.db",
            run=config.run,
            key=key,
            operator=config.operator,
            secret=secret,
            params=config.params,
        )
        stack.callback(ledger.close)
        blobs = DiskStore(data / "blobs", config.blobs)
        stack.push_async_callback(blobs.close)
        nonces = NonceBook(data / "nonces.db", window_s=config.auth.window_s, keep_s=5 * config.auth.window_s)
        stack.callback(nonces.close)
        coordinator = Coordinator(ledger, run=config.run, key=key, secret=secret, blobs=blobs)
        await coordinator.start()
        registry = Registry()
        # A challenge of before a restart is refused, and a new one asked for: its secret need not be kept.
        gate = WorkGate(os.urandom(32), config.run, JoinRate(base_work=config.join_work))
        desk = Desk(
            coordinator, gate=gate, nonces=nonces, registry=registry, limits=config.api, auth_limits=config.auth
        )
        server = Server(build_app(desk), limits=config.http, registry=registry, tls=tls)
        await server.start(config.host, config.port)
        stack.push_async_callback(server.close)
        descriptor = _describe_run(config, server, ledger, key)
        desk.descriptor = sign_descriptor(key, descriptor)
        write_atomic(data / "descriptor.json", desk.descriptor)
        yield Service(coordinator, desk, server, descriptor)


def _describe_run(config: ServiceConfig, server: Server, ledger: Ledger, key: Key) -> Descriptor:
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
    )


def hash_params(params: RunParams | dict[str, object]) -> str:
    """The hash of a run's parameters, as in its descriptor."""
    content = dump_params(params) if isinstance(params, RunParams) else params
    return hashlib.sha256(encode_canonical(content)).hexdigest()


def _load_secrets(data: Path, database: str) -> tuple[Key, bytes]:
    """The coordinator's key and the beacon's secret; made where there is no ledger yet."""
    key_path, secret_path = data / "coordinator.key", data / "beacon.secret"
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{data}: cannot be used for a coordinator ({error.strerror})") from None
    has_ledger = not database and (data / "ledger.db").exists()
    for path in (key_path, secret_path):
        if has_ledger and not path.exists():
            raise ConfigError(f"{path}: is missing, and the ledger beside it was made with it; put it back")
    if not key_path.exists():
        Key.generate().save(key_path)
    if not secret_path.exists():
        _make_secret(secret_path)
    return Key.load(key_path), _read_secret(secret_path)


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
