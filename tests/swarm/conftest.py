"""Databases for the tests of the control plane: each of them runs on SQLite and on PostgreSQL.

PostgreSQL is a private cluster in a temporary folder, reached by a socket in it, with fsync on. It refuses to run as
root, so as root it is started as another user. Where it is not installed its tests are skipped.

Folders are in memory where that is possible: a kill is not a loss of power. Where a test opens a ledger its database
begins as a copy of one that has the tables.
"""

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import sqlalchemy as sa

from shoal.keys import Key
from shoal.swarm.db import INT64, open_engine
from shoal.swarm.event import Event, Kind
from shoal.swarm.ledger import Ledger
from shoal.swarm.migrate import upgrade_schema
from shoal.swarm.projection import Projection

_START_S = 30
_MEMORY = Path("/dev/shm")
_WITH_TABLES = {"open_ledger", "both_world", "tables"}
"""fixtures whose database may have its tables already"""

LEASE = sa.Table(
    "test_lease",
    sa.MetaData(),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("grants", INT64, nullable=False),
    sa.Column("last_hash", sa.LargeBinary, nullable=False),
    sqlite_strict=True,
)


def _apply_lease(event: Event, connection: sa.Connection) -> None:
    if event.kind != Kind.LEASE_GRANT:
        return
    values = {"name": event.subject, "grants": event.content["grants"], "hash": event.hash}
    connection.execute(
        sa.text(
            "INSERT INTO test_lease (name, grants, last_hash) VALUES (:name, :grants, :hash) ON CONFLICT (name) "
            "DO UPDATE SET grants = test_lease.grants + excluded.grants, last_hash = excluded.last_hash"
        ),
        values,
    )


