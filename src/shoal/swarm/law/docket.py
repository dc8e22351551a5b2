"""The events of a ledger, one at a time, each brought into the tables when the rules have asked for it."""

from collections.abc import Iterator, Sequence

from sqlalchemy import Connection

from shoal.swarm.event import Event
from shoal.swarm.projection import Projection, apply_event


class LawError(ValueError):
    """An event that the rules do not make, or one that they make and that is not there; says so in one sentence."""


class Docket:
    """What the ledger has next, and the tables as they are before that."""

    def __init__(
        self,
        events: Iterator[Event],
        connection: Connection,
        projections: Sequence[Projection],
        last: Event | None = None,
    ) -> None:
        """`last` is the event before, if it is not the beginning."""
        self.connection = connection
        self._events, self._projections = events, projections
        self.next = next(events, None)
        """None at the end of the ledger"""
        self.size, self.time_ms = (0, 0) if last is None else (last.seq + 1, last.time_ms)
        """events so far, and the time of the last one"""

    def take(self) -> Event:
        """Go on by one event, which the rules have asked for."""
        event = self.next
        assert event is not None, "there is one, or it would not have been compared"
        apply_event(self._projections, event, self.connection)
        self.size, self.time_ms = event.seq + 1, event.time_ms
        self.next = next(self._events, None)
        return event


def name_event(kind: str, subject: str) -> str:
    """An event in words."""
    return f"{kind} of {subject}" if subject else kind
