"""Every event of an honest ledger, otherwise in every small way: no decision makes it."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from shoal.swarm.balances import BALANCES
from shoal.swarm.db import EVENT, POSTING
from shoal.swarm.event import CREDIT_KINDS, Kind, encode_body
from shoal.swarm.law.court import hear_decision, hear_events, open_setting
from shoal.swarm.law.docket import Docket, LawError
from shoal.swarm.postings import Posting, move_credit
from shoal.swarm.replay import open_scratch
from shoal.swarm.state import PROJECTIONS

STRANGER = "ab" * 32
ALL = (BALANCES, *PROJECTIONS)
FREE = {
    (Kind.LEASE_GRANT, "deadline_ms"),
    (Kind.LEASE_GRANT, "request_key"),
    (Kind.COORDINATOR_UP, "shift_ms"),
    (Kind.BLOB_DROP, "blobs"),
}
"""what the coordinator, or who asked it, may choose within bounds"""
TWICE = (Kind.COORDINATOR_UP, Kind.COORDINATOR_DOWN)
"""what may happen twice in a row"""


@pytest.fixture
def scratch():
    with open_scratch([*(table for item in ALL for table in item.tables), EVENT, POSTING]) as connection:
        yield connection


def test_no_decision_makes_an_event_that_is_a_little_different(history, scratch):
    events, count, first = history.events, 0, 1
    Docket(iter(events[:1]), scratch, ALL).take()
    while first < len(events):
        last, court = events[first - 1], history.key.public
        whole = events[first : first + hear_one(scratch, court, events[first:], last)]
        for place, event in enumerate(whole):
            for others in [*vary_event(event), *vary_order(event, place)]:
                with pytest.raises(LawError):
                    hear_all(scratch, court, [*whole[:place], *others, *whole[place + 1 :]], last)
                count += 1
        hear_all(scratch, court, whole, last, keep=True)
        first += len(whole)
    assert count > 1000


def test_the_history_has_events_of_every_kind(history):
    assert {event.kind for event in history.events} == set(Kind)


def test_a_ledger_that_ends_inside_of_a_decision_is_refused(history, scratch):
    ban = next(event for event in history.list(Kind.BAN) if "hard verdict" in event.content["reason"])
    with pytest.raises(LawError, match=f"after event {ban.seq - 1}: the ledger ends where ban of"):
        hear_events(iter(history.events[: ban.seq]), scratch, ALL)


def test_purses_that_hold_what_is_not_on_its_way_are_refused(history, scratch):
    """Whatever decided so."""
    with pytest.raises(LawError, match="holds"):
        hear_events(add_credit(history.events, scratch), scratch, ALL)


def add_credit(events, connection):
    """The events, and at the end a purse that is fuller than it should be."""
    yield from events
    connection.exec_driver_sql("UPDATE balance SET amount = amount + 1 WHERE account LIKE 'pending:%'")


def hear_one(connection, court, events, last):
    """How many of these events one decision makes."""
    docket = Docket(iter(events), connection, ALL, last)
    with undo_all(connection):
        hear_decision(docket, open_setting(docket), court)
    return docket.size - last.seq - 1


def hear_all(connection, court, events, last, *, keep=False):
    """Take all decisions again that make these events."""
    numbered = [replace(event, seq=last.seq + 1 + place) for place, event in enumerate(events)]
    docket = Docket(iter(numbered), connection, ALL, last)
    with nullcontext() if keep else undo_all(connection):
        setting = open_setting(docket)
        while docket.next is not None:
            hear_decision(docket, setting, court)


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
    """The event with one thing otherwise; what somebody signed is under its signature, and found before."""
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
    raise AssertionError(f"{value!r}: no event of the coordinator's has it")


def vary_order(event, place):
    """The event not at all, at another time, twice, or by somebody else."""
    if place:  # without the first one nothing was decided, and that is no lie
        yield []
        yield [replace(event, time_ms=event.time_ms + 1)]
    if event.kind not in TWICE:
        yield [event, event]
    yield [replace(event, actor=STRANGER)]
