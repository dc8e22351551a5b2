"""Owners, their nodes, and bans.

Standing is an owner's, liveness (not here) a node's. A ban is a row of its own, on the key of an owner or of a node, so
it holds whatever else changes.
"""

from typing import NamedTuple

from sqlalchemy import Column, Connection, Index, Text

from shoal.swarm.db import INT64, define_table
from shoal.swarm.event import Event
from shoal.swarm.messages import Standing, SubmissionState
from shoal.swarm.rules.standing import MOVES
from shoal.swarm.rules.width import Width
from shoal.swarm.sql import Sql, fetch_number, fetch_row, fetch_rows, insert_into, list_columns

OWNER = define_table(
    "owner",
    Column("owner", Text, primary_key=True),
    Column("standing", Text, nullable=False),
    Column("since_ms", INT64, nullable=False),
    Column("accepted", INT64, nullable=False),
    Column("rejected", INT64, nullable=False),
    Column("soft_row", INT64, nullable=False),
    Column("staked", INT64, nullable=False),
    Column("tokens", INT64, nullable=False),
    Column("earned", INT64, nullable=False),
    Column("lapses", INT64, nullable=False),
    Column("failures", INT64, nullable=False),
    Column("failed_ms", INT64, nullable=False),
)
Index("owner_standing", OWNER.c.standing, OWNER.c.since_ms, OWNER.c.owner)
Index("owner_rank", OWNER.c.tokens, OWNER.c.owner)
NODE = define_table(
    "node",
    Column("node", Text, primary_key=True),
    Column("owner", Text, nullable=False, index=True),
    Column("scopes", Text, nullable=False),
    Column("not_before_ms", INT64, nullable=False),
    Column("not_after_ms", INT64, nullable=False),
    Column("max_leases", INT64, nullable=False),
    Column("digest", Text, nullable=False),
    Column("joined_ms", INT64, nullable=False),
    Column("seq", INT64, nullable=False),
    Column("gone", Text, nullable=False),
    Column("width", INT64, nullable=False),
    Column("progress", INT64, nullable=False),
)
BAN = define_table(
    "ban",
    Column("target", Text, primary_key=True),
    Column("reason", Text, nullable=False),
    Column("seq", INT64, nullable=False),
)


class OwnerRow(NamedTuple):
    """An owner and its record."""

    owner: str
    standing: str
    since_ms: int
    accepted: int
    rejected: int
    soft_row: int
    staked: int
    """submissions and verdicts whose pay went into the bond"""
    tokens: int
    earned: int
    lapses: int
    """claims of its validators that passed their deadline, since the last verdict"""
    failures: int
    """times in a row that leases came to nothing, since work of it was accepted"""
    failed_ms: int


class NodeRow(NamedTuple):
    """A node and what its owner allows it."""

    node: str
    owner: str
    scopes: str
    """separated by commas"""
    not_before_ms: int
    not_after_ms: int
    max_leases: int
    digest: str
    joined_ms: int
    seq: int
    """of the event by which it joined first"""
    gone: str
    """empty, left or revoked"""
    width: int
    progress: int

    @property
    def aimd(self) -> Width:
        return Width(self.width, self.progress)