LEASES = Projection("leases", (LEASE,), _apply_lease)
_names = itertools.count()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """The folder with the socket of a PostgreSQL server."""
    tools = _find_tools()
    user = _choose_user()
    # A path of a socket holds about 100 characters, less than pytest's folders have.
    folder = Path(tempfile.mkdtemp(prefix="shoal-pg-", dir=_find_memory()))
    try:
        if user is not None:
            os.chown(folder, user.pw_uid, user.pw_gid)
        data = folder / "data"
        flags = ["-D", str(data), "-U", "shoal", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8"]
        subprocess.run([tools / "initdb", *flags], check=True, stdout=subprocess.DEVNULL, cwd=folder, **_as_user(user))
        server = _start_server(tools, data, folder, user)
        try:
            yield folder
        finally:
            server.terminate()
            server.wait(_START_S)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def migrated() -> Iterator[Path]:
    """A SQLite database with all tables and no rows, to copy."""
    with TemporaryDirectory(prefix="shoal-", dir=_find_memory()) as folder:
        path = Path(folder) / "migrated.db"
        _make_tables(f"sqlite:///{path}")
        yield path


@pytest.fixture(scope="session")
def migrated_server(cluster: Path) -> str:
    """The name of such a database of the PostgreSQL server."""
    _run_command(cluster, "CREATE DATABASE migrated")
    _make_tables(f"postgresql://shoal@/migrated?host={cluster}")
    return "migrated"


@pytest.fixture
def quick_folder() -> Iterator[Path]:
    """A folder in memory where there is one."""
    with TemporaryDirectory(prefix="shoal-", dir=_find_memory()) as folder:
        yield Path(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, quick_folder: Path) -> Iterator[str]:
    """A database; empty, unless the test begins with opening a ledger in it."""
    has_tables = bool(_WITH_TABLES & set(request.fixturenames))
    if request.param == "sqlite":
        if has_tables:
            shutil.copy(request.getfixturevalue("migrated"), quick_folder / "ledger.db")
        yield f"sqlite:///{quick_folder}/ledger.db"
        return
    folder = request.getfixturevalue("cluster")
    name = f"test_{next(_names)}"
    model = request.getfixturevalue("migrated_server") if has_tables else "template1"
    _run_command(folder, f"CREATE DATABASE {name} TEMPLATE {model}")
    yield f"postgresql://shoal@/{name}?host={folder}"
    _run_command(folder, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def make_database(cluster: Path, migrated_server: str) -> Iterator[Callable[[], str]]:
    """Makes databases of the PostgreSQL server that have their tables."""
    made: list[str] = []

    def make() -> str:
        made.append(f"test_{next(_names)}")
        _run_command(cluster, f"CREATE DATABASE {made[-1]} TEMPLATE {migrated_server}")
        return f"postgresql://shoal@/{made[-1]}?host={cluster}"

    yield make
    for name in made:
        _run_command(cluster, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def key() -> Key:
    """The coordinator's key."""
    return Key.generate()


@pytest.fixture
def open_ledger(url: str, key: Key, clock: Callable[[], int]) -> Iterator[Callable[..., Ledger]]:
    """Opens the ledger of a run `demo` in the test's database, with a projection of leases; closed at the end."""
    opened: list[Ledger] = []
    engine = open_engine(url)
    with engine.begin() as connection:
        LEASE.create(connection)
    engine.dispose()

    def open_one(**changes: Any) -> Ledger:
        values = {"run": "demo", "key": key, "projections": [LEASES], "clock": clock, "lock_wait_s": 5, **changes}
        opened.append(Ledger.open(url, **values))
        return opened[-1]

    yield open_one
    for ledger in opened:
        ledger.close()


@pytest.fixture
def leases() -> Projection:
    """The projection that `open_ledger` keeps."""
    return LEASES


@pytest.fixture
def clock() -> Callable[[], int]:
    """A clock that goes on by a millisecond with each look."""
    ticks = itertools.count(1_700_000_000_000)
    return lambda: next(ticks)


def _find_tools() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    path = found[-1] if found else shutil.which("initdb")
    if path is None:
        pytest.skip("PostgreSQL is not installed: no initdb in the path or under /usr/lib/postgresql")
    return Path(path).parent


def _choose_user() -> pwd.struct_passwd | None:
    """Who runs the server: we ourselves, or someone else if we are root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    pytest.skip("PostgreSQL refuses to run as root, and there is no user postgres or nobody to run it as")


def _as_user(user: pwd.struct_passwd | None) -> dict[str, Any]:
    return {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _start_server(tools: Path, data: Path, folder: Path, user: pwd.struct_passwd | None) -> "subprocess.Popen[bytes]":
    settings = {"listen_addresses": "", "unix_socket_directories": folder, "fsync": "on", "max_connections": "40"}
    flags = [text for name, value in settings.items() for text in ("-c", f"{name}={value}")]
    log = (folder / "log").open("wb")
    server = subprocess.Popen(
        [str(tools / "postgres"), "-D", str(data), *flags], cwd=folder, stdout=log, stderr=log, **_as_user(user)
    )
    engine = sa.create_engine(_server_url(folder, "postgres"))
    deadline = time.monotonic() + _START_S
    while True:
        try:
            engine.connect().close()
        except sa.exc.OperationalError:
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                pytest.fail(f"PostgreSQL did not start: {(folder / 'log').read_text()[-1000:]}")
            time.sleep(0.05)
        else:
            engine.dispose()
            return server


def _find_memory() -> Path | None:
    return _MEMORY if _MEMORY.is_dir() else None


def _make_tables(url: str) -> None:
    engine = open_engine(url)
    upgrade_schema(engine)
    if engine.dialect.name == "sqlite":  # all of it in the one file
        with engine.connect() as connection:
            connection.exec_driver_sql("COMMIT")
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()


def _run_command(folder: Path, command: str) -> None:
    engine = sa.create_engine(_server_url(folder, "postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(command)
    engine.dispose()


def _server_url(folder: Path, database: str) -> str:
    return f"postgresql+psycopg://shoal@/{database}?host={folder}"
