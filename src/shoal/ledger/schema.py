"""Versions of the tables and of the rules: checked before reading; tables are rebuilt before writing.

Invariants:
- the chain (events, postings, heads, tree nodes) is created once and never changed: an unknown version is refused;
- a projection follows from the events: one of a different version is dropped and rebuilt from them;
- all of this is one transaction. A process killed in the middle leaves the database as it was.

The genesis states the edition of the rules that a run started with; its decisions cannot be replayed under any other.
Tables can be rebuilt, events cannot: what a decision did not record then is not available now.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence

from sqlalchemy import Connection, Table, inspect, select, text
from sqlalchemy.exc import SQLAlchemyError

from shoal.errors import ConfigError
from shoal.ledger.db import APPEND_ONLY, EVENT, Projection, define_table, is_sqlite, open_database, show_url
from shoal.ledger.event import Event, PostingError
from shoal.ledger.reader import MAX_SEQ, RowError, count_events, read_event, read_events
from shoal.ledger.untrusted import check_objects, check_tables

CHAIN = "chain"
CHAIN_VERSION = 1
"""Changing breaks: every ledger. No code here migrates the tables of the chain."""
_PROGRESS_EVERY = 10_000
_MAX_VERSIONS = 256
"""most rows of the table of versions, which may be a stranger's"""
_LOG = logging.getLogger(__name__)

SCHEMA_VERSION = define_table("schema_version", {"name": str, "version": int}, key="name")
# REPLACE deletes rows without firing the DELETE trigger, so inserting over an existing row is refused first.
_SQLITE_KEYS = {
    "event": "seq = NEW.seq OR hash = NEW.hash",
    "posting": "seq = NEW.seq AND line = NEW.line",
    "head": "size = NEW.size",
    "merkle_node": "level = NEW.level AND position = NEW.position",
}


class ProjectionError(ValueError):
    """An event of the ledger that a projection rejects."""


def prepare_schema(connection: Connection, projections: Sequence[Projection]) -> None:
    """Create the tables of a new ledger; rebuild projections of a different version from the events."""
    with connection.begin():
        versions = _read_versions(connection)
        if CHAIN in versions:
            _check_chain(connection, versions[CHAIN])
        else:
            _create_chain(connection)
        stale = [item for item in projections if versions.get(item.name) != item.version]
        if stale or not inspect(connection).has_table(SCHEMA_VERSION.name):
            _rebuild_projections(connection, stale)
            _write_versions(connection, versions | {CHAIN: CHAIN_VERSION} | {item.name: item.version for item in stale})


def check_schema(connection: Connection, projections: Sequence[Projection] = ()) -> None:
    """Reject a database without a ledger, or one whose tables have a different version or are not plain tables."""
    check_tables(connection, _list_tables(projections))
    versions, name = _read_versions(connection), show_url(connection.engine)
    if CHAIN not in versions:
        raise ConfigError(f"{name}: contains no ledger; start its coordinator first")
    _check_chain(connection, versions[CHAIN])
    for item in projections:
        if (found := versions.get(item.name, 0)) != item.version:
            raise ConfigError(
                f"{name}: tables {item.name!r} have version {found}, this shoal needs version {item.version}; start "
                "the coordinator once to rebuild them from the events, or use the shoal version that created them"
            )


def check_copy(connection: Connection, projections: Sequence[Projection]) -> None:
    """Reject a SQLite file that is not a ledger exactly as `prepare_schema` creates it, before it is written to."""
    check_schema(connection, projections)
    check_objects(connection, _list_tables(projections), _guard_sqlite())


def _list_tables(projections: Sequence[Projection]) -> list[Table]:
    return [*APPEND_ONLY, SCHEMA_VERSION, *(table for item in projections for table in item.tables)]


def _read_versions(connection: Connection) -> dict[str, int]:
    """Versions of the chain and of each projection; empty for an empty database."""
    inspector = inspect(connection)
    if inspector.has_table(SCHEMA_VERSION.name):
        rows = connection.execute(select(SCHEMA_VERSION).limit(_MAX_VERSIONS + 1)).all()
        if len(rows) > _MAX_VERSIONS:
            name = show_url(connection.engine)
            raise ConfigError(f"{name}: table `schema_version` has more than {_MAX_VERSIONS} rows")
        return {str(name): int(number) for name, number in rows}
    if inspector.has_table(EVENT.name):
        raise ConfigError(f"{show_url(connection.engine)}: table `event` has no version known to this shoal")
    return {}