_NODES, _OWNERS = f"SELECT {list_columns(NODE)} FROM node", f"SELECT {list_columns(OWNER)} FROM owner"
_SELECT_NODE, _SELECT_NODES = Sql(f"{_NODES} WHERE node = :node"), Sql(f"{_NODES} ORDER BY node")
_SELECT_NAMED = Sql(f"{_NODES} WHERE node = :key OR owner = :key ORDER BY node")
_SELECT_OWNER, _SELECT_OWNERS = Sql(f"{_OWNERS} WHERE owner = :owner"), Sql(f"{_OWNERS} ORDER BY owner")
_FIRST_JOIN = Sql("SELECT min(seq) FROM node WHERE owner = :owner")
_SELECT_JOINS = Sql("SELECT joined_ms FROM node WHERE joined_ms >= :since_ms ORDER BY joined_ms")
_SELECT_LIMITED = Sql(
    f"{_OWNERS} WHERE standing = 'limited' AND since_ms <= :before_ms ORDER BY since_ms, owner LIMIT :most"
)
_SELECT_LEADERS = Sql(f"{_OWNERS} ORDER BY tokens DESC, owner DESC LIMIT :most")
_SELECT_BANS = Sql("SELECT target, reason, seq FROM ban ORDER BY target")
_SELECT_BAN = Sql("SELECT target, reason, seq FROM ban WHERE target = :node OR target = :owner ORDER BY target")
_INSERT_NODE, _INSERT_OWNER = insert_into(NODE), insert_into(OWNER)
_RENEW_NODE = Sql(
    "UPDATE node SET scopes = :scopes, not_before_ms = :not_before_ms, not_after_ms = :not_after_ms, "
    "max_leases = :max_leases, digest = :digest, gone = '' WHERE node = :node"
)
_SET_GONE = Sql("UPDATE node SET gone = :gone WHERE node = :node")
_SET_WIDTH = Sql("UPDATE node SET width = :width, progress = :progress WHERE node = :node")
_SET_STANDING = Sql("UPDATE owner SET standing = :standing, since_ms = :since_ms WHERE owner = :owner")
_COUNT_OUTCOME = Sql(
    "UPDATE owner SET accepted = accepted + :accepted, rejected = rejected + :rejected, soft_row = :soft_row, "
    "tokens = tokens + :tokens, earned = earned + :earned, failures = failures * (1 - :accepted) WHERE owner = :owner"
)
_COUNT_STAKED = Sql("UPDATE owner SET staked = staked + 1 WHERE owner = :owner")
_SET_FAILURES = Sql(
    "UPDATE owner SET failures = :failures, failed_ms = :time_ms WHERE owner = :owner AND failures < :failures"
)
_SELECT_LAPSERS = Sql("SELECT owner FROM lapse WHERE submission = :submission AND round = :round")
_COUNT_TOGETHER = Sql(
    "SELECT count(*) FROM job WHERE state = 'queued' AND validator <> '' AND validator = :validator "
    "AND deadline_ms <= :time_ms AND submission <> :submission"
)
_COUNT_LAPSE = Sql("UPDATE owner SET lapses = lapses + 1 WHERE owner = :owner")
_EXCUSE_LAPSE = Sql("UPDATE owner SET lapses = lapses - 1 WHERE owner = :owner AND lapses > 0")
_END_LAPSES = Sql(
    "UPDATE owner SET lapses = 0 WHERE lapses > 0 AND owner = (SELECT n.owner FROM node n WHERE n.node = :node)"
)
_INSERT_BAN = Sql(
    "INSERT INTO ban (target, reason, seq) VALUES (:target, :reason, :seq) "
    "ON CONFLICT (target) DO UPDATE SET reason = excluded.reason, seq = excluded.seq"
)
_DELETE_BAN = Sql("DELETE FROM ban WHERE target = :target")

_RECORD = ("accepted", "rejected", "soft_row", "staked", "tokens", "earned", "lapses", "failures", "failed_ms")
_REJECTED = {SubmissionState.FORM, SubmissionState.SOFT, SubmissionState.HARD}


class BanRow(NamedTuple):
    """A ban and the event that made it."""

    target: str
    reason: str
    seq: int


def find_node(connection: Connection, node: str) -> NodeRow | None:
    return fetch_row(connection, _SELECT_NODE, NodeRow, node=node)


def find_owner(connection: Connection, owner: str) -> OwnerRow | None:
    return fetch_row(connection, _SELECT_OWNER, OwnerRow, owner=owner)


def find_ban(connection: Connection, node: str, owner: str) -> BanRow | None:
    """The ban of a node or of its owner."""
    return fetch_row(connection, _SELECT_BAN, BanRow, node=node, owner=owner)


def list_nodes(connection: Connection) -> list[NodeRow]:
    return fetch_rows(connection, _SELECT_NODES, NodeRow)


def list_named(connection: Connection, key: str) -> list[NodeRow]:
    """The node with a key, and the nodes of the owner with it."""
    return fetch_rows(connection, _SELECT_NAMED, NodeRow, key=key)


def list_joins(connection: Connection, since_ms: int) -> list[int]:
    """When nodes joined that were not known before, from some time on."""
    return fetch_rows(connection, _SELECT_JOINS, int, since_ms=since_ms)


def list_owners(connection: Connection) -> list[OwnerRow]:
    return fetch_rows(connection, _SELECT_OWNERS, OwnerRow)


def first_join(connection: Connection, owner: str) -> int:
    """The event by which the first node of an owner joined; 0 if none did."""
    return fetch_number(connection, _FIRST_JOIN, owner=owner)


def list_leaders(connection: Connection, most: int) -> list[OwnerRow]:
    """Owners by accepted tokens, the first ones."""
    return fetch_rows(connection, _SELECT_LEADERS, OwnerRow, most=most)


def list_limited(connection: Connection, before_ms: int, most: int) -> list[OwnerRow]:
    """Owners that are limited since `before_ms` or longer."""
    return fetch_rows(connection, _SELECT_LIMITED, OwnerRow, before_ms=before_ms, most=most)


