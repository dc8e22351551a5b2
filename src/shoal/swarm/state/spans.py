"""Spans, which leases cover, and the groups that came of them.

    span: leased <-> offered, leased -> delivered -> accepted, delivered -> offered
          accepted -> offered, if it was a canary's

Invariants:
- a span is accepted by one submission at a time, and then its groups exist, each once. What a canary filled is taken
  back only while no batch has it;
- a span that nobody holds is offered, and what is offered is granted again: no group is lost;
- a group is in one batch at most.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, Connection, Index, Text, text

from shoal.swarm.db import INT64, define_table
from shoal.swarm.event import Event
from shoal.swarm.messages import BatchEntry, SubmissionState
from shoal.swarm.rules.batch import hash_batch
from shoal.swarm.sql import Sql, fetch_number, fetch_row, fetch_rows, insert_into, list_columns
from shoal.swarm.state.steps import StepRow, find_step, move_groups

SPAN = define_table(
    "span",
    Column("step", INT64, primary_key=True, autoincrement=False),
    Column("first", INT64, primary_key=True, autoincrement=False),
    Column("count", INT64, nullable=False),
    Column("state", Text, nullable=False),
    Column("fence", INT64, nullable=False),
    Column("holders", INT64, nullable=False),
    Column("reserved", Text, nullable=False),
    Column("granted_ms", INT64, nullable=False),
    Column("offered_ms", INT64, nullable=False),
    Column("submission", Text, nullable=False),
)
_OFFERED, _HELD_ONCE = "state = 'offered'", "state = 'leased' AND holders = 1"
for _name, _condition, *_columns in (
    ("span_offer", _OFFERED, SPAN.c.step, SPAN.c.reserved, SPAN.c.first),
    ("span_offered", _OFFERED, SPAN.c.step, SPAN.c.offered_ms, SPAN.c.first),
    ("span_slow", _HELD_ONCE, SPAN.c.step, SPAN.c.granted_ms, SPAN.c.first),
):
    Index(_name, *_columns, sqlite_where=text(_condition), postgresql_where=text(_condition))
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
    granted_ms: int
    """when it was given out first"""
    offered_ms: int
    submission: str
    """that was delivered or accepted"""


_SPANS = f"SELECT {list_columns(SPAN)} FROM span"
_SELECT_SPAN = Sql(f"{_SPANS} WHERE step = :step AND first = :first")
_SELECT_RESERVED = Sql(
    f"{_SPANS} WHERE state = 'offered' AND step = :step AND reserved = :reserved ORDER BY first LIMIT 1"
)
_SELECT_UNTIL = Sql(
    f"{_SPANS} WHERE state = 'offered' AND step = :step AND offered_ms <= :until ORDER BY offered_ms, first LIMIT 1"
)
_INSERT_SPAN, _INSERT_GROUP = insert_into(SPAN), insert_into(GROUP)
_LEASE = Sql(
    "UPDATE span SET state = 'leased', fence = :fence, holders = holders + 1, reserved = '' "
    "WHERE step = :step AND first = :first AND state IN ('offered', 'leased') AND fence = :fence - 1"
)
_LEAVE = Sql("UPDATE span SET holders = holders - 1 WHERE step = :step AND first = :first AND holders > 0")
_OFFER = Sql(
    "UPDATE span SET state = 'offered', reserved = :reserved, offered_ms = :time_ms "
    "WHERE step = :step AND first = :first AND state = 'leased' AND holders = 0"
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
    "UPDATE span SET state = :state, submission = '', offered_ms = :time_ms WHERE step = :step AND first = :first"
)
_SELECT_ENTRIES = Sql(
    "SELECT position, submission, place, version, blob FROM trained_group WHERE step = :step AND signal = 1 "
    "ORDER BY position LIMIT :most"
)
_SELECT_BATCH = Sql(
    "SELECT position, submission, place, version, blob FROM trained_group WHERE step = :step AND batched = 1 "
    "ORDER BY position"
)
_COUNT_BATCHED = Sql(
    "SELECT count(*) FROM trained_group WHERE step = :step AND submission = :submission AND batched = 1"
)
_COUNT_SIGNALS = Sql(
    "SELECT count(*) FROM trained_group WHERE step = :step AND submission = :submission AND signal = 1"
)
_WITHDRAW = Sql("DELETE FROM trained_group WHERE step = :step AND submission = :submission AND batched = 0")
_MARK_BATCH = Sql("UPDATE trained_group SET batched = 1 WHERE step = :step AND signal = 1 AND position <= :last")
_COUNT_OFFERS = Sql("SELECT min(offered_ms) FROM span WHERE step = :step AND state = 'offered'")


def find_span(connection: Connection, step: int, first: int) -> SpanRow | None:
    return fetch_row(connection, _SELECT_SPAN, SpanRow, step=step, first=first)


def find_offer(connection: Connection, step: int, owner: str, until_ms: int) -> SpanRow | None:
    """A span to grant again: one that is kept for this owner, or one that is kept for nobody since `until_ms`."""
    own = fetch_row(connection, _SELECT_RESERVED, SpanRow, step=step, reserved=owner)
    if own is not None:
        return own
    free = fetch_row(connection, _SELECT_RESERVED, SpanRow, step=step, reserved="")
    late = find_kept(connection, step, until_ms)
    return min((span for span in (free, late) if span is not None), key=lambda span: span.first, default=None)


def find_kept(connection: Connection, step: int, until_ms: int) -> SpanRow | None:
    """A span that is offered since `until_ms`, for whomever it is kept."""
    return fetch_row(connection, _SELECT_UNTIL, SpanRow, step=step, until=until_ms)


def count_groups(connection: Connection, step: int) -> StepRow:
    """Where the groups of a step are."""
    row = find_step(connection, step)
    assert row is not None, "it was opened"
    return row


def list_entries(connection: Connection, step: int, most: int) -> list[BatchEntry]:
    """The first groups with a signal, in order of index."""
    return fetch_rows(connection, _SELECT_ENTRIES, _make_entry, step=step, most=most)


def list_batch(connection: Connection, step: int) -> list[BatchEntry]:
    """The groups that a step trains on."""
    return fetch_rows(connection, _SELECT_BATCH, _make_entry, step=step)


def count_batched(connection: Connection, step: int, submission: str) -> int:
    """Groups of a submission that are in the batch of their step."""
    return fetch_number(connection, _COUNT_BATCHED, step=step, submission=submission)


def count_signals(connection: Connection, step: int, submission: str) -> int:
    """Accepted groups of a submission that have a learning signal."""
    return fetch_number(connection, _COUNT_SIGNALS, step=step, submission=submission)


def oldest_offer(connection: Connection, step: int) -> int:
    """Since when something of a step is offered; 0 if nothing is."""
    return fetch_number(connection, _COUNT_OFFERS, step=step)


def lease_span(event: Event, connection: Connection) -> None:
    """lease.grant"""
    content = event.content
    row = {name: content[name] for name in ("step", "first", "fence")}
    if content["fresh"]:
        empty = {"holders": 1, "reserved": "", "granted_ms": event.time_ms, "offered_ms": 0, "submission": ""}
        _INSERT_SPAN.run(connection, {**row, "count": content["count"], "state": "leased", **empty})
        move_groups(connection, content["step"], leased=content["count"])
        return
    span = _require_span(connection, content)
    if _LEASE.run(connection, row).rowcount != 1:
        raise ValueError("a lease of a span that is delivered, or with another fence than the next")
    _take_offer(connection, span)


def release_span(event: Event, connection: Connection) -> None:
    """lease.end"""
    content = event.content
    span = _require_span(connection, content)
    place = {"step": span.step, "first": span.first}
    if _LEAVE.run(connection, place).rowcount != 1:
        raise ValueError("the end of a lease that nobody held")
    if _OFFER.run(connection, {**place, "reserved": content["reserved"], "time_ms": event.time_ms}).rowcount:
        move_groups(connection, span.step, leased=-span.count, offered=span.count)


def retake_span(connection: Connection, step: int, first: int) -> None:
    """sub.commit of a lease that had expired: the span is held once more"""
    place = {"step": step, "first": first}
    span = _require_span(connection, place)
    if _RETAKE.run(connection, place).rowcount != 1:
        raise ValueError("a late submission of groups that were delivered")
    _take_offer(connection, span)


def deliver_span(event: Event, connection: Connection) -> None:
    """sub.receipt"""
    span = _require_span(connection, event.content)
    values = {"step": span.step, "first": span.first, "submission": event.subject}
    if _DELIVER.run(connection, values).rowcount != 1:
        raise ValueError("a receipt for groups that were delivered already")
    move_groups(connection, span.step, leased=-span.count, delivered=span.count)


def settle_span(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    content = event.content
    if not content["fills"]:
        return
    span = _require_span(connection, content)
    if content["state"] == SubmissionState.ACCEPTED:
        _accept_span(event, connection, span)
    elif (span.state, span.submission) == ("accepted", event.subject):
        _withdraw_groups(connection, span)
        _reopen_span(event, connection, span)
    elif span.submission == event.subject:
        move_groups(connection, span.step, delivered=-span.count)
        _reopen_span(event, connection, span)


def mark_batch(event: Event, connection: Connection) -> None:
    """batch.cut"""
    step, number = event.content["step"], event.content["groups"]
    entries = list_entries(connection, step, number)
    if len(entries) != number or hash_batch(entries) != event.content["hash"]:
        raise ValueError("not the batch that follows from the accepted groups")
    if entries:
        _MARK_BATCH.run(connection, {"step": step, "last": entries[-1].index})


def _accept_span(event: Event, connection: Connection, span: SpanRow) -> None:
    signals = event.content["signals"]
    values = {"step": span.step, "first": span.first, "submission": event.subject}
    if _ACCEPT.run(connection, values).rowcount != 1 or len(signals) != span.count:
        raise ValueError("accepted, but not what was delivered")
    move_groups(connection, span.step, delivered=-span.count, signal=sum(signals), dull=span.count - sum(signals))
    _add_groups(event, connection)


def _reopen_span(event: Event, connection: Connection, span: SpanRow) -> None:
    """What was delivered did not count: whoever holds the span too goes on, or it is offered."""
    state = "leased" if span.holders else "offered"
    _REOPEN.run(connection, {"step": span.step, "first": span.first, "state": state, "time_ms": event.time_ms})
    move_groups(connection, span.step, **{state: span.count})


def _withdraw_groups(connection: Connection, span: SpanRow) -> None:
    """Groups that were accepted and are not any more; none of a batch is."""
    signals = count_signals(connection, span.step, span.submission)
    if _WITHDRAW.run(connection, {"step": span.step, "submission": span.submission}).rowcount != span.count:
        raise ValueError("groups taken back that are in a batch, or are not there")
    move_groups(connection, span.step, signal=-signals, dull=signals - span.count)


def _add_groups(event: Event, connection: Connection) -> None:
    content = event.content
    shared = {name: content[name] for name in ("step", "version", "blob")} | {"submission": event.subject, "batched": 0}
    rows = [
        {**shared, "position": content["first"] + place, "place": place, "signal": signal}
        for place, signal in enumerate(content["signals"])
    ]
    _INSERT_GROUP.run_many(connection, rows)


def _take_offer(connection: Connection, span: SpanRow) -> None:
    """Count the groups of a span that somebody holds now, if nobody did before."""
    if span.state == "offered":
        move_groups(connection, span.step, offered=-span.count, leased=span.count)


def _require_span(connection: Connection, place: Mapping[str, Any]) -> SpanRow:
    span = find_span(connection, place["step"], place["first"])
    if span is None:
        raise ValueError("groups that were never given out")
    return span


def _make_entry(index: int, submission: str, place: int, version: int, blob: str) -> BatchEntry:
    return BatchEntry(index=index, submission=submission, place=place, version=version, blob=blob)