def _check_chain(connection: Connection, version: int) -> None:
    if version != CHAIN_VERSION:
        raise ConfigError(
            f"{show_url(connection.engine)}: ledger has version {version}, from a different shoal; this one reads "
            f"version {CHAIN_VERSION}"
        )


def _create_chain(connection: Connection) -> None:
    for table in APPEND_ONLY:
        table.create(connection)
    for statement in _guard_sqlite() if is_sqlite(connection) else _guard_postgres():
        connection.execute(text(statement))


def _rebuild_projections(connection: Connection, projections: Sequence[Projection]) -> None:
    for table in [table for item in projections for table in item.tables]:
        table.drop(connection, checkfirst=True)
        table.create(connection)
    size = count_events(connection)
    if size == 0 or not projections:
        return
    names = ", ".join(item.name for item in projections)
    _LOG.info("%s: rebuilding tables %s from %d events", show_url(connection.engine), names, size)
    try:
        replay_events(_read_all(connection, size), connection, projections)
    except (RowError, ProjectionError) as error:
        raise ConfigError(
            f"{show_url(connection.engine)}: cannot rebuild tables {names} from the events ({error}); "
            "run `shoal ledger verify` with the shoal version that created them"
        ) from None


def replay_events(events: Iterable[Event], target: Connection, projections: Sequence[Projection]) -> None:
    """Apply all events of a ledger to the projections, in an empty database."""
    for event in events:
        for projection in projections:
            try:
                projection.apply(event, target)
            except (PostingError, ArithmeticError, LookupError, TypeError, ValueError, SQLAlchemyError) as error:
                # Events are checked when they are appended; a forged ledger may contain anything.
                raise ProjectionError(f"event {event.seq}: rejected by {projection.name} ({error!r:.200})") from error


def _read_all(connection: Connection, size: int) -> Iterator[Event]:
    for event in read_events(connection, 0, MAX_SEQ):
        if event.seq and event.seq % _PROGRESS_EVERY == 0:
            _LOG.info("rebuilding: %d of %d events", event.seq, size)
        yield event


def _write_versions(connection: Connection, versions: dict[str, int]) -> None:
    SCHEMA_VERSION.create(connection, checkfirst=True)
    connection.execute(SCHEMA_VERSION.delete())
    connection.execute(SCHEMA_VERSION.insert(), [{"name": name, "version": own} for name, own in versions.items()])


def _guard_sqlite() -> Iterator[str]:
    for table, same_key in _SQLITE_KEYS.items():
        refuse = f"SELECT RAISE(ABORT, 'the table {table} is append-only')"
        for verb in ("update", "delete"):
            yield f"CREATE TRIGGER {table}_no_{verb} BEFORE {verb} ON {table} BEGIN {refuse}; END"
        exists = f"EXISTS (SELECT 1 FROM {table} WHERE {same_key})"
        yield f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table} BEGIN {refuse} WHERE {exists}; END"


def _guard_postgres() -> Iterator[str]:
    yield (
        "CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$ "
        "BEGIN RAISE EXCEPTION 'the table % is append-only', TG_TABLE_NAME; END $$"
    )
    for table in APPEND_ONLY:
        call = "EXECUTE FUNCTION refuse_change()"
        yield f"CREATE TRIGGER {table}_no_change BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW {call}"
        yield f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table} FOR EACH STATEMENT {call}"


RULES = 6
"""Changing breaks: every run already started. Increase it when a decision changes, or what an event records of it."""


def describe_rules_version(genesis: Event) -> str:
    """How the run's rules differ from these; empty if they are the same."""
    edition = genesis.content.get("rules", 1)
    if edition == RULES:
        return ""
    age = "an older" if isinstance(edition, int) and edition < RULES else "a newer"
    return (
        f"started by {age} shoal with rules edition {edition!a:.20}, but this version has edition {RULES}; "
        "use the version that started the run to continue or verify it"
    )


def check_rules_version(url: str) -> None:
    """Reject a run that was started under different rules, before anything in its database is changed."""
    engine = open_database(url)
    try:
        with engine.connect() as connection:
            genesis = read_event(connection, 0) if inspect(connection).has_table(EVENT.name) else None
        words = "" if genesis is None else describe_rules_version(genesis)
    except (RowError, ValueError):
        return  # corrupt: opening the ledger reports where
    finally:
        engine.dispose()
    if words:
        raise ConfigError(f"{show_url(engine)}: {words}")