def list_bans(connection: Connection) -> list[BanRow]:
    return fetch_rows(connection, _SELECT_BANS, BanRow)


def add_node(event: Event, connection: Connection) -> None:
    """node.join, node.delegate"""
    content = event.content
    row = {name: content[name] for name in ("owner", "not_before_ms", "not_after_ms", "max_leases", "digest")}
    row |= {"node": event.subject, "scopes": ",".join(content["scopes"])}
    if find_owner(connection, content["owner"]) is None:
        empty = dict.fromkeys(_RECORD, 0)
        ban = find_ban(connection, content["owner"], content["owner"])
        standing = Standing.PROBATION if ban is None else Standing.BANNED
        values = {"owner": content["owner"], "standing": standing.value, "since_ms": event.time_ms, **empty}
        _INSERT_OWNER.run(connection, values)
    if find_node(connection, event.subject) is None:
        fresh = {"joined_ms": event.time_ms, "seq": event.seq, "gone": "", "width": 1, "progress": 0}
        _INSERT_NODE.run(connection, {**row, **fresh})
    else:
        _RENEW_NODE.run(connection, row)


def drop_node(event: Event, connection: Connection) -> None:
    """node.leave, node.revoke"""
    gone = "left" if event.kind == "node.leave" else "revoked"
    _SET_GONE.run(connection, {"node": event.subject, "gone": gone})


def set_standing(event: Event, connection: Connection) -> None:
    """node.standing; to be banned, and not to be any more, are events of their own"""
    owner, standing = find_owner(connection, event.subject), Standing(event.content["standing"])
    if owner is None or Standing.BANNED in (owner.standing, standing):
        raise ValueError("a standing of nobody, or of somebody who is banned")
    if standing != owner.standing and standing not in MOVES[Standing(owner.standing)]:
        raise ValueError(f"a standing that leads from {owner.standing} to {standing}")
    _write_standing(connection, event.subject, standing.value, event.time_ms)


def add_ban(event: Event, connection: Connection) -> None:
    """ban"""
    target, reason = event.content["target"], event.content["reason"]
    _INSERT_BAN.run(connection, {"target": target, "reason": reason, "seq": event.seq})
    _write_standing(connection, target, Standing.BANNED.value, event.time_ms)


def lift_ban(event: Event, connection: Connection) -> None:
    """unban"""
    target = event.content["target"]
    if _DELETE_BAN.run(connection, {"target": target}).rowcount:
        _write_standing(connection, target, Standing.PROBATION.value, event.time_ms)


def set_width(event: Event, connection: Connection) -> None:
    """lease.end, sub.outcome"""
    content = event.content
    values = {"node": content["node"], "width": content["width"], "progress": content["progress"]}
    _SET_WIDTH.run(connection, values)


def count_failure(event: Event, connection: Connection) -> None:
    """lease.end"""
    content = event.content
    values = {"owner": content["owner"], "failures": content["failures"], "time_ms": event.time_ms}
    _SET_FAILURES.run(connection, values)


def count_outcome(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    content = event.content
    values = {
        "owner": content["owner"],
        "accepted": int(content["state"] == SubmissionState.ACCEPTED),
        "rejected": int(content["state"] in _REJECTED) - int(content["appeal"]),  # which was counted before
        "soft_row": content["soft_row"],
        "tokens": content["tokens"],
        "earned": content["earned"],
    }
    _COUNT_OUTCOME.run(connection, values)
    for owner in content["staked"]:
        _COUNT_STAKED.run(connection, {"owner": owner})


def count_lapse(event: Event, connection: Connection) -> None:
    """val.lapse: one is held against an owner; not another of the same job, and none once others let it lapse too.

    Claims that lapse together, by one death of their validator, count as one: the last of them.
    """
    content = event.content
    values = {"submission": event.subject, "round": content["round"]}
    owners = fetch_rows(connection, _SELECT_LAPSERS, str, **values)
    together = {"validator": content["validator"], "time_ms": event.time_ms, "submission": event.subject}
    if fetch_number(connection, _COUNT_TOGETHER, **together):
        return
    if not owners:
        _COUNT_LAPSE.run(connection, {"owner": content["owner"]})
    elif len(owners) == 1 and owners != [content["owner"]]:  # it is the file that no validator survives
        _EXCUSE_LAPSE.run(connection, {"owner": owners[0]})


def end_lapses(event: Event, connection: Connection) -> None:
    """val.verdict"""
    _END_LAPSES.run(connection, {"node": event.actor})


def _write_standing(connection: Connection, owner: str, standing: str, since_ms: int) -> None:
    _SET_STANDING.run(connection, {"owner": owner, "standing": standing, "since_ms": since_ms})
