"""Who may ask for what, checked in the decision itself: what the wire checked before may have changed since."""

from typing import NamedTuple

from shoal.swarm.delegation import Scope, check_term, refuse_left, refuse_revoked
from shoal.swarm.messages import Standing
from shoal.swarm.refusal import AuthError, refuse_banned
from shoal.swarm.state.nodes import NodeRow, OwnerRow, find_ban, find_node, find_owner
from shoal.swarm.turn import Turn


class Rows(NamedTuple):
    """A caller: its node and its owner."""

    node: NodeRow
    owner: OwnerRow


def require_member(turn: Turn, node: str, scope: Scope | None = None) -> Rows:
    """The caller, if it may act for the run now; `AuthError` otherwise."""
    row = find_node(turn.connection, node)
    if row is None:
        raise AuthError(401, "unknown_node", "this node is not known to this run; join it first")
    if find_ban(turn.connection, node, row.owner) is not None:
        raise refuse_banned()
    if row.gone == "revoked":
        raise refuse_revoked()
    if row.gone:
        raise refuse_left()
    check_term(row.not_before_ms, row.not_after_ms, turn.now_ms)
    if scope is not None and scope.value not in row.scopes.split(","):
        raise AuthError(403, "scope", f"the owner did not allow this node to {scope.value}")
    owner = find_owner(turn.connection, row.owner)
    assert owner is not None, "a node has an owner"
    return Rows(row, owner)


def require_validator(turn: Turn, node: str) -> Rows:
    """The caller, if it may judge."""
    rows = require_member(turn, node, Scope.VALIDATE)
    if not {node, rows.owner.owner} & set(turn.params.validators):
        raise AuthError(403, "not_validator", "this node is not among the validators of this run")
    if rows.owner.standing == Standing.LIMITED:
        text = "this validator let claims lapse, said nothing too often or was wrong, and may not judge for a while"
        raise AuthError(403, "limited", text)
    return rows


def require_trainer(turn: Turn, node: str) -> Rows:
    """The caller, if it may cut batches and publish versions."""
    rows = require_member(turn, node, Scope.TRAIN)
    if not {node, rows.owner.owner} & set(turn.params.trainers):
        raise AuthError(403, "not_trainer", "this node is not among the trainers of this run")
    return rows
