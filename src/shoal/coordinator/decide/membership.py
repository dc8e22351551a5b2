"""Membership: joining, renewing, leaving, revocation, and limits that expire."""

from sqlalchemy import text

from shoal.coordinator.decide.context import Decision, build_from, check_ban, require_member, require_row
from shoal.coordinator.decide.leases import end_lease, owes_work
from shoal.coordinator.state.leases import list_of_owner
from shoal.coordinator.state.members import NodeRow, find_node, find_owner, list_limited
from shoal.identity.authenticator import check_delegation, refuse_revoked
from shoal.identity.delegation import Delegation, open_delegation, open_revocation
from shoal.identity.documents import DocumentError
from shoal.net.api_error import ApiError
from shoal.protocol import events
from shoal.protocol.messages import MemberInfo, Standing

MAX_AT_ONCE = 64
"""most items that one decision processes because their time has come"""
_LAST_EVENT = text("SELECT time_ms FROM event ORDER BY seq DESC LIMIT 1")
_LAST_HEAD = text("SELECT time_ms FROM head ORDER BY size DESC LIMIT 1")


def record_start(decision: Decision, *, alive_ms: int = 0) -> None:
    """Record that the coordinator is up: what it missed during its downtime is nobody's fault.

    The downtime began when it stopped. If it was killed, it began with the last write, which may be only a sign that it
    was alive: this may be some seconds too long, and is never too short.
    """
    times = [decision.connection.execute(statement).scalar() for statement in (_LAST_EVENT, _LAST_HEAD)]
    last_ms = max((int(time_ms) for time_ms in times if time_ms is not None), default=decision.now_ms)
    last_ms = max(last_ms, min(alive_ms, decision.now_ms))
    decision.context.cache.started_ms = decision.now_ms
    decision.append("", events.CoordinatorUp(shift_ms=max(0, decision.now_ms - last_ms)))


def record_stop(decision: Decision) -> None:
    """Record that the coordinator is about to stop."""
    decision.append("", events.CoordinatorDown())


def join_node(decision: Decision, node: str, document: bytes, *, is_paid: bool = True) -> MemberInfo:
    """Add a node; with a new delegation of the same owner, renew its permissions.

    Without payment it only repeats its last answer: each event has a proof of work of its own. An owner with too much
    rejected work, or with failed leases only, pays again before its next lease, which is recorded as a join.
    """
    delegation = _open_delegation(decision, node, document)
    row = find_node(decision.connection, node)
    check_ban(decision, node, delegation.owner)
    if row is not None and row.owner != delegation.owner:
        raise ApiError(409, "other_owner", "this node key belongs to another owner; create a new node key")
    if row is not None and row.gone == "revoked":
        raise refuse_revoked()
    if row is not None and delegation.grant.not_before_ms < row.not_before_ms:
        raise ApiError(409, "older", "a newer delegation of this node is known; use that one, or issue a new one")
    owner = find_owner(decision.connection, delegation.owner)
    renews = owner is not None and owes_work(decision.params, owner)
    if row is None or row.gone or row.digest != delegation.digest or renews:
        if not is_paid:
            raise ApiError(401, "work", "the proof-of-work stamp was used before; request a new challenge")
        body = events.NodeJoin if row is None or row.gone or renews else events.NodeDelegate
        grant = delegation.grant
        scopes = tuple(sorted(scope.value for scope in grant.scopes))
        about = {"delegation": document.decode(), "digest": delegation.digest, "owner": delegation.owner}
        decision.append(node, build_from(body, grant, scopes=scopes, **about))
    return describe_member(decision, node)


def describe_member(decision: Decision, node: str) -> MemberInfo:
    """A node's own membership data."""
    row = require_row(find_node(decision.connection, node), "the node has joined")
    owner = require_row(find_owner(decision.connection, row.owner), "every node has an owner")
    return build_from(
        MemberInfo,
        row,
        run=decision.run,
        standing=Standing(owner.standing),
        scopes=tuple(row.scopes.split(",")),
        heartbeat_s=decision.params.heartbeat_s,
        server_time_ms=decision.now_ms,
    )


def revoke_node(decision: Decision, document: bytes) -> None:
    """Revoke everything that an owner delegated to a node; its leases are treated as returned."""
    try:
        revocation = open_revocation(document)
    except DocumentError as error:
        raise ApiError(400, "revocation", f"invalid revocation: {error}") from None
    row = find_node(decision.connection, revocation.node)
    if revocation.run != decision.run or row is None or row.owner != revocation.owner:
        raise ApiError(404, "unknown_node", "this owner has no such node in this run; nothing to revoke")
    if row.gone == "revoked":
        return
    decision.append(row.node, events.NodeRevoke(document=document.decode()))
    _end_leases(decision, row, "cancelled", "its node was revoked")


def leave_node(decision: Decision, node: str) -> None:
    """Remove a node; repeating it has no further effect."""
    row = find_node(decision.connection, node)
    if row is not None and row.gone == "left":
        return
    rows = require_member(decision, node)
    decision.append(node, events.NodeLeave())
    _end_leases(decision, rows.node, "returned", "its node left")


def lift_limits(decision: Decision) -> bool:
    """Put owners whose limitation has expired back on probation."""
    before_ms = decision.now_ms - 1000 * decision.params.limited_s
    owners = list_limited(decision.connection, before_ms, MAX_AT_ONCE)
    for owner in owners:
        decision.append(owner.owner, events.NodeStanding(reason="time", standing=Standing.PROBATION))
    return len(owners) == MAX_AT_ONCE


def _open_delegation(decision: Decision, node: str, document: bytes) -> Delegation:
    try:
        delegation = open_delegation(document)
    except DocumentError as error:
        raise ApiError(400, "delegation", f"invalid delegation: {error}") from None
    check_delegation(delegation, node=node, run=decision.run, now_ms=decision.now_ms)
    return delegation


def _end_leases(decision: Decision, row: NodeRow, state: str, because: str) -> None:
    """End its leases as if returned; otherwise a node could leave and rejoin to get different tasks."""
    for lease in list_of_owner(decision.connection, row.owner):
        if lease.node == row.node:
            end_lease(decision, lease, state, because, blame=True, keep=True)
