"""Leases, the ranges of groups that they cover (table `span`), and the accepted groups.

    lease: active -> submitted | returned | expired | cancelled,   submitted -> unsent
    range: leased <-> offered, leased -> delivered -> accepted, delivered -> offered
          accepted -> offered, if it was a canary's

Invariants:
- a lease ends by its deadline at the latest, and its upload by the upload deadline;
- a range is accepted by one submission at a time, and then its groups exist, each once. A canary's groups are withdrawn
  only while no batch contains them;
- a range that nobody holds is offered, and offered ranges are granted again: no group is lost;
- a group is in at most one batch.
"""

from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection, Index

from shoal.coordinator.rules.leases import MAX_OWN_TIMES, MAX_TIMES
from shoal.coordinator.rules.standing import STRIKE
from shoal.coordinator.state.run import move_groups
from shoal.ledger import db
from shoal.ledger.event import Event
from shoal.protocol import events
from shoal.protocol.events import parse_event, read_body
from shoal.protocol.messages import BatchEntry, Manifest, SubmissionState
from shoal.protocol.params import hash_batch


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """A lease and its terms."""

    lease: str
    node: str
    owner: str
    request_key: str
    step: int
    first: int
    count: int
    fence: int
    backup: int
    """1 if another owner held the groups when it was granted"""
    state: str
    granted_ms: int
    deadline_ms: int
    ended_ms: int
    upload_s: int
    duplicate_tokens: int
    version: int
    price: int
    file_bytes: int
    """largest file; room for it is reserved"""
    trial: int
    """1 if its owner had no record"""
    done: int
    """finished rollouts for which its deadline was moved"""


LEASE = db.define_table("lease", LeaseRow, key="lease")
Index("lease_request", LEASE.c.node, LEASE.c.request_key, unique=True)
Index("lease_due", LEASE.c.state, LEASE.c.deadline_ms)
Index("lease_holder", LEASE.c.state, LEASE.c.owner)
Index("lease_span", LEASE.c.step, LEASE.c.first)
Index("lease_share", LEASE.c.step, LEASE.c.owner)
Index("lease_newest", LEASE.c.step, LEASE.c.granted_ms)
Index("lease_slow", LEASE.c.step, LEASE.c.state, LEASE.c.granted_ms)


class HeldLeases(NamedTuple):
    """Active leases of a node and of its owner."""

    node: int
    owner: int


_SELECT_SLOWEST = db.Sql(
    f"SELECT {db.list_columns(LEASE, 'l.')} FROM span s CROSS JOIN lease l "  # spans first, in the order of their index
    "WHERE s.state = 'leased' AND s.holders = 1 AND s.step = :step AND l.step = s.step AND l.first = s.first "
    "AND l.fence = s.fence AND l.state IN ('active', 'submitted') AND l.owner <> :owner "
    "ORDER BY s.granted_ms, s.first LIMIT 1"
)
_SELECT_TRIED = db.Sql(
    f"SELECT {db.list_columns(LEASE, 'l.')} FROM span s CROSS JOIN lease l "
    "WHERE s.state = 'leased' AND s.holders = s.trials AND s.step = :step AND l.step = s.step AND l.first = s.first "
    "AND l.fence = s.fence AND NOT EXISTS (SELECT 1 FROM lease o WHERE o.step = s.step AND o.first = s.first "
    "AND o.owner = :owner AND o.state IN ('active', 'submitted')) ORDER BY l.granted_ms, s.first LIMIT 1"
)
_COUNT_NODES = db.Sql("SELECT count(DISTINCT node) FROM lease WHERE step >= :step - 1 AND step <= :step AND trial = 0")
_COUNT_HELD = db.Sql("SELECT count(*) FROM lease WHERE state = 'active' AND owner = :owner")
_COUNT_NODE = db.Sql("SELECT count(*) FROM lease WHERE state = 'active' AND owner = :owner AND node = :node")
_COUNT_SHARE = db.Sql(
    "SELECT coalesce(sum(CASE WHEN l.state = 'active' OR s.state IN ('committed', 'received') THEN l.count "
    "WHEN s.state = 'accepted' THEN (SELECT count(*) FROM trained_group g WHERE g.step = l.step AND g.signal = 1 "
    "AND g.position >= l.first AND g.position < l.first + l.count AND g.submission = s.submission) ELSE 0 END), 0) "
    "FROM lease l LEFT JOIN submission s ON s.lease = l.lease WHERE l.step = :step AND l.owner = :owner"
)
_NEXT_OWNER = db.Sql("SELECT owner FROM lease WHERE step = :step AND owner > :after ORDER BY owner LIMIT 1")
_LAST_OTHER = db.Sql(
    "SELECT l.granted_ms FROM lease l JOIN owner o ON o.owner = l.owner AND o.accepted > 0 "
    "WHERE l.step = :step AND l.owner <> :owner ORDER BY l.granted_ms DESC LIMIT 1"
)
_SHIFT = db.Sql("UPDATE lease SET deadline_ms = deadline_ms + :shift_ms WHERE state = 'active'")


