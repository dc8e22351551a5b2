"""Spans, which leases cover, and the groups that came of them.

    span: leased <-> offered, leased -> delivered -> accepted, delivered -> offered

Invariants:
- a span is accepted once at most, and then its groups exist, each once;
- a span that nobody holds is offered, and what is offered is granted again: no group is lost;
- a group is in one batch at most.
"""

from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Column, Connection, Text

from shoal.swarm.db import INT64, define_table
from shoal.swarm.event import Event
from shoal.swarm.messages import BatchEntry, SubmissionState
from shoal.swarm.rules.batch import hash_batch
from shoal.swarm.state.sql import Sql, fetch_number, fetch_row, fetch_rows, insert_into, list_columns

SPAN = define_table(
    "span",
    Column("step", INT64, primary_key=True, autoincrement=False),
    Column("first", INT64, primary_key=True, autoincrement=False),
    Column("count", INT64, nullable=False),
    Column("state", Text, nullable=False, index=True),
    Column("fence", INT64, nullable=False),
    Column("holders", INT64, nullable=False),
    Column("reserved", Text, nullable=False),
    Column("offered_ms", INT64, nullable=False),
    Column("submission", Text, nullable=False),
)
GROUP = define_table(
    "trained_group",
    Column("step", INT64, primary_key=True, autoincrement=False),
    Column("position", INT64, primary_key=True, autoincrement=False),
    Column("submission", Text, nullable=False),
    Column("place", INT64, nullable=False),
    Column("version", INT64, nullable=False),
    Column("blob", Text, nullable=False),
    Column("signal", INT64, nullable=False),
    Column("batched", INT64, nullable=False),
)


@dataclass(frozen=True, slots=True)
class SpanRow:
    """Groups first .. first + count - 1 of a step."""

    step: int
    first: int
    count: int
    state: str
    """leased, offered, delivered or accepted"""
    fence: int
    """of the newest lease"""
    holders: int
    """leases that are active or whose file is awaited"""
    reserved: str
    """owner to whom it is offered first; empty for none"""
    offered_ms: int
    submission: str
    """that was delivered or accepted"""


class StepCount(NamedTuple):
    """Groups of a step by where they are."""

    leased: int
    offered: int
    delivered: int
    signal: int
    dull: int

    @property
    def on_their_way(self) -> int:
        return self.leased + self.offered + self.delivered


_SPANS = f"SELECT {list_columns(SPAN)} FROM span"
_SELECT_SPAN = Sql(f"{_SPANS} WHERE step = :step AND first = :first")
_SELECT_OFFER = Sql(
    f"{_SPANS} WHERE step = :step AND state = 'offered' "
    "AND (reserved = '' OR reserved = :owner OR offered_ms <= :until) "
    "ORDER BY CASE WHEN reserved = :owner THEN 0 ELSE 1 END, first LIMIT 1"
)
_SELECT_STATE = Sql(f"{_SPANS} WHERE step = :step AND state = :state ORDER BY first")
_INSERT_SPAN, _INSERT_GROUP = insert_into(SPAN), insert_into(GROUP)
_LEASE = Sql(
    "UPDATE span SET state = 'leased', fence = :fence, holders = holders + 1, reserved = '' "
    "WHERE step = :step AND first = :first AND state IN ('offered', 'leased') AND fence = :fence - 1"
)
_RELEASE = Sql(
    "UPDATE span SET holders = holders - 1, reserved = CASE WHEN holders = 1 AND state = 'leased' THEN :reserved "
    "ELSE reserved END, offered_ms = CASE WHEN holders = 1 AND state = 'leased' THEN :time_ms ELSE offered_ms END, "
    "state = CASE WHEN holders = 1 AND state = 'leased' THEN 'offered' ELSE state END "
    "WHERE step = :step AND first = :first"
)
_RETAKE = Sql(
    "UPDATE span SET state = 'leased', holders = holders + 1, reserved = '' WHERE step = :step AND first = :first "
    "AND state IN ('offered', 'leased')"
)
_DELIVER = Sql(
    "UPDATE span SET state = 'delivered', holders = holders - 1, submission = :submission, reserved = '' "
    "WHERE step = :step AND first = :first AND state = 'leased'"
)
_ACCEPT = Sql(
    "UPDATE span SET state = 'accepted' WHERE step = :step AND first = :first AND state = 'delivered' "
    "AND submission = :submission"
)
_REOPEN = Sql(
    "UPDATE span SET state = CASE WHEN holders > 0 THEN 'leased' ELSE 'offered' END, submission = '', "
    "offered_ms = :time_ms WHERE step = :step AND first = :first AND state = 'delivered' AND submission = :submission"
)
_COUNT_SPANS = Sql("SELECT state, sum(count) FROM span WHERE step = :step GROUP BY state")
_COUNT_GROUPS = Sql("SELECT signal, count(*) FROM trained_group WHERE step = :step GROUP BY signal")
_SELECT_ENTRIES = Sql(
    "SELECT position, submission, place, version, blob FROM trained_group WHERE step = :step AND signal = 1 "
    "ORDER BY position LIMIT :most"
)
_SELECT_BATCH = Sql(
    "SELECT position, submission, place, version, blob FROM trained_group WHERE step = :step AND batched = 1 "
    "ORDER BY position"
)
_MARK_BATCH = Sql("UPDATE trained_group SET batched = 1 WHERE step = :step AND signal = 1 AND position <= :last")
_COUNT_OFFERS = Sql("SELECT min(offered_ms) FROM span WHERE step = :step AND state = 'offered'")


