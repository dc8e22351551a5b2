"""Projections made again from the events, in an empty database, and compared with those that are there."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import Connection, Table, collate, create_engine, literal_column, select, table
from sqlalchemy.exc import SQLAlchemyError

from shoal.swarm.db import is_sqlite
from shoal.swarm.event import Event
from shoal.swarm.postings import PostingError
from shoal.swarm.projection import Projection

_BLOCK = 1024
_RANKS = {type(None): 0, int: 1, float: 1, str: 2, bytes: 3}
"""How SQLite orders values of different types."""


class ReplayError(ValueError):
    """An event that a projection refuses, though it is in the ledger."""


@contextmanager
def open_scratch(tables: Sequence[Table]) -> Iterator[Connection]:
    """An empty database with these tables, in a temporary file, gone afterwards."""
    with TemporaryDirectory(prefix="shoal-") as folder:
        engine = create_engine(f"sqlite:///{Path(folder) / 'scratch.db'}")
        try:
            with engine.begin() as connection:
                connection.exec_driver_sql("PRAGMA synchronous = OFF")  # nobody needs it after a crash
                connection.exec_driver_sql("PRAGMA journal_mode = MEMORY")
                for item in tables:
                    item.create(connection)
                yield connection
        finally:
            engine.dispose()


def replay_events(events: Iterable[Event], target: Connection, projections: Sequence[Projection]) -> None:
    """Apply all events of a ledger to the projections in an empty database."""
    for event in events:
        for projection in projections:
            try:
                projection.apply(event, target)
            except (PostingError, ArithmeticError, LookupError, TypeError, ValueError, SQLAlchemyError) as error:
                # What an event says is checked by those who append it; a forged ledger may say anything.
                raise ReplayError(f"event {event.seq}: refused by {projection.name} ({error!r:.200})") from error


def compare_table(left: Connection, right: Connection, item: Table) -> Iterator[str]:
    """One sentence for each row in which a table differs, `left` being the one that should be as `right` is."""
    names = [column.name for column in item.primary_key.columns]
    names += [column.name for column in item.columns if column.name not in names]
    width = len(item.primary_key.columns)
    rows, others = _read_rows(left, item, names), _read_rows(right, item, names)
    row, other = next(rows, None), next(others, None)
    while row is not None or other is not None:
        at, wanted = _rank_key(row, width), _rank_key(other, width)
        if at == wanted:
            if row != other:
                yield f"{item.name} {_show_row(row, width)}: {_list_changes(names, row, other)}"
            row, other = next(rows, None), next(others, None)
        elif wanted is None or (at is not None and at < wanted):
            yield f"{item.name} {_show_row(row, width)}: a row that follows from no event"
            row = next(rows, None)
        else:
            yield f"{item.name} {_show_row(other, width)}: missing"
            other = next(others, None)


def _read_rows(connection: Connection, item: Table, names: list[str]) -> Iterator[tuple[Any, ...]]:
    """All rows by primary key, as the database gives them: SQLAlchemy would read a wrong type as the right one."""
    columns: list[Any] = [literal_column(connection.dialect.identifier_preparer.quote(name)) for name in names]
    order: list[Any] = []
    for column, key in zip(columns, item.primary_key.columns, strict=False):
        is_text = key.type.python_type is str and not is_sqlite(connection)
        order.append(collate(column, "C") if is_text else column)  # by code point, as SQLite does
    statement = select(*columns).select_from(table(item.name)).order_by(*order)
    for row in connection.execution_options(yield_per=_BLOCK).execute(statement):
        yield tuple(row)


def _rank_key(row: tuple[Any, ...] | None, width: int) -> list[tuple[int, Any]] | None:
    return None if row is None else [(_RANKS[type(value)], value) for value in row[:width]]


def _show_row(row: tuple[Any, ...] | None, width: int) -> str:
    assert row is not None, "the row that the sentence is about"
    return ", ".join(ascii(value)[:80] for value in row[:width])


def _list_changes(names: list[str], row: Any, other: Any) -> str:
    pairs = zip(names, row, other, strict=True)
    changed = [f"{name} is {a!r:.80}, not {b!r:.80}" for name, a, b in pairs if (type(a), a) != (type(b), b)]
    return "; ".join(changed)