def find_lease(connection: Connection, lease: str) -> LeaseRow | None:
    return db.find_row(connection, LeaseRow, lease=lease)


def find_request(connection: Connection, node: str, request_key: str) -> LeaseRow | None:
    """The lease that was granted for a request."""
    return db.find_row(connection, LeaseRow, node=node, request_key=request_key)


def list_due(connection: Connection, now_ms: int, most: int) -> list[LeaseRow]:
    """Active leases whose deadline has passed."""
    condition = "WHERE state = 'active' AND deadline_ms <= :now_ms ORDER BY deadline_ms, lease LIMIT :most"
    return db.list_rows(connection, LeaseRow, condition, now_ms=now_ms, most=most)


def list_active(connection: Connection) -> list[LeaseRow]:
    return db.list_rows(connection, LeaseRow, "WHERE state = 'active' ORDER BY lease")


def list_on_range(connection: Connection, step: int, first: int) -> list[LeaseRow]:
    """Active leases of a range of groups, oldest first."""
    condition = "WHERE step = :step AND first = :first AND state = 'active' ORDER BY fence"
    return db.list_rows(connection, LeaseRow, condition, step=step, first=first)


def list_on_step(connection: Connection, step: int) -> list[LeaseRow]:
    return db.list_rows(connection, LeaseRow, "WHERE step = :step AND state = 'active' ORDER BY lease", step=step)


def list_oldest(connection: Connection, step: int, most: int) -> list[LeaseRow]:
    """Active leases of a step, longest held first."""
    condition = "WHERE step = :step AND state = 'active' ORDER BY granted_ms LIMIT :most"
    return db.list_rows(connection, LeaseRow, condition, step=step, most=most)


def list_of_owner(connection: Connection, owner: str) -> list[LeaseRow]:
    return db.list_rows(connection, LeaseRow, "WHERE state = 'active' AND owner = :owner ORDER BY lease", owner=owner)


def find_slowest(connection: Connection, step: int, owner: str) -> LeaseRow | None:
    """The newest lease of those groups of a step that were granted first, if nobody else holds them and it is not this
    owner's. This includes a lease whose upload does not arrive."""
    return db.fetch_row(connection, _SELECT_SLOWEST, LeaseRow, step=step, owner=owner)


def find_tried(connection: Connection, step: int, owner: str) -> LeaseRow | None:
    """The newest lease of groups of a step that only trials hold, none of this owner: of those whose newest lease was
    granted first."""
    return db.fetch_row(connection, _SELECT_TRIED, LeaseRow, step=step, owner=owner)


def count_nodes(connection: Connection, step: int) -> int:
    """Nodes of owners of record with leases of a step or the one before."""
    return db.fetch_number(connection, _COUNT_NODES, step=step)


def count_held(connection: Connection, node: str, owner: str) -> HeldLeases:
    mine = db.fetch_number(connection, _COUNT_NODE, owner=owner, node=node)
    return HeldLeases(mine, db.fetch_number(connection, _COUNT_HELD, owner=owner))


def count_share(connection: Connection, step: int, owner: str) -> int:
    """Groups of a step that an owner holds, has delivered, or had accepted with a signal."""
    return db.fetch_number(connection, _COUNT_SHARE, step=step, owner=owner)


def list_owners(connection: Connection, step: int, most: int) -> list[str]:
    """Owners with leases of a step, at most `most`."""
    owners: list[str] = []
    while len(owners) < most:
        after = owners[-1] if owners else ""
        found = db.fetch_row(connection, _NEXT_OWNER, str, step=step, after=after)
        if found is None:
            break
        owners.append(found)
    return owners


