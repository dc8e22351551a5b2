"""Leases.

    active -> submitted | returned | expired | cancelled,   submitted -> unsent

A lease is out of the world by its deadline, and its upload by that of the upload.
"""

from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Column, Connection, Index, Text

from shoal.swarm.db import INT64, define_table
from shoal.swarm.event import Event
from shoal.swarm.sql import Sql, fetch_number, fetch_row, fetch_rows, insert_into, list_columns

LEASE = define_table(
    "lease",
    Column("lease", Text, primary_key=True),
    Column("node", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("request_key", Text, nullable=False),
    Column("step", INT64, nullable=False),
    Column("first", INT64, nullable=False),
    Column("count", INT64, nullable=False),
    Column("fence", INT64, nullable=False),
    Column("backup", INT64, nullable=False),
    Column("state", Text, nullable=False),
    Column("granted_ms", INT64, nullable=False),
    Column("deadline_ms", INT64, nullable=False),
    Column("ended_ms", INT64, nullable=False),
    Column("upload_s", INT64, nullable=False),
    Column("duplicate_tokens", INT64, nullable=False),
    Column("newest_version", INT64, nullable=False),
    Column("price", INT64, nullable=False),
)
Index("lease_request", LEASE.c.node, LEASE.c.request_key, unique=True)
Index("lease_due", LEASE.c.state, LEASE.c.deadline_ms)
Index("lease_holder", LEASE.c.state, LEASE.c.owner)
Index("lease_span", LEASE.c.step, LEASE.c.first)
Index("lease_share", LEASE.c.step, LEASE.c.owner)
Index("lease_newest", LEASE.c.step, LEASE.c.granted_ms)
Index("lease_slow", LEASE.c.step, LEASE.c.state, LEASE.c.granted_ms)


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
    """1 if somebody else held the span when it was granted"""
    state: str
    granted_ms: int
    deadline_ms: int
    ended_ms: int
    upload_s: int
    duplicate_tokens: int
    newest_version: int
    price: int


class Held(NamedTuple):
    """Active leases of a node and of its owner."""

    node: int
    owner: int


_LEASES = f"SELECT {list_columns(LEASE)} FROM lease"
_SELECT_LEASE = Sql(f"{_LEASES} WHERE lease = :lease")
_SELECT_REQUEST = Sql(f"{_LEASES} WHERE node = :node AND request_key = :request_key")
_SELECT_DUE = Sql(
    f"{_LEASES} WHERE state = 'active' AND deadline_ms <= :now_ms ORDER BY deadline_ms, lease LIMIT :most"
)
_SELECT_ACTIVE = Sql(f"{_LEASES} WHERE state = 'active' ORDER BY lease")
_SELECT_ON_SPAN = Sql(f"{_LEASES} WHERE step = :step AND first = :first AND state = 'active' ORDER BY fence")
_SELECT_ON_STEP = Sql(f"{_LEASES} WHERE step = :step AND state = 'active' ORDER BY lease")
_SELECT_OLDEST = Sql(f"{_LEASES} WHERE step = :step AND state = 'active' ORDER BY granted_ms LIMIT :most")
_SELECT_OF_OWNER = Sql(f"{_LEASES} WHERE state = 'active' AND owner = :owner ORDER BY lease")
_SELECT_SLOWEST = Sql(
    f"SELECT {list_columns(LEASE, 'l.')} FROM span s CROSS JOIN lease l "  # spans first, in the order of their index
    "WHERE s.state = 'leased' AND s.holders = 1 AND s.step = :step AND l.step = s.step AND l.first = s.first "
    "AND l.fence = s.fence AND l.state IN ('active', 'submitted') AND l.owner <> :owner "
    "ORDER BY s.granted_ms, s.first LIMIT 1"
)
_SELECT_TIMES = Sql(
    "SELECT owner, time_ms FROM (SELECT l.owner, (l.ended_ms - l.granted_ms) / l.count AS time_ms, s.decided_ms, "
    "row_number() OVER (PARTITION BY l.owner ORDER BY s.decided_ms DESC, s.submission DESC) AS place "
    "FROM submission s JOIN lease l ON l.lease = s.lease WHERE s.state = 'accepted') AS timed "
    "WHERE place <= :most_own ORDER BY decided_ms DESC LIMIT :most"
)
_COUNT_HELD = Sql("SELECT count(*) FROM lease WHERE state = 'active' AND owner = :owner")
_COUNT_NODE = Sql("SELECT count(*) FROM lease WHERE state = 'active' AND owner = :owner AND node = :node")
_COUNT_SHARE = Sql(
    "SELECT coalesce(sum(CASE WHEN l.state = 'active' OR s.state IN ('committed', 'received') THEN l.count "
    "WHEN s.state = 'accepted' THEN (SELECT count(*) FROM trained_group g WHERE g.step = l.step AND g.signal = 1 "
    "AND g.position >= l.first AND g.position < l.first + l.count AND g.submission = s.submission) ELSE 0 END), 0) "
    "FROM lease l LEFT JOIN submission s ON s.lease = l.lease WHERE l.step = :step AND l.owner = :owner"
)
_NEXT_OWNER = Sql("SELECT owner FROM lease WHERE step = :step AND owner > :after ORDER BY owner LIMIT 1")
_LAST_OTHER = Sql(
    "SELECT l.granted_ms FROM lease l JOIN owner o ON o.owner = l.owner AND o.accepted > 0 "
    "WHERE l.step = :step AND l.owner <> :owner ORDER BY l.granted_ms DESC LIMIT 1"
)
_INSERT = insert_into(LEASE)
_END = Sql("UPDATE lease SET state = :state, ended_ms = :time_ms WHERE lease = :lease AND state = :old")
_SHIFT = Sql("UPDATE lease SET deadline_ms = deadline_ms + :shift_ms WHERE state = 'active'")

_TERMS = (
    "node",
    "owner",
    "request_key",
    "step",
    "first",
    "count",
    "fence",
    "backup",
    "deadline_ms",
    "upload_s",
    "duplicate_tokens",
    "newest_version",
    "price",
)


def find_lease(connection: Connection, lease: str) -> LeaseRow | None:
    return fetch_row(connection, _SELECT_LEASE, LeaseRow, lease=lease)


def find_request(connection: Connection, node: str, request_key: str) -> LeaseRow | None:
    """The lease that a request got."""
    return fetch_row(connection, _SELECT_REQUEST, LeaseRow, node=node, request_key=request_key)


def list_due(connection: Connection, now_ms: int, most: int) -> list[LeaseRow]:
    """Active leases whose deadline has passed."""
    return fetch_rows(connection, _SELECT_DUE, LeaseRow, now_ms=now_ms, most=most)


def list_active(connection: Connection) -> list[LeaseRow]:
    return fetch_rows(connection, _SELECT_ACTIVE, LeaseRow)


def list_on_span(connection: Connection, step: int, first: int) -> list[LeaseRow]:
    """Active leases of a span, the oldest first."""
    return fetch_rows(connection, _SELECT_ON_SPAN, LeaseRow, step=step, first=first)


def list_on_step(connection: Connection, step: int) -> list[LeaseRow]:
    return fetch_rows(connection, _SELECT_ON_STEP, LeaseRow, step=step)


def list_oldest(connection: Connection, step: int, most: int) -> list[LeaseRow]:
    """Active leases of a step, the longest held first."""
    return fetch_rows(connection, _SELECT_OLDEST, LeaseRow, step=step, most=most)


def list_of_owner(connection: Connection, owner: str) -> list[LeaseRow]:
    return fetch_rows(connection, _SELECT_OF_OWNER, LeaseRow, owner=owner)


def find_slowest(connection: Connection, step: int, owner: str) -> LeaseRow | None:
    """The newest lease of the span of a step that was given out first, if nobody else holds it and it is not this
    owner's. That of an upload which does not come is one too."""
    return fetch_row(connection, _SELECT_SLOWEST, LeaseRow, step=step, owner=owner)


def list_times(connection: Connection, most: int, most_own: int) -> list[tuple[str, int]]:
    """Owner and milliseconds per group of the newest accepted leases, `most_own` of each owner; the newest last."""
    rows = _SELECT_TIMES.run(connection, {"most": most, "most_own": most_own})
    return [(str(owner), int(time_ms)) for owner, time_ms in rows][::-1]


def count_held(connection: Connection, node: str, owner: str) -> Held:
    mine = fetch_number(connection, _COUNT_NODE, owner=owner, node=node)
    return Held(mine, fetch_number(connection, _COUNT_HELD, owner=owner))


def count_share(connection: Connection, step: int, owner: str) -> int:
    """Groups of a step that an owner holds, has delivered, or had accepted with a signal."""
    return fetch_number(connection, _COUNT_SHARE, step=step, owner=owner)


def list_owners(connection: Connection, step: int, most: int) -> list[str]:
    """Owners that had leases of a step, `most` at most."""
    owners: list[str] = []
    while len(owners) < most:
        after = owners[-1] if owners else ""
        found = fetch_row(connection, _NEXT_OWNER, str, step=step, after=after)
        if found is None:
            break
        owners.append(found)
    return owners


def last_other(connection: Connection, step: int, owner: str) -> int:
    """When somebody else last got a lease of a step, of those whose work was ever accepted; 0 for never."""
    return fetch_number(connection, _LAST_OTHER, step=step, owner=owner)


def add_lease(event: Event, connection: Connection) -> None:
    """lease.grant"""
    row = {name: event.content[name] for name in _TERMS}
    row |= {"lease": event.subject, "state": "active", "granted_ms": event.time_ms, "ended_ms": 0}
    _INSERT.run(connection, row)


def end_lease(event: Event, connection: Connection) -> None:
    """lease.end"""
    state = event.content["state"]
    _move_lease(connection, event, event.subject, "submitted" if state == "unsent" else "active", state)


def submit_lease(event: Event, connection: Connection) -> LeaseRow:
    """sub.commit; returns the lease as it was"""
    lease = find_lease(connection, event.content["lease"])
    if lease is None:
        raise ValueError("a submission of a lease that was not granted")
    _move_lease(connection, event, lease.lease, lease.state, "submitted")
    return lease


def shift_deadlines(event: Event, connection: Connection) -> None:
    """coordinator.up"""
    _SHIFT.run(connection, {"shift_ms": event.content["shift_ms"]})


def _move_lease(connection: Connection, event: Event, lease: str, old: str, new: str) -> None:
    values = {"lease": lease, "old": old, "state": new, "time_ms": event.time_ms}
    if _END.run(connection, values).rowcount != 1:
        raise ValueError(f"{lease}: a lease that ends twice")
