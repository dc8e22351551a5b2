"""Owners, their nodes, and bans.

Standing belongs to an owner, liveness (not stored here) to a node. A ban is a separate row, on the key of an owner or a
node, so it stays in force whatever else changes.
"""

from typing import NamedTuple

from sqlalchemy import Connection, Index

from shoal.coordinator.rules.leases import LeaseLimit
from shoal.coordinator.rules.standing import MOVES, has_record, is_suspect
from shoal.ledger import db
from shoal.ledger.event import Event
from shoal.protocol import events
from shoal.protocol.events import parse_event, read_ban, read_body
from shoal.protocol.messages import REJECTED, Standing, SubmissionState

SUSPECT = 2
"""the last rank"""


class OwnerRow(NamedTuple):
    """An owner and its record."""

    owner: str
    standing: str
    since_ms: int
    accepted: int
    rejected: int
    strikes: int
    """rejected work and failed leases that accepted work does not outweigh, see `rules.standing`"""
    staked: int
    """submissions and verdicts whose pay went into the bond"""
    tokens: int
    earned: int
    lapses: int
    """lapsed claims of its validators since the last verdict"""
    failures: int
    """consecutive failures of leases and rejections since its work was last accepted"""
    failed_ms: int
    charge_ms: int
    """time without a lease since then, for the CPU time of validators"""
    renewed: int
    """1 after a new proof of work, until the next rejection or failed lease"""

    @property
    def has_record(self) -> bool:
        return has_record(self.accepted, self.strikes)

    @property
    def rank(self) -> int:
        """Order in which owners are served: 0 with a record, 1 new, 2 suspect."""
        return 0 if self.has_record else SUSPECT if is_suspect(self.strikes) else 1


OWNER = db.define_table("owner", OwnerRow, key="owner")
Index("owner_standing", OWNER.c.standing, OWNER.c.since_ms, OWNER.c.owner)
Index("owner_rank", OWNER.c.tokens, OWNER.c.owner)


class NodeRow(NamedTuple):
    """A node and its delegated permissions."""

    node: str
    owner: str
    scopes: str
    """separated by commas"""
    not_before_ms: int
    not_after_ms: int
    max_leases: int
    digest: str
    seq: int
    """number of the event by which it first joined"""
    gone: str
    """empty, left or revoked"""
    width: int
    progress: int

    @property
    def lease_limit(self) -> LeaseLimit:
        return LeaseLimit(self.width, self.progress)


NODE = db.define_table("node", NodeRow, key="node", index="owner")


_SELECT_JOINS = db.Sql(
    "SELECT subject, time_ms FROM event WHERE seq >= (SELECT max(seq) FROM event) - :most AND time_ms >= :since_ms "
    "AND kind IN ('node.join', 'node.delegate') ORDER BY seq"
)
_IN_PREFIX = "{0} >= :prefix AND {0} < :after"
_MATCHING = (
    f"WHERE owner IN (SELECT owner FROM node WHERE {_IN_PREFIX.format('node')} UNION "
    f"SELECT owner FROM owner WHERE {_IN_PREFIX.format('owner')}) ORDER BY owner LIMIT :most"
)
_OWNED = f"WHERE owner = :owner ORDER BY CASE WHEN {_IN_PREFIX.format('node')} THEN 0 ELSE 1 END, node LIMIT :most"
_SELECT_SCOPES = db.Sql(
    "SELECT DISTINCT owner, scopes FROM node WHERE owner IN "
    "(SELECT owner FROM owner ORDER BY tokens DESC, owner DESC LIMIT :most)"
)
_SELECT_BANS = db.Sql("SELECT target, reason, seq FROM ban ORDER BY target")
_SELECT_BAN = db.Sql("SELECT target, reason, seq FROM ban WHERE target = :node OR target = :owner ORDER BY target")
_COUNT_OUTCOME = db.Sql(
    "UPDATE owner SET accepted = accepted + :accepted, rejected = rejected + :rejected, strikes = :strikes, "
    "tokens = tokens + :tokens, earned = earned + :earned, renewed = CASE WHEN :rejected > 0 THEN 0 ELSE renewed END "
    "WHERE owner = :owner"
)
_SET_FAILURES = db.Sql(
    "UPDATE owner SET failures = :failures, charge_ms = :charge_ms, "
    "failed_ms = CASE WHEN failures < :failures OR charge_ms < :charge_ms THEN :time_ms ELSE failed_ms END "
    "WHERE owner = :owner"
)
_SELECT_LAPSERS = db.Sql("SELECT owner FROM lapse WHERE submission = :submission AND round = :round")
_COUNT_TOGETHER = db.Sql(
    "SELECT count(*) FROM job WHERE state = 'queued' AND validator <> '' AND validator = :validator "
    "AND deadline_ms <= :time_ms AND submission <> :submission"
)
_END_LAPSES = db.Sql(
    "UPDATE owner SET lapses = 0 WHERE lapses > 0 AND owner = (SELECT n.owner FROM node n WHERE n.node = :node)"
)
_DELETE_BAN = db.Sql("DELETE FROM ban WHERE target = :target")

