"""Reading a database that someone else made: a ledger file is data from a stranger until its signatures are checked.

SQLite, invariants:
- the file is opened read-only: no rollback of a journal, no checkpoint, no write. A path, or a file of SQLite's beside
  what it leads to, that is not a regular file (a pipe, a device) is refused, because reading it may never end;
- an authorizer allows only SELECT on tables: no view, no function but a few, no PRAGMA but those that describe tables,
  no ATTACH, no recursion;
- what is read must be a plain table of stored columns (`check_tables`). A file that is written to, the copy of a remote
  ledger, must also have no trigger, index or constraint that shoal does not create (`check_objects`);
- no value is longer than `MAX_VALUE_BYTES`;
- all statements together take at most `BASE_STEPS` + `STEPS_PER_BYTE` x size of the file steps of SQLite's machine.
  Reading a ledger takes a small part of that. A small file whose pages refer to each other in a circle, or to one page
  many times, holds any number of rows; such a file ends here.

PostgreSQL: a server executes what its owner wrote, under the reader's account. Use a server that you trust, or an
address or a file instead. Transactions are read-only, a statement takes at most `STATEMENT_S`, and views, rules, row
security, inheritance and computed columns in the place of plain tables are refused.
"""

import sqlite3
import stat
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import URL
from sqlalchemy.schema import CreateIndex, CreateTable

from shoal.errors import ConfigError
from shoal.ledger.db import WAIT_S, begin_directly, is_sqlite, parse_url, show_url

MAX_VALUE_BYTES = 1 << 20
"""An event's body has 64 KiB at most, and rows of tables follow from one event each."""
BASE_STEPS = 10_000_000
STEPS_PER_BYTE = 16
STATEMENT_S = 300
MAX_OBJECTS = 4096

_STEPS = 1000
"""between two calls of the progress handler"""
_BESIDE = ("-wal", "-shm", "-journal")
_FUNCTIONS = frozenset({"coalesce", "count", "length", "max", "min", "sqlite_version", "sum"})
_PRAGMAS = frozenset({"table_info", "table_xinfo", "read_uncommitted"})
_PLAIN = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_TRANSACTION})


def open_untrusted(text: str) -> sa.Engine:
    """Open a database for reading, as one that anyone may have written."""
    url = parse_url(text)
    if url.get_backend_name() == "postgresql":
        options = f"-c default_transaction_read_only=on -c statement_timeout={STATEMENT_S}s -c lock_timeout={WAIT_S}s"
        return sa.create_engine(url, connect_args={"connect_timeout": WAIT_S, "options": options})
    path = _check_files(url)
    engine = sa.create_engine(url, creator=lambda: _connect(path), poolclass=sa.pool.StaticPool)
    begin_directly(engine)
    return engine


def _check_files(url: URL) -> Path:
    if not url.database or url.database == ":memory:" or url.query:
        raise ConfigError("a SQLite URL names a file and nothing else: sqlite:///FILE")
    path = Path(url.database).resolve()  # as SQLite does: its other files lie beside what a link leads to
    if not path.exists():
        raise ConfigError(f"{path}: no such file")  # SQLite would create an empty one
    if not path.is_file():
        raise ConfigError(f"{path}: not a regular file")
    for suffix in _BESIDE:
        beside = path.with_name(path.name + suffix)
        try:
            mode = beside.lstat().st_mode
        except OSError:
            continue
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{beside}: not a regular file; SQLite would read it together with {path.name}")
    return path


