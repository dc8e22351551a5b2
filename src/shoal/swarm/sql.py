"""Statements of the ledger's and the state's tables, run straight on the database's driver, and rows as typed tuples.

What SQLAlchemy does to each statement and its values on their way costs ten times what the database does with them, and
a decision has some twenty of them. Placeholders are `:name` and become what the driver calls them.

Invariant: what a driver raises leaves here as `SQLAlchemyError`, as it would without the short cut.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Table
from sqlalchemy.exc import SQLAlchemyError

from shoal.swarm.db import spell_insert

Row = TypeVar("Row")
_NAME = re.compile(r":([a-z_]+)")


class Sql:
    """One statement; `postgres` where it must be another one there."""

    __slots__ = ("_postgres", "_sqlite")

    def __init__(self, sqlite: str, postgres: str | None = None) -> None:
        self._sqlite = sqlite
        self._postgres = _NAME.sub(r"%(\1)s", postgres or sqlite)

    def run(self, connection: Connection, values: Mapping[str, Any] | None = None) -> Any:
        """The driver's cursor after the statement ran, inside the connection's transaction."""
        raw: Any = connection.connection.driver_connection
        try:
            return raw.execute(self._choose(connection), values or {})
        except connection.dialect.loaded_dbapi.Error as error:
            raise SQLAlchemyError(str(error)) from error

    def run_many(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run it once for each row."""
        raw: Any = connection.connection.driver_connection
        try:
            raw.cursor().executemany(self._choose(connection), rows)
        except connection.dialect.loaded_dbapi.Error as error:
            raise SQLAlchemyError(str(error)) from error

    def _choose(self, connection: Connection) -> str:
        return self._sqlite if connection.dialect.name == "sqlite" else self._postgres


def insert_into(table: Table) -> Sql:
    """The statement that inserts a whole row."""
    return Sql(spell_insert(table))


def list_columns(table: Table, prefix: str = "") -> str:
    """The columns in order, as a typed row has its fields."""
    return ", ".join(f"{prefix}{column.name}" for column in table.columns)


def fetch_row(connection: Connection, statement: Sql, make: Callable[..., Row], **values: Any) -> Row | None:
    """The first row of an answer, typed; None if there is none."""
    cursor = statement.run(connection, values)
    row = cursor.fetchone()
    cursor.close()
    return None if row is None else make(*row)


def fetch_rows(connection: Connection, statement: Sql, make: Callable[..., Row], **values: Any) -> list[Row]:
    """All rows of an answer, typed."""
    return [make(*row) for row in statement.run(connection, values).fetchall()]


def fetch_number(connection: Connection, statement: Sql, **values: Any) -> int:
    """The single number of an answer; 0 for NULL and for no row."""
    return int(fetch_row(connection, statement, lambda number: number or 0, **values) or 0)
