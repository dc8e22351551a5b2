"""The tables: their version, how they are rebuilt from the events, and that every kind of event has a handler."""

import gzip
import logging
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import sqlalchemy as sa

from shoal.audit.verify import verify_ledger
from shoal.coordinator.state import HANDLERS, PROJECTIONS, TABLES, VERSION
from shoal.errors import ConfigError
from shoal.ledger.db import BALANCES, open_database
from shoal.ledger.event import EventKind
from shoal.ledger.schema import prepare_schema

RECORDED = Path(__file__).parents[2] / "recorded" / "data" / "run" / "ledger.db.gz"
ALL = (BALANCES, *PROJECTIONS)

SILENT = {
    EventKind.COORDINATOR_DOWN,
    EventKind.STAKE_REQUEST,
}
"""kinds that change nothing here"""


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[sa.Engine]:
    """The ledger of a recorded run."""
    path = tmp_path / "ledger.db"
    path.write_bytes(gzip.decompress(RECORDED.read_bytes()))
    engine = open_database(str(path))
    yield engine
    engine.dispose()


def prepare(engine: sa.Engine) -> None:
    with engine.connect() as connection:
        prepare_schema(connection, ALL)


def test_a_change_of_the_tables_needs_another_version() -> None:
    """If this fails: increase VERSION in coordinator/state/__init__.py, then update both numbers here."""
    spelled = "".join(
        f"{table.name} {[(column.name, str(column.type), column.primary_key) for column in table.columns]} "
        f"{sorted((str(index.name), [column.name for column in index.columns]) for index in table.indexes)}\n"
        for table in sorted(TABLES, key=lambda table: table.name)
    )
    assert (VERSION, sha256(spelled.encode()).hexdigest()[:16]) == (8, "3bbf6ae74ea93dce")


def test_the_tables_are_those_of_the_code(url: str) -> None:
    engine = open_database(url)
    prepare(engine)
    inspector = sa.inspect(engine)
    for table in TABLES:
        columns = {column["name"]: column for column in inspector.get_columns(table.name)}
        assert list(columns) == [column.name for column in table.columns]
        made = {(index["name"], tuple(index["column_names"])) for index in inspector.get_indexes(table.name)}
        assert {(index.name, tuple(column.name for column in index.columns)) for index in table.indexes} <= made
    engine.dispose()


@pytest.mark.parametrize("number", [VERSION - 1, VERSION + 1])
def test_tables_of_another_version_are_rebuilt_from_the_events(
    recorded: sa.Engine, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with recorded.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE judge DROP COLUMN silence")
        connection.exec_driver_sql("DELETE FROM lease")
        connection.exec_driver_sql("DROP TABLE redeem")
        connection.exec_driver_sql(f"UPDATE schema_version SET version = {number} WHERE name = 'state'")
    with pytest.raises(ConfigError, match="start the coordinator once"):
        verify_ledger(recorded, projections=PROJECTIONS)
    prepare(recorded)
    assert "rebuilding tables state from" in caplog.text
    assert verify_ledger(recorded, projections=PROJECTIONS).holds


def test_a_rebuild_that_an_event_refuses_leaves_the_database_as_it_was(recorded: sa.Engine) -> None:
    with recorded.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER event_no_update")
        connection.exec_driver_sql("UPDATE event SET body = CAST('{}' AS BLOB) WHERE kind = 'batch.cut'")
        num_leases = connection.exec_driver_sql("SELECT count(*) FROM lease").scalar()
        connection.exec_driver_sql("UPDATE schema_version SET version = 4 WHERE name = 'state'")
    with pytest.raises(ConfigError, match=r"from the events \(event [0-9]+: rejected by state"):
        prepare(recorded)
    with recorded.connect() as connection:
        version = connection.exec_driver_sql("SELECT version FROM schema_version WHERE name = 'state'").scalar()
        assert version == 4
        assert connection.exec_driver_sql("SELECT count(*) FROM lease").scalar() == num_leases > 0


def test_every_kind_of_event_is_handled_or_known_to_change_nothing():
    assert set(HANDLERS) | SILENT == set(EventKind)
    assert not set(HANDLERS) & SILENT