def last_other(connection: Connection, step: int, owner: str) -> int:
    """When another owner with accepted work last got a lease of a step; 0 for never."""
    return db.fetch_number(connection, _LAST_OTHER, step=step, owner=owner)


def add_lease(event: Event, connection: Connection) -> None:
    """lease.grant"""
    row = dict(read_body(event, events.LeaseGrant))
    row |= {"lease": event.subject, "state": "active", "granted_ms": event.time_ms, "ended_ms": 0, "done": 0}
    db.insert_rows(connection, LEASE, row)


def extend_lease(event: Event, connection: Connection) -> None:
    """lease.extend"""
    body = read_body(event, events.LeaseExtend)
    changes = {"deadline_ms": body.deadline_ms, "done": body.done}
    if not db.update_rows(connection, LEASE, changes, lease=event.subject, state="active"):
        raise ValueError(f"{event.subject}: a lease that ended was extended")


def end_lease(event: Event, connection: Connection) -> None:
    """lease.end"""
    state = read_body(event, events.LeaseEnd).state
    _move_lease(connection, event, event.subject, "submitted" if state == "unsent" else "active", state)


def submit_lease(event: Event, connection: Connection) -> LeaseRow:
    """sub.commit; returns the lease as it was before"""
    lease = find_lease(connection, read_body(event, Manifest).lease)
    if lease is None:
        raise ValueError("submission for a lease that was not granted")
    _move_lease(connection, event, lease.lease, lease.state, "submitted")
    return lease


def shift_deadlines(event: Event, connection: Connection) -> None:
    """coordinator.up"""
    _SHIFT.run(connection, {"shift_ms": read_body(event, events.CoordinatorUp).shift_ms})


def _move_lease(connection: Connection, event: Event, lease: str, old: str, new: str) -> None:
    if not db.update_rows(connection, LEASE, {"state": new, "ended_ms": event.time_ms}, lease=lease, state=old):
        raise ValueError(f"{lease}: lease ended twice")


class TrialRow(NamedTuple):
    """Leases of owners without a record, all together."""

    key: int
    spacing_ms: int
    """least time between two of them"""
    granted_ms: int
    """when the last one was granted"""
    record_ms: int
    """when an owner of record last got a lease, or work was last accepted"""


TRIAL = db.define_table("trial", TrialRow, key="key")
DURATION = db.define_table("lease_duration", {"seq": int, "owner": str, "group_ms": int}, key="seq", index="owner")
_NO_TRIAL = TrialRow(0, 0, 0, 0)
_DROP_DURATIONS = db.Sql(
    "DELETE FROM lease_duration WHERE owner = :owner AND seq NOT IN "
    "(SELECT seq FROM lease_duration WHERE owner = :owner ORDER BY seq DESC LIMIT :most)"
)


def read_trials(connection: Connection) -> TrialRow:
    return db.find_row(connection, TrialRow, key=0) or _NO_TRIAL


def list_group_times(connection: Connection) -> list[int]:
    """Milliseconds per group of the newest measured leases, at most a few per owner."""
    statement = "SELECT group_ms FROM lease_duration ORDER BY seq DESC LIMIT :most"
    return db.fetch_rows(connection, statement, int, most=MAX_TIMES)


def list_own_times(connection: Connection, owner: str) -> list[int]:
    """The same of one owner, however many leases of others were measured since."""
    return db.fetch_rows(connection, "SELECT group_ms FROM lease_duration WHERE owner = :owner", int, owner=owner)


def note_grant(event: Event, connection: Connection) -> None:
    """lease.grant"""
    field = "granted_ms" if read_body(event, events.LeaseGrant).trial else "record_ms"
    _change_trials(connection, **{field: event.time_ms})


def set_spacing(event: Event, connection: Connection) -> None:
    """lease.end, sub.outcome"""
    body = parse_event(event)
    assert isinstance(body, events.LeaseEnd | events.SubmissionOutcome), "one of these two kinds"
    changes = {"spacing_ms": body.spacing_ms}
    if isinstance(body, events.SubmissionOutcome) and body.state is SubmissionState.ACCEPTED:
        changes["record_ms"] = event.time_ms
    _change_trials(connection, **changes)


