"""Who belongs to the run: joining, renewing, leaving, revocation, and limits that end by time."""

from typing import Any

from sqlalchemy import text

from shoal.swarm.callers import require_member
from shoal.swarm.delegation import Delegation, check_delegation, open_delegation, open_revocation, refuse_revoked
from shoal.swarm.ending import end_lease
from shoal.swarm.event import Kind
from shoal.swarm.messages import MemberInfo, Standing
from shoal.swarm.refusal import AuthError, refuse_banned
from shoal.swarm.state.leases import list_of_owner
from shoal.swarm.state.nodes import NodeRow, find_ban, find_node, find_owner, list_limited
from shoal.swarm.tags import DocumentError
from shoal.swarm.turn import Turn

MAX_AT_ONCE = 64
"""of what is done in one decision because its time has come"""
_LAST_EVENT = text("SELECT time_ms FROM event ORDER BY seq DESC LIMIT 1")
_LAST_HEAD = text("SELECT time_ms FROM head ORDER BY size DESC LIMIT 1")


def record_start(turn: Turn, *, alive_ms: int = 0) -> None:
    """The coordinator is up: what it could not hear while it was away is nobody's fault.

    It was away since it stopped. If it was killed, since the last that it wrote, be it only that it was alive: some
    seconds too much, and never too little.
    """
    times = [turn.connection.execute(statement).scalar() for statement in (_LAST_EVENT, _LAST_HEAD)]
    last_ms = max((int(time_ms) for time_ms in times if time_ms is not None), default=turn.now_ms)
    last_ms = max(last_ms, min(alive_ms, turn.now_ms))
    turn.setting.mirror.started_ms = turn.now_ms
    turn.append(Kind.COORDINATOR_UP, "", {"shift_ms": max(0, turn.now_ms - last_ms)})


def record_stop(turn: Turn) -> None:
    """The coordinator is about to go away."""
    turn.append(Kind.COORDINATOR_DOWN, "", {})


def join_node(turn: Turn, *, node: str, document: bytes) -> MemberInfo:
    """Take in a node; with a new delegation of the same owner, renew what it may do."""
    delegation = _open_delegation(turn, node, document)
    row = find_node(turn.connection, node)
    if find_ban(turn.connection, node, delegation.owner) is not None:
        raise refuse_banned()
    if row is not None and row.owner != delegation.owner:
        raise AuthError(409, "other_owner", "this node belongs to another owner; make a new node key")
    if row is not None and row.gone == "revoked":
        raise refuse_revoked()
    if row is not None and delegation.grant.not_before_ms < row.not_before_ms:
        raise AuthError(409, "older", "a newer delegation of this node is known; bring that, or a newer one yet")
    if row is None or row.gone or row.digest != delegation.digest:
        kind = Kind.NODE_JOIN if row is None or row.gone else Kind.NODE_DELEGATE
        turn.append(kind, node, _describe_delegation(delegation, document))
    return describe_member(turn, node)


def describe_member(turn: Turn, node: str) -> MemberInfo:
    """What a node is told about itself."""
    row = find_node(turn.connection, node)
    assert row is not None, "it has joined"
    owner = find_owner(turn.connection, row.owner)
    assert owner is not None, "a node has an owner"
    return MemberInfo(
        run=turn.run,
        node=node,
        owner=row.owner,
        standing=Standing(owner.standing),
        scopes=tuple(row.scopes.split(",")),
        width=row.width,
        heartbeat_s=turn.params.heartbeat_s,
        server_time_ms=turn.now_ms,
    )


def revoke_node(turn: Turn, *, document: bytes) -> None:
    """An owner takes back all it delegated to a node; its leases are as if returned."""
    try:
        revocation = open_revocation(document)
    except DocumentError as error:
        raise AuthError(400, "revocation", f"not a revocation: {error}") from None
    row = find_node(turn.connection, revocation.node)
    if revocation.run != turn.run or row is None or row.owner != revocation.owner:
        raise AuthError(404, "unknown_node", "this owner has no such node in this run; there is nothing to revoke")
    if row.gone == "revoked":
        return
    turn.append(Kind.NODE_REVOKE, row.node, {"document": document.decode()})
    _end_leases(turn, row, "cancelled", "its node was revoked")


def leave_node(turn: Turn, *, node: str) -> None:
    """A node goes; called twice it is gone all the same."""
    row = find_node(turn.connection, node)
    if row is not None and row.gone == "left":
        return
    rows = require_member(turn, node)
    turn.append(Kind.NODE_LEAVE, node, {})
    _end_leases(turn, rows.node, "returned", "its node left")


def lift_limits(turn: Turn) -> bool:
    """Owners that were limited for long enough are on probation again."""
    before_ms = turn.now_ms - 1000 * turn.params.limited_s
    owners = list_limited(turn.connection, before_ms, MAX_AT_ONCE)
    for owner in owners:
        turn.append(Kind.NODE_STANDING, owner.owner, {"reason": "time", "standing": Standing.PROBATION.value})
    return len(owners) == MAX_AT_ONCE


def _open_delegation(turn: Turn, node: str, document: bytes) -> Delegation:
    try:
        delegation = open_delegation(document)
    except DocumentError as error:
        raise AuthError(400, "delegation", f"not a delegation: {error}") from None
    check_delegation(delegation, node=node, run=turn.run, now_ms=turn.now_ms)
    return delegation


def _describe_delegation(delegation: Delegation, document: bytes) -> dict[str, Any]:
    grant = delegation.grant
    return {
        "delegation": document.decode(),
        "digest": delegation.digest,
        "max_leases": grant.max_leases,
        "not_after_ms": grant.not_after_ms,
        "not_before_ms": grant.not_before_ms,
        "owner": delegation.owner,
        "scopes": sorted(scope.value for scope in grant.scopes),
    }


def _end_leases(turn: Turn, row: NodeRow, state: str, because: str) -> None:
    """As if it had returned them: or who does not like its tasks would leave and join again."""
    for lease in list_of_owner(turn.connection, row.owner):
        if lease.node == row.node:
            end_lease(turn, lease, state, because, blame=True, keep=True)