def _connect(path: Path) -> sqlite3.Connection:
    raw = sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=WAIT_S, check_same_thread=False
    )
    raw.isolation_level = None
    for pragma in ("query_only = ON", "trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
        raw.execute(f"PRAGMA {pragma}").close()
    raw.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    raw.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    size = sum(each.stat().st_size for each in (path, path.with_name(f"{path.name}-wal")) if each.exists())
    raw.set_progress_handler(_StepBudget(BASE_STEPS + STEPS_PER_BYTE * size), _STEPS)
    raw.set_authorizer(_authorize)
    return raw


class _StepBudget:
    """Called by SQLite every `_STEPS` steps; a return value above 0 ends the statement."""

    def __init__(self, max_steps: int) -> None:
        self._left = max_steps

    def __call__(self) -> int:
        self._left -= _STEPS
        return int(self._left < 0)


def _authorize(action: int, first: str | None, second: str | None, database: str | None, inside: str | None) -> int:
    """Called by SQLite while it prepares a statement; `inside`: the view or trigger that the access comes from."""
    is_allowed = (
        action in _PLAIN
        or (action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS)
        or (action == sqlite3.SQLITE_PRAGMA and first in _PRAGMAS)
    )
    return sqlite3.SQLITE_OK if is_allowed and inside is None else sqlite3.SQLITE_DENY


def check_tables(connection: sa.Connection, tables: Iterable[sa.Table]) -> None:
    """Refuse a database in which one of these is not a plain table of stored columns; one that is missing passes."""
    names = {table.name for table in tables}
    if not is_sqlite(connection):
        _check_postgres(connection, names)
        return
    for kind, name, _, sql in _list_objects(connection):
        if name.lower() not in names:
            continue
        if kind != "table" or sql[:13].upper() != "CREATE TABLE ":
            raise _refuse_object(connection, kind, name)
        columns = connection.execute(sa.text(f"PRAGMA main.table_xinfo({name})"))  # a name of ours, up to its case
        if any(column.hidden for column in columns):
            raise _refuse_object(connection, "computed column in table", name)


def check_objects(connection: sa.Connection, tables: Iterable[sa.Table], triggers: Iterable[str]) -> None:
    """Refuse a SQLite database with anything at these tables that shoal would not create, before writing to it.

    `triggers` are the statements that create those of shoal.
    """
    made = {_squeeze(text) for text in triggers}
    names = set()
    for table in tables:
        names.add(table.name)
        made.add(_squeeze(str(CreateTable(table).compile(dialect=connection.dialect))))
        made |= {_squeeze(str(CreateIndex(index).compile(dialect=connection.dialect))) for index in table.indexes}
    for kind, name, of, sql in _list_objects(connection):
        # An index that a constraint of a table implies has no text of its own, and follows from the table's.
        is_implied = kind == "index" and not sql and name.startswith("sqlite_autoindex_")
        if {name.lower(), of.lower()} & names and not is_implied and _squeeze(sql) not in made:
            raise _refuse_object(connection, kind, name)


def _list_objects(connection: sa.Connection) -> list[tuple[str, str, str, str]]:
    """Kind, name, table and text of everything in a SQLite file."""
    statement = sa.text(f"SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT {MAX_OBJECTS + 1}")
    found = [(str(kind), str(name), str(of), str(sql or "")) for kind, name, of, sql in connection.execute(statement)]
    if len(found) > MAX_OBJECTS:
        name = show_url(connection.engine)
        raise ConfigError(f"{name}: more than {MAX_OBJECTS} tables, views, indexes and triggers; not a ledger of shoal")
    return found


def _refuse_object(connection: sa.Connection, kind: str, name: str) -> ConfigError:
    return ConfigError(
        f"{show_url(connection.engine)}: {kind[:30]} {name[:80]!a} is not what shoal creates; the file was made or "
        "changed by other software"
    )


def _squeeze(sql: str) -> str:
    return " ".join(sql.split())


_RELATIONS = sa.text(
    "SELECT relname, relkind::text, relrowsecurity OR relhasrules OR relhassubclass OR EXISTS "
    "(SELECT 1 FROM pg_attribute WHERE attrelid = pg_class.oid AND attgenerated <> '') "
    "FROM pg_class WHERE relname = ANY(:names) AND pg_table_is_visible(oid)"
)


def _check_postgres(connection: sa.Connection, names: set[str]) -> None:
    rows = connection.execute(_RELATIONS, {"names": sorted(names)})
    for name, kind, is_special in rows:
        if kind != "r" or is_special:
            raise ConfigError(
                f"{show_url(connection.engine)}: {name} is not a plain table as shoal creates it; it is not read"
            )
