"""The database of the control plane: SQLite by default, PostgreSQL by URL. Tables, statements, typed rows and
projections.

Invariants:
- what is committed is on disk: WAL with `synchronous = FULL`, or `synchronous_commit = on`;
- a transaction that may write holds SQLite's write lock from its first statement (`BEGIN IMMEDIATE`), so it never fails
  half-way because another writer was faster; `read_snapshot` never takes that lock;
- no wait for a lock or a server is longer than `WAIT_S`;
- columns are integers, text and bytes only, in STRICT tables: stored values have the declared type, and a row is the
  same in both databases;
- a ledger has one writer, enforced by the operating system or the database server. The lock belongs to the process:
  kill -9 releases it, and no lock file of a dead writer has to be removed by hand;
- driver exceptions leave this module as `SQLAlchemyError`.

Statements run directly on the database's driver: SQLAlchemy's processing of a statement and its values takes ten times
as long as the database does, and a decision has about twenty statements. Placeholders are `:name`, the driver's syntax.

Projections are tables that follow from the events alone and can be rebuilt from them. A handler reads the event and its
own tables, and nothing else: no clock, no randomness, no other table. A handler that raises rejects the event, and the
whole decision is rolled back. The projection that every ledger has is defined here: balances computed from postings,
which rejects overdrafts.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from shoal.errors import ConfigError, UnavailableError
from shoal.ledger.event import CREDIT_KINDS, MINT, Event, PostingError, name_account
from shoal.util.canonical import MAX_INTEGER
from shoal.util.files import open_lock, try_lock

WAIT_S = 5
"""Longest wait for a lock, or for the server to accept a connection."""

_READ = "shoal_read"

METADATA = sa.MetaData()
INT64 = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_TABLES: dict[str, sa.Table] = {}
"""by the name of their row class"""
_COLUMN_TYPES = (sa.BigInteger, sa.Integer, sa.LargeBinary, sa.Text)
_TYPES: dict[type, Any] = {int: INT64, str: sa.Text(), bytes: sa.LargeBinary()}


def define_table(
    name: str,
    fields: type | Mapping[str, type],
    *constraints: sa.CheckConstraint | sa.ForeignKeyConstraint,
    key: str | tuple[str, ...],
    index: str | tuple[str, ...] = (),
    unique: str | tuple[str, ...] = (),
) -> sa.Table:
    """Define a table of the control plane with one column per field of a row class, in that order; none is nullable.

    `prepare_schema` (ledger/schema.py) creates it.
    """
    keys, indexed, uniques = (names if isinstance(names, tuple) else (names,) for names in (key, index, unique))
    columns = [
        sa.Column(
            field,
            _TYPES[kind],
            primary_key=field in keys,
            autoincrement=False,
            nullable=False,
            index=field in indexed or None,
            unique=field in uniques or None,
        )
        for field, kind in (fields if isinstance(fields, Mapping) else get_type_hints(fields)).items()
    ]
    table = sa.Table(name, METADATA, *columns, *constraints, sqlite_strict=True)
    if isinstance(fields, type):
        _TABLES[fields.__name__] = table
    return table


def index_some(name: str, condition: str, *columns: sa.Column[Any]) -> None:
    """Define a partial index; statements must repeat its condition literally for it to be used."""
    sa.Index(name, *columns, sqlite_where=sa.text(condition), postgresql_where=sa.text(condition))


EVENT = define_table(
    "event",
    {
        "seq": int,
        "time_ms": int,
        "kind": str,
        "actor": str,
        "subject": str,
        "body": bytes,
        "signature": bytes,
        "prev_hash": bytes,
        "hash": bytes,
    },
    key="seq",
    index="subject",
    unique="hash",
)
POSTING = define_table(
    "posting",
    {"seq": int, "line": int, "account": str, "amount": int},
    sa.ForeignKeyConstraint(["seq"], ["event.seq"]),
    key=("seq", "line"),
    index="account",
)
HEAD = define_table(
    "head", {"size": int, "time_ms": int, "root": bytes, "last_hash": bytes, "signature": bytes}, key="size"
)
MERKLE_NODE = define_table("merkle_node", {"level": int, "position": int, "hash": bytes}, key=("level", "position"))
BALANCE = define_table(
    "balance", {"account": str, "amount": int}, sa.CheckConstraint("amount >= 0 OR account = 'mint'"), key="account"
)

APPEND_ONLY = (EVENT, POSTING, HEAD, MERKLE_NODE)
"""Tables whose rows the database itself refuses to change or delete."""


def parse_url(text: str) -> URL:
    """Parse a database argument: the path of a file, or a SQLite or PostgreSQL URL."""
    if "://" not in text:
        return URL.create("sqlite", database=text)
    try:
        url = make_url(text)
    except ArgumentError:
        raise ConfigError("invalid database URL; write sqlite:///FILE or postgresql://...") from None
    match url.get_backend_name():
        case "sqlite":
            return url.set(drivername="sqlite")
        case "postgresql":
            return url.set(drivername="postgresql+psycopg")
    raise ConfigError(f"{url.drivername}: unsupported database; write sqlite:///FILE or postgresql://...")


def open_database(text: str) -> sa.Engine:
    """Connect to a database, lazily; SQLite creates the file on the first connection."""
    url = parse_url(text)
    if url.get_backend_name() == "postgresql":
        options = f"-c synchronous_commit=on -c lock_timeout={WAIT_S}s"
        engine = sa.create_engine(url, connect_args={"connect_timeout": WAIT_S, "options": options})
    else:
        _check_file(url)
        engine = sa.create_engine(url)
        sa.event.listen(engine, "connect", _prepare_sqlite)
        begin_directly(engine)
    return engine


def begin_directly(engine: sa.Engine) -> None:
    """Let transactions of a SQLite engine begin by `_begin_sqlite`."""
    sa.event.listen(engine, "begin", _begin_sqlite)


def show_url(engine: sa.Engine) -> str:
    """The database for messages: a URL without its password, or the path of a file."""
    if is_sqlite(engine):
        return engine.url.database or ""
    return engine.url.set(drivername="postgresql").render_as_string(hide_password=True)


def is_sqlite(bind: sa.Engine | sa.Connection) -> bool:
    """Whether this is SQLite; otherwise it is PostgreSQL."""
    return bind.dialect.name == "sqlite"


@contextmanager
def read_snapshot(engine: sa.Engine, *, lenient: bool = False) -> Iterator[sa.Connection]:
    """A connection that reads one snapshot of the database and does not block its writer.

    `lenient` lets SQLite return text as arbitrary bytes, which only an edited file contains: the verifier
    must read them to name the row.
    """
    if not is_sqlite(engine):
        options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with engine.connect().execution_options(**options) as connection, connection.begin():
            yield connection
        return
    with engine.connect().execution_options(**{_READ: True}) as connection:
        raw: Any = connection.connection.dbapi_connection
        raw.text_factory = (lambda data: data.decode(errors="backslashreplace")) if lenient else str
        try:
            with connection.begin():
                yield connection
        finally:
            raw.text_factory = str  # the pool reuses this connection


def _check_file(url: URL) -> None:
    if not url.database or url.database == ":memory:" or url.query:
        raise ConfigError("a SQLite URL names a file and nothing else: sqlite:///FILE")
    folder = Path(url.database).parent
    if not folder.is_dir():
        raise ConfigError(f"{url.database}: cannot open the database, folder {folder} does not exist")


def _prepare_sqlite(raw: Any, entry: ConnectionPoolEntry) -> None:
    raw.isolation_level = None  # otherwise sqlite3 begins transactions by its own rules
    for pragma in (f"busy_timeout = {WAIT_S * 1000}", "journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        raw.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: sa.Connection) -> None:
    """Bypass SQLAlchemy, where this one statement costs as much as all the work inside the transaction."""
    read = connection.get_execution_options().get(_READ, False)
    raw: Any = connection.connection.driver_connection
    failure = connection.dialect.loaded_dbapi.Error
    try:
        raw.execute("BEGIN" if read else "BEGIN IMMEDIATE").close()
    except failure as error:
        raise DBAPIError.instance("BEGIN", None, error, failure) from error


_POLL_S = 0.05
_ADVISORY_KEY = 0x73686F616C6C6467
"""Changing breaks: a writer of an older version running next to one of a newer version is no longer refused."""


class WriterLock:
    """The exclusive right to write to a ledger; its connection stays open while the lock is held."""

    def __init__(self, connection: sa.Connection, wait_s: float) -> None:
        """Wait up to `wait_s` for the lock: PostgreSQL needs a moment to notice that the last writer was killed."""
        self._descriptor: int | None = None
        name = show_url(connection.engine)
        if is_sqlite(connection):
            self._descriptor = lock = open_lock(Path(f"{name}.lock"))
            taken = _retry(lambda: try_lock(lock), wait_s)
        else:
            taken = _retry(lambda: _lock_server(connection), wait_s)
        if not taken:
            self.release()
            raise UnavailableError(
                f"{name}: another process is writing to this ledger; stop it first, a ledger has one writer"
            )

    def release(self) -> None:
        """Let another writer start. PostgreSQL releases the lock when the connection closes."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _retry(attempt: Callable[[], bool], wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not attempt():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _lock_server(connection: sa.Connection) -> bool:
    with connection.begin():
        return bool(connection.execute(sa.text("SELECT pg_try_advisory_lock(:key)"), {"key": _ADVISORY_KEY}).scalar())


