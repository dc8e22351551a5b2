from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from shoal.errors import ConfigError
from shoal.swarm.db import APPEND_ONLY, METADATA, is_sqlite, open_engine, parse_url, read_snapshot, show_url
from shoal.swarm.migrate import check_schema, upgrade_schema

HASH = b"\x07" * 32
ROWS = {
    "event": {"seq": 0, "time_ms": 1, "kind": "k", "actor": "a", "subject": "", "body": b"{}", "signature": b""}
    | {"prev_hash": HASH, "hash": HASH},
    "posting": {"seq": 0, "line": 0, "account": "mint", "amount": 1},
    "head": {"size": 1, "time_ms": 1, "root": HASH, "last_hash": HASH, "signature": b""},
    "merkle_node": {"level": 8, "position": 0, "hash": HASH},
}


def open_filled(url: str) -> sa.Engine:
    engine = open_engine(url)
    upgrade_schema(engine)
    with engine.begin() as connection:
        for table in APPEND_ONLY:
            connection.execute(table.insert(), ROWS[table.name])
    return engine


def test_the_migrations_give_the_tables_that_the_code_declares(url: str) -> None:
    engine = open_engine(url)
    upgrade_schema(engine)
    with engine.connect() as connection:
        ours = {"include_name": lambda name, kind, parents: kind != "table" or name in METADATA.tables}
        context = MigrationContext.configure(connection, opts={"compare_type": True, **ours})
        assert compare_metadata(context, METADATA) == []
    engine.dispose()


def test_an_upgrade_of_what_is_up_to_date_changes_nothing(url: str) -> None:
    engine = open_filled(url)
    upgrade_schema(engine)
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM event")).scalar() == 1
    engine.dispose()


def test_a_database_of_a_newer_shoal_or_without_a_ledger_is_refused(url: str) -> None:
    engine = open_engine(url)
    with engine.connect() as connection, pytest.raises(ConfigError, match="holds no ledger"):
        check_schema(connection)
    upgrade_schema(engine)
    with engine.connect() as connection:
        check_schema(connection)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with engine.connect() as connection, pytest.raises(ConfigError, match="newer shoal"):
        check_schema(connection)
    with pytest.raises(ConfigError, match="newer shoal"):
        upgrade_schema(engine)
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
    engine = open_engine(str(tmp_path / "a.db"))
    with engine.connect() as connection:
        pragmas = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}
        assert {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in pragmas} == pragmas
    with engine.begin(), open_other(tmp_path / "a.db") as other, pytest.raises(sa.exc.OperationalError, match="locked"):
        other.exec_driver_sql("BEGIN IMMEDIATE")
    engine.dispose()


def open_other(path: Path) -> sa.Connection:
    return sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 0}).connect()


def test_postgresql_syncs_each_commit_and_waits_for_locks_no_longer_than_stated(url: str) -> None:
    engine = open_engine(url)
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
        open_engine(text)


def test_a_password_is_never_shown() -> None:
    assert "secret" not in show_url(open_engine("postgresql://u:secret@h/d"))