def find_span(connection: Connection, step: int, first: int) -> SpanRow | None:
    return fetch_row(connection, _SELECT_SPAN, SpanRow, step=step, first=first)


def find_offer(connection: Connection, step: int, owner: str, until_ms: int) -> SpanRow | None:
    """A span to grant again: one that is kept for this owner, or one that is kept for nobody since `until_ms`."""
    return fetch_row(connection, _SELECT_OFFER, SpanRow, step=step, owner=owner, until=until_ms)


def list_spans(connection: Connection, step: int, state: str) -> list[SpanRow]:
    return fetch_rows(connection, _SELECT_STATE, SpanRow, step=step, state=state)


def count_groups(connection: Connection, step: int) -> StepCount:
    """Where the groups of a step are."""
    spans = {state: int(number) for state, number in _COUNT_SPANS.run(connection, {"step": step})}
    groups = {signal: int(number) for signal, number in _COUNT_GROUPS.run(connection, {"step": step})}
    leased, offered, delivered = (spans.get(state, 0) for state in ("leased", "offered", "delivered"))
    return StepCount(leased, offered, delivered, groups.get(1, 0), groups.get(0, 0))


def list_entries(connection: Connection, step: int, most: int) -> list[BatchEntry]:
    """The first groups with a signal, in order of index."""
    return fetch_rows(connection, _SELECT_ENTRIES, _make_entry, step=step, most=most)


def list_batch(connection: Connection, step: int) -> list[BatchEntry]:
    """The groups that a step trains on."""
    return fetch_rows(connection, _SELECT_BATCH, _make_entry, step=step)


def oldest_offer(connection: Connection, step: int) -> int:
    """Since when something of a step is offered; 0 if nothing is."""
    return fetch_number(connection, _COUNT_OFFERS, step=step)


def lease_span(event: Event, connection: Connection) -> None:
    """lease.grant"""
    content = event.content
    row = {name: content[name] for name in ("step", "first", "fence")}
    if content["fresh"]:
        empty = {"holders": 1, "reserved": "", "offered_ms": 0, "submission": ""}
        _INSERT_SPAN.run(connection, {**row, "count": content["count"], "state": "leased", **empty})
    elif _LEASE.run(connection, row).rowcount != 1:
        raise ValueError("a lease of a span that is delivered, or with another fence than the next")


def release_span(event: Event, connection: Connection) -> None:
    """lease.end"""
    content = event.content
    values = {"step": content["step"], "first": content["first"], "reserved": content["reserved"]}
    _RELEASE.run(connection, {**values, "time_ms": event.time_ms})


def retake_span(connection: Connection, step: int, first: int) -> None:
    """sub.commit of a lease that had expired: the span is held once more"""
    if _RETAKE.run(connection, {"step": step, "first": first}).rowcount != 1:
        raise ValueError("a late submission of groups that were delivered")


def deliver_span(event: Event, connection: Connection) -> None:
    """sub.receipt"""
    values = {name: event.content[name] for name in ("step", "first")}
    if _DELIVER.run(connection, {**values, "submission": event.subject}).rowcount != 1:
        raise ValueError("a receipt for groups that were delivered already")


def settle_span(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    content = event.content
    if not content["fills"]:
        return
    values = {"step": content["step"], "first": content["first"], "submission": event.subject}
    if content["state"] != SubmissionState.ACCEPTED:
        _REOPEN.run(connection, {**values, "time_ms": event.time_ms})
        return
    if _ACCEPT.run(connection, values).rowcount != 1:
        raise ValueError("accepted, but not what was delivered")
    rows = [
        {"position": content["first"] + place, "place": place, "signal": signal, "batched": 0}
        for place, signal in enumerate(content["signals"])
    ]
    shared = {"step": content["step"], "submission": event.subject}
    shared |= {"version": content["version"], "blob": content["blob"]}
    _INSERT_GROUP.run_many(connection, [{**shared, **row} for row in rows])


def mark_batch(event: Event, connection: Connection) -> None:
    """batch.cut"""
    step, number = event.content["step"], event.content["groups"]
    entries = list_entries(connection, step, number)
    if len(entries) != number or hash_batch(entries) != event.content["hash"]:
        raise ValueError("not the batch that follows from the accepted groups")
    _MARK_BATCH.run(connection, {"step": step, "last": entries[-1].index})


def _make_entry(index: int, submission: str, place: int, version: int, blob: str) -> BatchEntry:
    return BatchEntry(index=index, submission=submission, place=place, version=version, blob=blob)
