"""Every event of an honest ledger, changed in every small way: no decision produces it."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from shoal.audit.replay import AuditError, EventCursor, open_context, replay_decision, replay_run
from shoal.audit.verify import open_scratch
from shoal.coordinator.state import PROJECTIONS
from shoal.ledger.db import BALANCES, EVENT, POSTING
from shoal.ledger.event import CREDIT_KINDS, EventKind, Posting, encode_body, move_credit

STRANGER = "ab" * 32
ALL = (BALANCES, *PROJECTIONS)
FREE = {
    (EventKind.LEASE_GRANT, "deadline_ms"),
    (EventKind.LEASE_GRANT, "request_key"),
    (EventKind.COORDINATOR_UP, "shift_ms"),
    (EventKind.BLOB_DROP, "blobs"),
}
"""fields that the coordinator or its caller may choose within bounds"""
TWICE = (EventKind.COORDINATOR_UP, EventKind.COORDINATOR_DOWN)
"""kinds that may occur twice in a row"""


@pytest.fixture
def scratch():
    with open_scratch([*(table for item in ALL for table in item.tables), EVENT, POSTING]) as connection:
        yield connection


def test_no_decision_makes_an_event_that_is_a_little_different(history, scratch):
    events, count, first = history.events, 0, 1
    EventCursor(iter(events[:1]), scratch, ALL).take()
    while first < len(events):
        last, coordinator = events[first - 1], history.key.public
        whole = events[first : first + replay_one(scratch, coordinator, events[first:], last)]
        for place, event in enumerate(whole):
            for others in [*vary_event(event), *vary_order(event, place)]:
                with pytest.raises(AuditError):
                    replay_all(scratch, coordinator, [*whole[:place], *others, *whole[place + 1 :]], last)
                count += 1
        replay_all(scratch, coordinator, whole, last, keep=True)
        first += len(whole)
    assert count > 1000


def test_the_history_has_events_of_every_kind(history):
    assert {event.kind for event in history.events} == set(EventKind)


def test_a_ledger_that_ends_inside_of_a_decision_is_refused(history, scratch):
    ban = next(event for event in history.list(EventKind.BAN) if "hard verdict" in event.content["reason"])
    with pytest.raises(AuditError, match=f"after event {ban.seq - 1}: the ledger ends, but the rules require ban of"):
        replay_run(iter(history.events[: ban.seq]), scratch, ALL)


def test_purses_that_hold_what_is_not_on_its_way_are_refused(history, scratch):
    """Regardless of which decision caused it."""
    with pytest.raises(AuditError, match="holds"):
        replay_run(add_credit(history.events, scratch), scratch, ALL)


def add_credit(events, connection):
    """The events, and at the end an account with a higher balance than it should have."""
    yield from events
    connection.exec_driver_sql("UPDATE balance SET amount = amount + 1 WHERE account LIKE 'pending:%'")


def replay_one(connection, coordinator, events, last):
    """How many of these events one decision produces."""
    cursor = EventCursor(iter(events), connection, ALL, last)
    with undo_all(connection):
        replay_decision(cursor, open_context(cursor), coordinator)
    return cursor.size - last.seq - 1


def replay_all(connection, coordinator, events, last, *, keep=False):
    """Replay all decisions that produce these events."""
    numbered = [replace(event, seq=last.seq + 1 + place) for place, event in enumerate(events)]
    cursor = EventCursor(iter(numbered), connection, ALL, last)
    with nullcontext() if keep else undo_all(connection):
        context = open_context(cursor)
        while cursor.next is not None:
            replay_decision(cursor, context, coordinator)


@contextmanager
def undo_all(connection):
    raw = connection.connection.driver_connection
    raw.execute("SAVEPOINT decision")
    try:
        yield
    finally:
        raw.execute("ROLLBACK TO SAVEPOINT decision")
        raw.execute("RELEASE SAVEPOINT decision")


def vary_event(event):
    """The event with one change; signed events are excluded, because their signature would fail first."""
    if event.signature:
        return
    content = event.content
    for name, value in content.items():
        if (event.kind, name) not in FREE:
            rest = {other: kept for other, kept in content.items() if other != name}
            yield [replace(event, body=encode_body(rest))]
            yield [replace(event, body=encode_body({**rest, name: vary_value(value)}))]
    yield [replace(event, body=encode_body({**content, "note": 1}))]
    yield [replace(event, subject=f"{event.subject}0")]
    if event.kind in CREDIT_KINDS:
        more = tuple(Posting(posting.account, 2 * posting.amount) for posting in event.postings)
        yield [replace(event, postings=more or move_credit("mint", "treasury", 1))]


def vary_value(value):
    match value:
        case int():
            return value + 1
        case str():
            return f"{value}0"
        case list():
            return [*value, value[0] if value else 1]
    raise AssertionError(f"{value!r}: not a value of a coordinator's event")


def vary_order(event, place):
    """The event missing, at another time, twice, or by another actor."""
    if place:  # without the first event nothing was decided, which is valid
        yield []
        yield [replace(event, time_ms=event.time_ms + 1)]
    if event.kind not in TWICE:
        yield [event, event]
    yield [replace(event, actor=STRANGER)]