_RECORD = (
    *("accepted", "rejected", "strikes", "staked", "tokens", "earned", "lapses", "failures", "failed_ms"),
    *("charge_ms", "renewed"),
)


class BanRow(NamedTuple):
    """A ban and the event that created it."""

    target: str
    reason: str
    seq: int


BAN = db.define_table("ban", BanRow, key="target")


def find_node(connection: Connection, node: str) -> NodeRow | None:
    return db.find_row(connection, NodeRow, node=node)


def find_owner(connection: Connection, owner: str) -> OwnerRow | None:
    return db.find_row(connection, OwnerRow, owner=owner)


def find_ban(connection: Connection, node: str, owner: str) -> BanRow | None:
    """The ban of a node or of its owner."""
    return db.fetch_row(connection, _SELECT_BAN, BanRow, node=node, owner=owner)


def list_nodes(connection: Connection) -> list[NodeRow]:
    return db.list_rows(connection, NodeRow, "ORDER BY node")


def list_named(connection: Connection, key: str) -> list[NodeRow]:
    """The node with this key, and the nodes of the owner with this key."""
    return db.list_rows(connection, NodeRow, "WHERE node = :key OR owner = :key ORDER BY node", key=key)


def list_matching(connection: Connection, prefix: str, most: int) -> list[OwnerRow]:
    """Owners whose key, or whose node's key, begins with a prefix."""
    return db.list_rows(connection, OwnerRow, _MATCHING, **_bound_prefix(prefix), most=most)


def list_owned(connection: Connection, owner: str, prefix: str, most: int) -> list[NodeRow]:
    """Nodes of an owner; first those whose key begins with a prefix."""
    return db.list_rows(connection, NodeRow, _OWNED, owner=owner, **_bound_prefix(prefix), most=most)


def _bound_prefix(prefix: str) -> dict[str, str]:
    return {"prefix": prefix, "after": f"{prefix}g"}  # keys are hex digits: g is behind them all


def list_scopes(connection: Connection, most: int) -> dict[str, set[str]]:
    """What the nodes of each of the `list_leaders` may do."""
    found: dict[str, set[str]] = {}
    for owner, scopes in db.fetch_rows(connection, _SELECT_SCOPES, lambda *row: row, most=most):
        found.setdefault(owner, set()).update(scopes.split(","))
    return found


def list_joins(connection: Connection, since_ms: int, most: int) -> list[tuple[str, int]]:
    """Nodes that joined or renewed since `since_ms`, and when, among the `most` newest events."""
    return db.fetch_rows(connection, _SELECT_JOINS, lambda *row: row, since_ms=since_ms, most=most)


def list_owners(connection: Connection) -> list[OwnerRow]:
    return db.list_rows(connection, OwnerRow, "ORDER BY owner")


def first_join(connection: Connection, owner: str) -> int:
    """The event by which the first node of an owner joined; 0 if none did."""
    return db.fetch_number(connection, "SELECT min(seq) FROM node WHERE owner = :owner", owner=owner)


def list_leaders(connection: Connection, most: int) -> list[OwnerRow]:
    """The owners with the most accepted tokens."""
    return db.list_rows(connection, OwnerRow, "ORDER BY tokens DESC, owner DESC LIMIT :most", most=most)


def list_limited(connection: Connection, before_ms: int, most: int) -> list[OwnerRow]:
    """Owners that have been limited since `before_ms` or longer."""
    condition = "WHERE standing = 'limited' AND since_ms <= :before_ms ORDER BY since_ms, owner LIMIT :most"
    return db.list_rows(connection, OwnerRow, condition, before_ms=before_ms, most=most)


def list_bans(connection: Connection) -> list[BanRow]:
    return db.fetch_rows(connection, _SELECT_BANS, BanRow)


def add_node(event: Event, connection: Connection) -> None:
    """node.join, node.delegate"""
    body = read_body(event, events.NodeJoin)
    delegated = {**body.model_dump(exclude={"delegation"}), "scopes": ",".join(body.scopes), "gone": ""}
    if find_owner(connection, body.owner) is None:
        empty = dict.fromkeys(_RECORD, 0)
        ban = find_ban(connection, body.owner, body.owner)
        standing = Standing.PROBATION if ban is None else Standing.BANNED
        values = {"owner": body.owner, "standing": standing.value, "since_ms": event.time_ms, **empty}
        db.insert_rows(connection, OWNER, values)
    else:  # joining takes a proof of work, also for an owner that has nodes
        db.update_rows(connection, OWNER, {"renewed": 1}, owner=body.owner)
    if find_node(connection, event.subject) is None:
        fresh = {"seq": event.seq, "width": 1, "progress": 0}
        db.insert_rows(connection, NODE, {"node": event.subject, **delegated, **fresh})
    else:
        db.update_rows(connection, NODE, delegated, node=event.subject)


