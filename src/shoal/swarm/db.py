"""The database of the control plane: SQLite by default, PostgreSQL by URL, and the tables of the ledger.

Invariants:
- what is committed is on the disk: WAL with `synchronous = FULL`, or `synchronous_commit = on`;
- a transaction that may write holds SQLite's write lock from its first statement on (`BEGIN IMMEDIATE`), so it never
  fails half-way because another was faster; `read_snapshot` never takes that lock;
- no wait for a lock or a server is longer than `WAIT_S`;
- columns are integers, text and bytes only, in STRICT tables: what is stored has the type that was declared, and a row
  is the same row in both databases.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Engine,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    create_engine,
    event,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry

from shoal.errors import ConfigError

WAIT_S = 5
"""Longest wait for a lock or for the server to answer a connection."""

_READ = "shoal_read"

METADATA = MetaData()
INT64 = BigInteger().with_variant(Integer, "sqlite")


def define_table(name: str, *items: Column[Any] | CheckConstraint) -> Table:
    """A table of the control plane; migrations create it."""
    return Table(name, METADATA, *items, sqlite_strict=True)


def spell_insert(table: Table) -> str:
    """The statement that inserts a whole row."""
    names = [column.name for column in table.columns]
    return f"INSERT INTO {table.name} ({', '.join(names)}) VALUES (:{', :'.join(names)})"


EVENT = define_table(
    "event",
    Column("seq", INT64, primary_key=True, autoincrement=False),
    Column("time_ms", INT64, nullable=False),
    Column("kind", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("subject", Text, nullable=False, index=True),
    Column("body", LargeBinary, nullable=False),
    Column("signature", LargeBinary, nullable=False),
    Column("prev_hash", LargeBinary, nullable=False),
    Column("hash", LargeBinary, nullable=False, unique=True),
)
POSTING = define_table(
    "posting",
    Column("seq", INT64, ForeignKey("event.seq"), primary_key=True, autoincrement=False),
    Column("line", INT64, primary_key=True, autoincrement=False),
    Column("account", Text, nullable=False, index=True),
    Column("amount", INT64, nullable=False),
)
HEAD = define_table(
    "head",
    Column("size", INT64, primary_key=True, autoincrement=False),
    Column("time_ms", INT64, nullable=False),
    Column("root", LargeBinary, nullable=False),
    Column("last_hash", LargeBinary, nullable=False),
    Column("signature", LargeBinary, nullable=False),
)
MERKLE_NODE = define_table(
    "merkle_node",
    Column("level", INT64, primary_key=True, autoincrement=False),
    Column("position", INT64, primary_key=True, autoincrement=False),
    Column("hash", LargeBinary, nullable=False),
)
BALANCE = define_table(
    "balance",
    Column("account", Text, primary_key=True),
    Column("amount", INT64, CheckConstraint("amount >= 0 OR account = 'mint'"), nullable=False),
)

APPEND_ONLY = (EVENT, POSTING, HEAD, MERKLE_NODE)
"""Tables whose rows the database itself refuses to change or delete."""


def parse_url(text: str) -> URL:
    """A database as the user wrote it: a file's path, or a URL of SQLite or PostgreSQL."""
    if "://" not in text:
        return URL.create("sqlite", database=text)
    try:
        url = make_url(text)
    except ArgumentError:
        raise ConfigError("a database URL that cannot be read; write sqlite:///FILE or postgresql://...") from None
    match url.get_backend_name():
        case "sqlite":
            return url.set(drivername="sqlite")
        case "postgresql":
            return url.set(drivername="postgresql+psycopg")
    raise ConfigError(f"{url.drivername}: not a database shoal works with; write sqlite:///FILE or postgresql://...")


def open_engine(text: str) -> Engine:
    """Connect to a database, lazily; SQLite creates the file with the first connection."""
    url = parse_url(text)
    if url.get_backend_name() == "postgresql":
        options = f"-c synchronous_commit=on -c lock_timeout={WAIT_S}s"
        engine = create_engine(url, connect_args={"connect_timeout": WAIT_S, "options": options})
    else:
        _check_file(url)
        engine = create_engine(url)
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def show_url(engine: Engine) -> str:
    """The database for messages: without its password, and a file by its path."""
    return engine.url.database or "" if is_sqlite(engine) else engine.url.render_as_string(hide_password=True)


def is_sqlite(bind: Engine | Connection) -> bool:
    """Whether this is SQLite and not PostgreSQL."""
    return bind.dialect.name == "sqlite"


@contextmanager
def read_snapshot(engine: Engine, *, lenient: bool = False) -> Iterator[Connection]:
    """A connection that sees one moment of the database and does not hold up its writer.

    `lenient` lets SQLite's text be any bytes, which only someone who edits the file can put there: the verifier must
    read them to name the row.
    """
    if not is_sqlite(engine):
        options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with engine.connect().execution_options(**options) as connection, connection.begin():
            yield connection
        return
    with engine.connect().execution_options(**{_READ: True}) as connection:
        raw: Any = connection.connection.dbapi_connection
        raw.text_factory = _decode_text if lenient else str
        try:
            with connection.begin():
                yield connection
        finally:
            raw.text_factory = str  # the pool hands it to others


def _check_file(url: URL) -> None:
    if not url.database or url.database == ":memory:" or url.query:
        raise ConfigError("a SQLite database is a file, named by its path alone: sqlite:///FILE")
    folder = Path(url.database).parent
    if not folder.is_dir():
        raise ConfigError(f"{url.database}: cannot be opened, there is no folder {folder}")


def _prepare_sqlite(raw: Any, entry: ConnectionPoolEntry) -> None:
    raw.isolation_level = None  # sqlite3 would else begin transactions by its own rules
    for pragma in (
        f"busy_timeout = {WAIT_S * 1000}",
        "journal_mode = WAL",
        "synchronous = FULL",
        "foreign_keys = ON",
    ):
        raw.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    """Past SQLAlchemy, for which this one statement is as much work as all that it begins."""
    read = connection.get_execution_options().get(_READ, False)
    raw: Any = connection.connection.driver_connection
    failure = connection.dialect.loaded_dbapi.Error
    try:
        raw.execute("BEGIN" if read else "BEGIN IMMEDIATE").close()
    except failure as error:
        raise DBAPIError.instance("BEGIN", None, error, failure) from error


def _decode_text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")
