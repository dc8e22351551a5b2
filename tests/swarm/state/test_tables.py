"""The tables: those of the migration are those of the code, and every kind of event has its handler or needs none."""

import sqlalchemy as sa

from shoal.swarm.db import open_engine
from shoal.swarm.event import Kind
from shoal.swarm.migrate import upgrade_schema
from shoal.swarm.state import HANDLERS, TABLES

SILENT = {
    Kind.COORDINATOR_DOWN,
    Kind.STAKE_REQUEST,
}
"""kinds that change nothing here"""


def test_the_migration_makes_the_tables_of_the_code(url):
    engine = open_engine(url)
    upgrade_schema(engine)
    inspector = sa.inspect(engine)
    for table in TABLES:
        columns = {column["name"]: column for column in inspector.get_columns(table.name)}
        assert list(columns) == [column.name for column in table.columns]
        assert all(not column["nullable"] or table.columns[name].primary_key for name, column in columns.items())
        keys = [key.name for key in table.primary_key]
        assert inspector.get_pk_constraint(table.name)["constrained_columns"] == keys
        made = {(index["name"], tuple(index["column_names"])) for index in inspector.get_indexes(table.name)}
        wanted = {(index.name, tuple(column.name for column in index.columns)) for index in table.indexes}
        assert wanted <= made
    engine.dispose()


def test_every_kind_of_event_is_handled_or_known_to_change_nothing():
    assert set(HANDLERS) | SILENT == set(Kind)
    assert not set(HANDLERS) & SILENT