def note_duration(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    body = read_body(event, events.SubmissionOutcome)
    if body.group_ms:
        db.insert_rows(connection, DURATION, {"seq": event.seq, "owner": body.owner, "group_ms": body.group_ms})
        _DROP_DURATIONS.run(connection, {"owner": body.owner, "most": MAX_OWN_TIMES})


def _change_trials(connection: Connection, **changes: int) -> None:
    old = read_trials(connection)
    new = old._replace(**changes)
    if new != old:
        db.replace_rows(connection, TRIAL, new._asdict())


GROUP = db.define_table(
    "trained_group",
    {
        "step": int,
        "position": int,
        "submission": str,
        "place": int,
        "version": int,
        "blob": str,
        "signal": int,
        "batched": int,
    },
    key=("step", "position"),
)


@dataclass(frozen=True, slots=True)
class GroupRangeRow:
    """Groups first .. first + count - 1 of a step."""

    step: int
    first: int
    count: int
    state: str
    """leased, offered, delivered or accepted"""
    fence: int
    """fence of the newest lease"""
    holders: int
    """leases that are active or whose file is expected"""
    trials: int
    """those of them whose owners have no record"""
    reserved: str
    """owner that is offered the range first; empty for none"""
    granted_ms: int
    """when it was first granted"""
    offered_ms: int
    submission: str
    """submission that delivered it or was accepted"""


SPAN = db.define_table("span", GroupRangeRow, key=("step", "first"))
_OFFERED, _HELD_ONCE = "state = 'offered'", "state = 'leased' AND holders = 1"
_TRIED = "state = 'leased' AND holders = trials"
db.index_some("span_offer", _OFFERED, SPAN.c.step, SPAN.c.reserved, SPAN.c.first)
db.index_some("span_offered", _OFFERED, SPAN.c.step, SPAN.c.offered_ms, SPAN.c.first)
db.index_some("span_slow", _HELD_ONCE, SPAN.c.step, SPAN.c.granted_ms, SPAN.c.first)
db.index_some("span_tried", _TRIED, SPAN.c.step, SPAN.c.first)


_SPANS = f"SELECT {db.list_columns(SPAN)} FROM span"
_SELECT_RESERVED = db.Sql(
    f"{_SPANS} WHERE state = 'offered' AND step = :step AND reserved = :reserved ORDER BY first LIMIT 1"
)
_LEASE = db.Sql(
    "UPDATE span SET state = 'leased', fence = :fence, holders = holders + 1, trials = trials + :trial, reserved = '' "
    "WHERE step = :step AND first = :first AND state IN ('offered', 'leased') AND fence = :fence - 1"
)
_LEAVE = db.Sql(
    "UPDATE span SET holders = holders - 1, trials = trials - :trial WHERE step = :step AND first = :first "
    "AND holders > 0"
)
_RETAKE = db.Sql(
    "UPDATE span SET state = 'leased', holders = holders + 1, trials = trials + :trial, reserved = '' "
    "WHERE step = :step AND first = :first AND state IN ('offered', 'leased')"
)
_DELIVER = db.Sql(
    "UPDATE span SET state = 'delivered', holders = holders - 1, trials = trials - :trial, "
    "submission = :submission, reserved = '' WHERE step = :step AND first = :first AND state = 'leased'"
)
_SELECT_KEPT = db.Sql(
    f"SELECT {db.list_columns(SPAN, 's.')} FROM span s LEFT JOIN owner o ON o.owner = s.reserved "
    "WHERE s.state = 'offered' AND s.step = :step AND (s.offered_ms <= :until OR o.accepted = 0 "
    "OR o.strikes >= :strikes) ORDER BY s.offered_ms, s.first LIMIT 1"
)
_ENTRIES = "SELECT position, submission, place, version, blob FROM trained_group"
_WITHDRAW = db.Sql("DELETE FROM trained_group WHERE step = :step AND submission = :submission AND batched = 0")
_MARK_BATCH = db.Sql("UPDATE trained_group SET batched = 1 WHERE step = :step AND signal = 1 AND position <= :last")
_COUNT_OFFERS = db.Sql("SELECT min(offered_ms) FROM span WHERE step = :step AND state = 'offered'")


def find_range(connection: Connection, step: int, first: int) -> GroupRangeRow | None:
    return db.find_row(connection, GroupRangeRow, step=step, first=first)


def find_offer(connection: Connection, step: int, owner: str, until_ms: int) -> GroupRangeRow | None:
    """Groups to grant again: reserved for this owner, or for nobody, or offered since `until_ms`."""
    own = find_own(connection, step, owner)
    if own is not None:
        return own
    free = db.fetch_row(connection, _SELECT_RESERVED, GroupRangeRow, step=step, reserved="")
    late = find_kept(connection, step, until_ms)
    return min((groups for groups in (free, late) if groups is not None), key=lambda groups: groups.first, default=None)


def find_kept(connection: Connection, step: int, until_ms: int) -> GroupRangeRow | None:
    """A range of groups offered since `until_ms`, regardless of its reservation."""
    condition = "WHERE state = 'offered' AND step = :step AND offered_ms <= :until ORDER BY offered_ms, first LIMIT 1"
    return db.find_row(connection, GroupRangeRow, condition, step=step, until=until_ms)


def find_own(connection: Connection, step: int, owner: str) -> GroupRangeRow | None:
    """A range of groups reserved for an owner."""
    return db.fetch_row(connection, _SELECT_RESERVED, GroupRangeRow, step=step, reserved=owner)


def find_spared(connection: Connection, step: int, until_ms: int) -> GroupRangeRow | None:
    """A range of groups offered since `until_ms`, or reserved for an owner without a record."""
    return db.fetch_row(connection, _SELECT_KEPT, GroupRangeRow, step=step, until=until_ms, strikes=STRIKE)


def list_entries(connection: Connection, step: int, most: int) -> list[BatchEntry]:
    """The first groups with a signal, in order of index."""
    statement = f"{_ENTRIES} WHERE step = :step AND signal = 1 ORDER BY position LIMIT :most"
    return db.fetch_rows(connection, statement, _make_entry, step=step, most=most)


def list_batch(connection: Connection, step: int) -> list[BatchEntry]:
    """The groups of a step's batch."""
    statement = f"{_ENTRIES} WHERE step = :step AND batched = 1 ORDER BY position"
    return db.fetch_rows(connection, statement, _make_entry, step=step)


def count_batched(connection: Connection, step: int, submission: str) -> int:
    """Groups of a submission that are in the batch of their step."""
    statement = "SELECT count(*) FROM trained_group WHERE step = :step AND submission = :submission AND batched = 1"
    return db.fetch_number(connection, statement, step=step, submission=submission)


def count_signals(connection: Connection, step: int, submission: str) -> int:
    """Accepted groups of a submission that have a learning signal."""
    statement = "SELECT count(*) FROM trained_group WHERE step = :step AND submission = :submission AND signal = 1"
    return db.fetch_number(connection, statement, step=step, submission=submission)


def oldest_offer(connection: Connection, step: int) -> int:
    """Since when a range of a step is offered; 0 if none is."""
    return db.fetch_number(connection, _COUNT_OFFERS, step=step)


def lease_range(event: Event, connection: Connection) -> None:
    """lease.grant"""
    body = read_body(event, events.LeaseGrant)
    row = {"step": body.step, "first": body.first, "fence": body.fence}
    if body.fresh:
        empty: dict[str, str | int] = {"holders": 1, "trials": body.trial, "reserved": "", "submission": ""}
        empty |= {"granted_ms": event.time_ms, "offered_ms": 0}
        db.insert_rows(connection, SPAN, {**row, "count": body.count, "state": "leased", **empty})
        move_groups(connection, body.step, leased=body.count)
        return
    groups = _require_range(connection, body.step, body.first)
    db.change_one(connection, _LEASE, "lease of delivered groups, or with a wrong fence", **row, trial=body.trial)
    _take_offer(connection, groups)


def release_range(event: Event, connection: Connection) -> None:
    """lease.end"""
    body = read_body(event, events.LeaseEnd)
    groups = _require_range(connection, body.step, body.first)
    place = {"step": groups.step, "first": groups.first}
    trial = _find_trial(connection, event.subject)
    db.change_one(connection, _LEAVE, "end of a lease that nobody held", **place, trial=trial)
    changes = {"state": "offered", "reserved": body.reserved, "offered_ms": event.time_ms}
    if db.update_rows(connection, SPAN, changes, **place, state="leased", holders=0):
        move_groups(connection, groups.step, leased=-groups.count, offered=groups.count)


def retake_range(connection: Connection, lease: LeaseRow) -> None:
    """sub.commit of a lease that had expired: its groups are held again"""
    place = {"step": lease.step, "first": lease.first, "trial": lease.trial}
    groups = _require_range(connection, lease.step, lease.first)
    db.change_one(connection, _RETAKE, "late submission of groups that were already delivered", **place)
    _take_offer(connection, groups)


def deliver_range(event: Event, connection: Connection) -> None:
    """sub.receipt"""
    body = read_body(event, events.SubmissionReceipt)
    groups = _require_range(connection, body.step, body.first)
    values = {"step": groups.step, "first": groups.first, "submission": event.subject}
    values["trial"] = _find_trial(connection, body.lease)
    db.change_one(connection, _DELIVER, "receipt for groups that were already delivered", **values)
    move_groups(connection, groups.step, leased=-groups.count, delivered=groups.count)


def settle_range(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    body = read_body(event, events.SubmissionOutcome)
    if not body.fills:
        return
    groups = _require_range(connection, body.step, body.first)
    if body.state is SubmissionState.ACCEPTED:
        _accept_range(event.subject, body, connection, groups)
    elif (groups.state, groups.submission) == ("accepted", event.subject):
        _withdraw_groups(connection, groups)
        _reopen_range(event, connection, groups)
    elif groups.submission == event.subject:
        move_groups(connection, groups.step, delivered=-groups.count)
        _reopen_range(event, connection, groups)


def mark_batch(event: Event, connection: Connection) -> None:
    """batch.cut"""
    body = read_body(event, events.BatchCut)
    entries = list_entries(connection, body.step, body.groups)
    if len(entries) != body.groups or hash_batch(entries) != body.hash:
        raise ValueError("batch does not match the accepted groups")
    if entries:
        _MARK_BATCH.run(connection, {"step": body.step, "last": entries[-1].index})


def _accept_range(
    submission: str, body: events.SubmissionOutcome, connection: Connection, groups: GroupRangeRow
) -> None:
    signals = body.signals
    place = {"step": groups.step, "first": groups.first, "submission": submission}
    is_accepted = db.update_rows(connection, SPAN, {"state": "accepted"}, **place, state="delivered")
    if not is_accepted or len(signals) != groups.count:
        raise ValueError("accepted submission is not the delivered one")
    move_groups(connection, groups.step, delivered=-groups.count, signal=sum(signals), dull=groups.count - sum(signals))
    shared = {"step": body.step, "version": body.version, "blob": body.blob, "submission": submission, "batched": 0}
    rows = [
        {**shared, "position": body.first + number, "place": number, "signal": signal}
        for number, signal in enumerate(signals)
    ]
    db.insert_rows(connection, GROUP, *rows)


def _reopen_range(event: Event, connection: Connection, groups: GroupRangeRow) -> None:
    """The delivered submission did not count: current holders of the groups continue, or the groups are offered."""
    state = "leased" if groups.holders else "offered"
    changes = {"state": state, "submission": "", "offered_ms": event.time_ms}
    db.update_rows(connection, SPAN, changes, step=groups.step, first=groups.first)
    move_groups(connection, groups.step, **{state: groups.count})


def _withdraw_groups(connection: Connection, groups: GroupRangeRow) -> None:
    """Withdraw accepted groups; none may be in a batch."""
    signals = count_signals(connection, groups.step, groups.submission)
    if _WITHDRAW.run(connection, {"step": groups.step, "submission": groups.submission}).rowcount != groups.count:
        raise ValueError("withdrawn groups are in a batch, or do not exist")
    move_groups(connection, groups.step, signal=-signals, dull=signals - groups.count)


def _take_offer(connection: Connection, groups: GroupRangeRow) -> None:
    """Count the groups of a range as leased, if nobody held them before."""
    if groups.state == "offered":
        move_groups(connection, groups.step, offered=-groups.count, leased=groups.count)


def _find_trial(connection: Connection, lease: str) -> int:
    row = find_lease(connection, lease)
    if row is None:
        raise ValueError(f"{lease}: never granted")
    return row.trial


def _require_range(connection: Connection, step: int, first: int) -> GroupRangeRow:
    groups = find_range(connection, step, first)
    if groups is None:
        raise ValueError("groups were never granted")
    return groups


def _make_entry(index: int, submission: str, place: int, version: int, blob: str) -> BatchEntry:
    return BatchEntry(index=index, submission=submission, place=place, version=version, blob=blob)