def drop_node(event: Event, connection: Connection) -> None:
    """node.leave, node.revoke"""
    gone = "left" if event.kind == "node.leave" else "revoked"
    db.update_rows(connection, NODE, {"gone": gone}, node=event.subject)


def set_standing(event: Event, connection: Connection) -> None:
    """node.standing; bans and unbans are separate events"""
    owner, standing = find_owner(connection, event.subject), read_body(event, events.NodeStanding).standing
    if owner is None or Standing.BANNED in (owner.standing, standing):
        raise ValueError("standing change for an unknown or banned owner")
    if standing != owner.standing and standing not in MOVES[Standing(owner.standing)]:
        raise ValueError(f"invalid standing change from {owner.standing} to {standing}")
    _write_standing(connection, event.subject, standing.value, event.time_ms)


def add_ban(event: Event, connection: Connection) -> None:
    """ban"""
    ban = read_ban(event)
    db.replace_rows(connection, BAN, {"target": ban.target, "reason": ban.reason, "seq": event.seq})
    _write_standing(connection, ban.target, Standing.BANNED.value, event.time_ms)


def lift_ban(event: Event, connection: Connection) -> None:
    """unban"""
    target = read_ban(event).target
    if _DELETE_BAN.run(connection, {"target": target}).rowcount:
        forgiven = dict.fromkeys(("strikes", "failures", "charge_ms"), 0)
        db.update_rows(connection, OWNER, forgiven, owner=target)
        _write_standing(connection, target, Standing.PROBATION.value, event.time_ms)


def set_lease_limit(event: Event, connection: Connection) -> None:
    """lease.end, sub.outcome"""
    body = parse_event(event)
    assert isinstance(body, events.LeaseEnd | events.SubmissionOutcome), "one of these two kinds"
    db.update_rows(connection, NODE, {"width": body.width, "progress": body.progress}, node=body.node)


def count_failure(event: Event, connection: Connection) -> None:
    """lease.end"""
    body = read_body(event, events.LeaseEnd)
    owner = find_owner(connection, body.owner)
    charge_ms = 0 if owner is None else owner.charge_ms
    values = {"owner": body.owner, "failures": body.failures, "charge_ms": charge_ms}
    _SET_FAILURES.run(connection, {**values, "time_ms": event.time_ms})
    used = (
        {"renewed": 0} if owner is not None and body.failures > owner.failures else {}
    )  # its proof of work is used up
    db.update_rows(connection, OWNER, {"strikes": body.strikes, **used}, owner=body.owner)


def count_outcome(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    body = read_body(event, events.SubmissionOutcome)
    values = {
        "owner": body.owner,
        "accepted": int(body.state is SubmissionState.ACCEPTED),
        "rejected": int(body.state in REJECTED) - body.appeal,  # already counted before the appeal
        "strikes": body.strikes,
        "tokens": body.tokens,
        "earned": body.earned,
    }
    _COUNT_OUTCOME.run(connection, values)
    failed = {"failures": body.failures, "charge_ms": body.charge_ms, "time_ms": event.time_ms}
    _SET_FAILURES.run(connection, {"owner": body.owner, **failed})
    for owner in body.staked:
        db.execute(connection, "UPDATE owner SET staked = staked + 1 WHERE owner = :owner", owner=owner)


def count_lapse(event: Event, connection: Connection) -> None:
    """val.lapse: counts one per owner and job, and none once another owner let the same job lapse too.

    Claims that lapse together, because their validator died, count as one: the last of them.
    """
    body = read_body(event, events.ClaimLapse)
    values = {"submission": event.subject, "round": body.round}
    owners = db.fetch_rows(connection, _SELECT_LAPSERS, str, **values)
    together = {"validator": body.validator, "time_ms": event.time_ms, "submission": event.subject}
    if db.fetch_number(connection, _COUNT_TOGETHER, **together):
        return
    if not owners:
        db.execute(connection, "UPDATE owner SET lapses = lapses + 1 WHERE owner = :owner", owner=body.owner)
    elif len(owners) == 1 and owners != [body.owner]:  # the file crashes every validator
        db.execute(
            connection, "UPDATE owner SET lapses = lapses - 1 WHERE owner = :owner AND lapses > 0", owner=owners[0]
        )


def end_lapses(event: Event, connection: Connection) -> None:
    """val.verdict"""
    _END_LAPSES.run(connection, {"node": event.actor})


def _write_standing(connection: Connection, owner: str, standing: str, since_ms: int) -> None:
    db.update_rows(connection, OWNER, {"standing": standing, "since_ms": since_ms}, owner=owner)