Row = TypeVar("Row")
_NAME = re.compile(r":([a-z_]+)")


class Sql:
    """One statement; `postgres` if PostgreSQL needs a different one."""

    __slots__ = ("_postgres", "_sqlite")

    def __init__(self, sqlite: str, postgres: str | None = None) -> None:
        self._sqlite = sqlite
        self._postgres = _NAME.sub(r"%(\1)s", postgres or sqlite)

    def run(self, connection: sa.Connection, values: Mapping[str, Any] | None = None) -> Any:
        """Run the statement inside the connection's transaction; return the driver's cursor."""
        raw: Any = connection.connection.driver_connection
        try:
            return raw.execute(self._choose(connection), values or {})
        except connection.dialect.loaded_dbapi.Error as error:
            raise SQLAlchemyError(str(error)) from error

    def run_many(self, connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run the statement once for each row."""
        raw: Any = connection.connection.driver_connection
        try:
            raw.cursor().executemany(self._choose(connection), rows)
        except connection.dialect.loaded_dbapi.Error as error:
            raise SQLAlchemyError(str(error)) from error

    def _choose(self, connection: sa.Connection) -> str:
        return self._sqlite if connection.dialect.name == "sqlite" else self._postgres


def insert_rows(connection: sa.Connection, table: sa.Table, *rows: Mapping[str, Any]) -> None:
    """Insert whole rows."""
    if rows:
        _insert(table, replaces=False).run_many(connection, rows)


def replace_rows(connection: sa.Connection, table: sa.Table, *rows: Mapping[str, Any]) -> None:
    """Insert whole rows, replacing rows with the same key."""
    if rows:
        _insert(table, replaces=True).run_many(connection, rows)


def update_rows(connection: sa.Connection, table: sa.Table, changes: Mapping[str, Any], **values: Any) -> int:
    """Update columns of the rows whose other columns have `values`; return the number of rows."""
    new_values = {f"new_{name}": value for name, value in changes.items()}
    return execute(connection, _update(table, tuple(changes), *values), **new_values, **values)


@cache
def _insert(table: sa.Table, *, replaces: bool) -> Sql:
    names = [column.name for column in table.columns]
    keys = [column.name for column in table.primary_key]
    insert = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES (:{', :'.join(names)})"
    changes = ", ".join(f"{name} = excluded.{name}" for name in names if name not in keys)
    return Sql(f"{insert} ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {changes}" if replaces else insert)


@cache
def _update(table: sa.Table, changed: tuple[str, ...], *names: str) -> Sql:
    changes = ", ".join(f"{name} = :new_{name}" for name in changed)
    return Sql(f"UPDATE {table.name} SET {changes} WHERE {_match_values(names)}")


def list_columns(table: sa.Table, prefix: str = "") -> str:
    """The columns in order, matching the fields of the typed row."""
    return ", ".join(f"{prefix}{column.name}" for column in table.columns)


def fetch_row(connection: sa.Connection, statement: Sql | str, make: Callable[..., Row], **values: Any) -> Row | None:
    """The first row of the result, typed; None if the result is empty."""
    cursor = _prepare(statement).run(connection, values)
    row = cursor.fetchone()
    cursor.close()
    return None if row is None else make(*row)


def fetch_rows(connection: sa.Connection, statement: Sql | str, make: Callable[..., Row], **values: Any) -> list[Row]:
    """All rows of the result, typed."""
    return [make(*row) for row in _prepare(statement).run(connection, values).fetchall()]


def fetch_number(connection: sa.Connection, statement: Sql | str, **values: Any) -> int:
    """The single number of the result; 0 for NULL and for no row."""
    return int(fetch_row(connection, statement, lambda number: number or 0, **values) or 0)


def execute(connection: sa.Connection, statement: Sql | str, **values: Any) -> int:
    """Run a statement; return the number of rows it changed."""
    return int(_prepare(statement).run(connection, values).rowcount)


def change_one(connection: sa.Connection, statement: Sql | str, refusal: str, **values: Any) -> None:
    """Change exactly one row; raise ValueError(refusal) otherwise, because such an event cannot belong to this run."""
    if execute(connection, statement, **values) != 1:
        raise ValueError(refusal)


def find_row(connection: sa.Connection, kind: type[Row], condition: str = "", **values: Any) -> Row | None:
    """The first row of the table of a row class, by a condition (`WHERE ...`) or by the values of some columns."""
    return fetch_row(connection, _select(kind.__name__, condition, *values), kind, **values)


def list_rows(connection: sa.Connection, kind: type[Row], condition: str = "", **values: Any) -> list[Row]:
    """Like `find_row`, but return all matching rows."""
    return fetch_rows(connection, _select(kind.__name__, condition, *values), kind, **values)


@cache
def _select(kind: str, condition: str, *names: str) -> Sql:
    table = _TABLES[kind]
    return Sql(f"SELECT {list_columns(table)} FROM {table.name} {condition or f'WHERE {_match_values(names)}'}")


def _match_values(names: Sequence[str]) -> str:
    return " AND ".join(f"{name} = :{name}" for name in names)


def _prepare(statement: Sql | str) -> Sql:
    return statement if isinstance(statement, Sql) else _parse_sql(statement)


_parse_sql = cache(Sql)


Handler = Callable[[Event, sa.Connection], None]


@dataclass(frozen=True, slots=True)
class Projection:
    """A set of tables, and how each kind of event changes them."""

    name: str
    tables: tuple[sa.Table, ...]
    handlers: Mapping[str, Sequence[Handler]]
    """by kind of event, in the order in which they run"""
    version: int = 1
    """increase it when the tables or a handler change: databases with a different version are rebuilt at start"""

    def __post_init__(self) -> None:
        for own in self.tables:
            assert own.primary_key.columns, f"{own.name}: a projection's table has a primary key"
            assert all(isinstance(column.type, _COLUMN_TYPES) for column in own.columns), (
                f"{own.name}: a projection's columns are integers, text and bytes"
            )

    def apply(self, event: Event, connection: sa.Connection) -> None:
        """Apply one event to the tables."""
        for handle in self.handlers.get(event.kind, ()):
            handle(event, connection)


def apply_event(projections: Iterable[Projection], event: Event, connection: sa.Connection) -> None:
    """Apply one event to all projections."""
    for projection in projections:
        projection.apply(event, connection)


_SELECT_BALANCE = Sql("SELECT amount FROM balance WHERE account = :account")
_SELECT_BALANCES = Sql(
    "SELECT account, amount FROM balance WHERE account IN (SELECT value FROM json_each(:accounts))",
    "SELECT account, amount FROM balance WHERE account IN (SELECT jsonb_array_elements_text(CAST(:accounts AS jsonb)))",
)


def read_balances(connection: sa.Connection, accounts: list[str]) -> dict[str, int]:
    """The balances of some accounts; 0 for an account without postings."""
    balances = dict.fromkeys(accounts, 0)
    return balances | dict(_SELECT_BALANCES.run(connection, {"accounts": json.dumps(accounts)}).fetchall())


def read_accounts(connection: sa.Connection, owner: str, *kinds: str) -> dict[str, int]:
    """The balances of an owner's accounts, by kind. Plain lookups, which untrusted databases allow too."""
    rows = {kind: _SELECT_BALANCE.run(connection, {"account": name_account(kind, owner)}).fetchone() for kind in kinds}
    return {kind: 0 if row is None else row[0] for kind, row in rows.items()}


def _apply_postings(event: Event, connection: sa.Connection) -> None:
    held = read_balances(connection, [posting.account for posting in event.postings])
    rows = []
    for account, amount in event.postings:
        balance = held[account] + amount
        if balance < 0 and account != MINT:
            raise PostingError(f"{account}: balance {held[account]} is {-balance} too low for this posting")
        if abs(balance) > MAX_INTEGER:
            raise PostingError(f"{account}: balance would reach 2**63 or more")
        rows.append({"account": account, "amount": balance})
    replace_rows(connection, BALANCE, *rows)


BALANCES = Projection("balances", (BALANCE,), dict.fromkeys(CREDIT_KINDS, (_apply_postings,)))
