from pathlib import Path

import pytest
import sqlalchemy as sa

from shoal.errors import ConfigError
from shoal.ledger.db import APPEND_ONLY, BALANCES, is_sqlite, open_database, parse_url, read_snapshot, show_url
from shoal.ledger.schema import check_schema, prepare_schema

HASH = b"\x07" * 32
ROWS = {
    "event": {"seq": 0, "time_ms": 1, "kind": "k", "actor": "a", "subject": "", "body": b"{}", "signature": b""}
    | {"prev_hash": HASH, "hash": HASH},
    "posting": {"seq": 0, "line": 0, "account": "mint", "amount": 1},
    "head": {"size": 1, "time_ms": 1, "root": HASH, "last_hash": HASH, "signature": b""},
    "merkle_node": {"level": 8, "position": 0, "hash": HASH},
}


def prepare(url: str) -> sa.Engine:
    engine = open_database(url)
    with engine.connect() as connection:
        prepare_schema(connection, [BALANCES])
    return engine


def open_filled(url: str) -> sa.Engine:
    engine = prepare(url)
    with engine.begin() as connection:
        for table in APPEND_ONLY:
            connection.execute(table.insert(), ROWS[table.name])
    return engine


def test_tables_that_are_up_to_date_stay_as_they_are(url: str) -> None:
    engine = open_filled(url)
    with engine.begin() as connection:
        connection.execute(sa.text("INSERT INTO balance VALUES ('mint', -1)"))
    prepare(url).dispose()
    with engine.connect() as connection:
        for table in ("event", "balance"):
            assert connection.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar() == 1
    engine.dispose()


def test_a_database_without_a_ledger_or_with_one_of_another_version_is_refused(url: str) -> None:
    engine = open_database(url)
    with engine.connect() as connection, pytest.raises(ConfigError, match="contains no ledger"):
        check_schema(connection)
    prepare(url).dispose()
    with engine.connect() as connection:
        check_schema(connection, [BALANCES])
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE schema_version SET version = 9 WHERE name = 'chain'"))
    with engine.connect() as connection, pytest.raises(ConfigError, match="ledger has version 9"):
        check_schema(connection)
    with pytest.raises(ConfigError, match="ledger has version 9"):
        prepare(url)
    engine.dispose()


def test_tables_of_another_program_are_not_taken_for_a_ledger(url: str) -> None:
    engine = open_database(url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE event (seq INTEGER PRIMARY KEY)"))
    with pytest.raises(ConfigError, match="table `event` has no version"):
        prepare(url)
    engine.dispose()


@pytest.mark.parametrize("table", [table.name for table in APPEND_ONLY])
def test_the_database_refuses_to_change_or_delete_rows(url: str, table: str) -> None:
    engine = open_filled(url)
    column = next(iter(ROWS[table]))
    commands = [f"UPDATE {table} SET {column} = {column}", f"DELETE FROM {table}"]
    commands.append(
        f"INSERT OR REPLACE INTO {table} SELECT * FROM {table}" if is_sqlite(engine) else f"TRUNCATE {table} CASCADE"
    )
    for command in commands:
        with engine.connect() as connection, pytest.raises(sa.exc.DatabaseError, match="append-only"):
            connection.execute(sa.text(command))
    with engine.connect() as connection:
        assert connection.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar() == 1
    engine.dispose()


def test_the_database_refuses_an_overdraft_and_a_posting_without_an_event(url: str) -> None:
    engine = open_filled(url)
    for command in (
        "INSERT INTO balance VALUES ('burn', -1)",
        "INSERT INTO posting VALUES (5, 0, 'mint', 1)",
    ):
        with pytest.raises(sa.exc.IntegrityError), engine.begin() as connection:
            connection.execute(sa.text(command))
    with engine.begin() as connection:
        connection.execute(sa.text("INSERT INTO balance VALUES ('mint', -1)"))
    engine.dispose()


def test_a_snapshot_sees_one_moment_and_does_not_hold_up_the_writer(url: str) -> None:
    engine = open_filled(url)
    with read_snapshot(engine) as reader:
        assert reader.execute(sa.text("SELECT count(*) FROM balance")).scalar() == 0
        with engine.begin() as writer:
            writer.execute(sa.text("INSERT INTO balance VALUES ('mint', -1)"))
        assert reader.execute(sa.text("SELECT count(*) FROM balance")).scalar() == 0
    with read_snapshot(engine) as reader:
        assert reader.execute(sa.text("SELECT count(*) FROM balance")).scalar() == 1
    engine.dispose()


def test_sqlite_waits_for_nothing_in_the_middle_and_syncs_each_commit(tmp_path: Path) -> None:
    engine = open_database(str(tmp_path / "a.db"))
    with engine.connect() as connection:
        pragmas = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}
        assert {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in pragmas} == pragmas
    with engine.begin(), open_other(tmp_path / "a.db") as other, pytest.raises(sa.exc.OperationalError, match="locked"):
        other.exec_driver_sql("BEGIN IMMEDIATE")
    engine.dispose()


def open_other(path: Path) -> sa.Connection:
    return sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 0}).connect()


def test_postgresql_syncs_each_commit_and_waits_for_locks_no_longer_than_stated(url: str) -> None:
    engine = open_database(url)
    if is_sqlite(engine):
        return
    with engine.connect() as connection:
        names = {"synchronous_commit": "on", "fsync": "on", "lock_timeout": "5s"}
        assert {name: connection.exec_driver_sql(f"SHOW {name}").scalar() for name in names} == names
    engine.dispose()


def test_a_path_and_both_kinds_of_url_are_understood() -> None:
    assert parse_url("runs/a.db").render_as_string() == "sqlite:///runs/a.db"
    assert parse_url("sqlite:////a.db").database == "/a.db"
    assert parse_url("postgresql://u@h/d").drivername == "postgresql+psycopg"
    assert parse_url("postgresql+psycopg2://u@h/d").drivername == "postgresql+psycopg"


@pytest.mark.parametrize(
    "text", ["mysql://a/b", "sqlite://", ":memory:", "sqlite:///a?mode=ro", "http://[", "/no/such/folder/a.db"]
)
def test_other_databases_are_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError):
        open_database(text)


def test_a_password_is_never_shown() -> None:
    assert show_url(open_database("postgresql://u:secret@h/d")) == "postgresql://u:***@h/d"
