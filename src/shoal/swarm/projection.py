"""Projections: tables that follow from the events alone, and can be made again from them.

Invariants:
- `apply` reads the event and its own tables, and nothing else: no clock, no randomness, no other table;
- tables have a primary key, and columns of integers, text and bytes, so that two of them can be compared row by row.

An `apply` that raises refuses the event: the decision it belongs to is undone whole.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sqlalchemy import BigInteger, Connection, Integer, LargeBinary, Table, Text

from shoal.swarm.event import Event

_TYPES = (BigInteger, Integer, LargeBinary, Text)


@dataclass(frozen=True, slots=True)
class Projection:
    """Some tables, and what an event does to them."""

    name: str
    tables: tuple[Table, ...]
    apply: Callable[[Event, Connection], None]

    def __post_init__(self) -> None:
        for table in self.tables:
            assert table.primary_key.columns, f"{table.name}: a projection's table has a primary key"
            assert all(isinstance(column.type, _TYPES) for column in table.columns), (
                f"{table.name}: a projection's columns are integers, text and bytes"
            )


def apply_event(projections: Iterable[Projection], event: Event, connection: Connection) -> None:
    """Bring all projections up to date with one more event."""
    for projection in projections:
        projection.apply(event, connection)
