"""Which decision an event begins, and what that decision was about.

Of some decisions the ledger does not say who asked for them: a batch is cut for a trainer, a lease returned by its
node. That somebody was there who could ask is what can be checked.
"""

from collections.abc import Callable
from typing import Any

from shoal.swarm import (
    batching,
    commanding,
    crediting,
    judging,
    leasing,
    membership,
    queueing,
    submitting,
    sweeping,
)
from shoal.swarm.callers import require_trainer
from shoal.swarm.event import Event, Kind
from shoal.swarm.law.docket import LawError, name_event
from shoal.swarm.law.hearing import Hearing
from shoal.swarm.messages import (
    AppealStatement,
    Command,
    Manifest,
    RedeemStatement,
    SignedAppeal,
    SignedCommand,
    SignedManifest,
    SignedRedeem,
    SignedUnbond,
    SignedVerdict,
    SignedVersion,
    UnbondStatement,
    VerdictStatement,
    VersionStatement,
)
from shoal.swarm.refusal import AuthError
from shoal.swarm.state.nodes import list_nodes
from shoal.swarm.state.submissions import find_submission, list_with_blob

Case = Callable[[Hearing, Event], object]


def take_again(turn: Hearing, event: Event) -> object:
    """Take the decision again that begins with an event; its answer."""
    case = _CASES.get(Kind(event.kind))
    if case is None:
        raise LawError(f"event {event.seq}: {name_event(event.kind, event.subject)}: follows from no decision")
    if case in _STATED and not event.signature:
        raise LawError(f"event {event.seq}: {name_event(event.kind, event.subject)}: nobody signed it")
    return case(turn, event)


def _join(turn: Hearing, event: Event) -> object:
    document = str(event.content["delegation"]).encode()
    return membership.join_node(turn, node=event.subject, document=document)


def _revoke(turn: Hearing, event: Event) -> None:
    membership.revoke_node(turn, document=str(event.content["document"]).encode())


def _leave(turn: Hearing, event: Event) -> None:
    membership.leave_node(turn, node=event.subject)


def _grant(turn: Hearing, event: Event) -> object:
    return leasing.grant_lease(turn, node=event.content["node"], request_key=event.content["request_key"])


def _end_lease(turn: Hearing, event: Event) -> object:
    match event.content["state"]:
        case "returned":
            return leasing.return_lease(turn, node=event.content["node"], lease_id=event.subject)
        case "expired":
            return leasing.expire_leases(turn)
    return submitting.expire_uploads(turn)


def _commit(turn: Hearing, event: Event) -> object:
    signed = SignedManifest(manifest=Manifest.model_validate_json(event.body), signature=event.signature.hex())
    return submitting.commit_manifest(turn, node=event.actor, signed=signed)


def _receive(turn: Hearing, event: Event) -> object:
    row = find_submission(turn.connection, event.subject)
    if row is None:
        raise AuthError(404, "unknown_submission", "there is no such submission")
    return submitting.record_receipt(turn, node=row.node, submission=event.subject)


def _claim(turn: Hearing, event: Event) -> object:
    return queueing.take_job(turn, node=event.content["validator"])


def _judge(turn: Hearing, event: Event) -> object:
    signed = SignedVerdict(verdict=VerdictStatement.model_validate_json(event.body), signature=event.signature.hex())
    return judging.post_verdict(turn, node=event.actor, signed=signed)


def _appeal(turn: Hearing, event: Event) -> object:
    appeal = AppealStatement.model_validate_json(event.body)
    return judging.open_appeal(
        turn, signed=SignedAppeal(appeal=appeal, owner=event.actor, signature=event.signature.hex())
    )


def _cut(turn: Hearing, event: Event) -> object:
    trainers = set(turn.params.trainers)
    nodes = [row.node for row in list_nodes(turn.connection) if {row.node, row.owner} & trainers]
    return batching.cut_batch(turn, node=_find_trainer(turn, nodes), step=event.content["step"])


def _publish(turn: Hearing, event: Event) -> object:
    signed = SignedVersion(version=VersionStatement.model_validate_json(event.body), signature=event.signature.hex())
    return batching.publish_version(turn, node=event.actor, signed=signed)


def _move_bond(turn: Hearing, event: Event) -> object:
    if event.content["state"] == "waiting":
        raise AuthError(403, "nobody", "its owner did not ask for it")
    return crediting.release_bonds(turn)


def _unbond(turn: Hearing, event: Event) -> object:
    unbond = UnbondStatement.model_validate_json(event.body)
    return crediting.unbond_stake(
        turn, signed=SignedUnbond(unbond=unbond, owner=event.actor, signature=event.signature.hex())
    )


def _redeem(turn: Hearing, event: Event) -> object:
    redeem = RedeemStatement.model_validate_json(event.body)
    return crediting.request_redeem(
        turn, signed=SignedRedeem(redeem=redeem, owner=event.actor, signature=event.signature.hex())
    )


def _command(turn: Hearing, event: Event) -> object:
    signed = SignedCommand(command=Command.model_validate_json(event.body), signature=event.signature.hex())
    return commanding.run_command(turn, signed=signed)


def _unban(turn: Hearing, event: Event) -> object:
    """The operator's word, or the first that follows from an appeal which is right when its time is over."""
    return _command(turn, event) if event.signature else judging.expire_opinions(turn)


def _start(turn: Hearing, event: Event) -> object:
    """How long the coordinator was away it says itself; not longer than it wrote nothing."""
    shift_ms = event.content["shift_ms"]
    if type(shift_ms) is not int or not 0 <= shift_ms <= turn.now_ms - turn.last_ms:
        raise AuthError(409, "away", "deadlines may move by the time since the event before, and not by more")
    return turn.append(Kind.COORDINATOR_UP, "", {"shift_ms": shift_ms})


def _drop_blobs(turn: Hearing, event: Event) -> None:
    """Whether a file was needed still cannot be said later; that it was one of a decided submission can."""
    blobs: list[Any] = event.content["blobs"]
    for blob in blobs:
        if not any(row.decided_ms and not row.dropped for row in list_with_blob(turn.connection, blob)):
            raise AuthError(409, "blob", f"the file {str(blob)[:16]} is not one of a decided submission")
    sweeping.record_drop(turn, blobs=blobs)


def _find_trainer(turn: Hearing, nodes: list[str]) -> str:
    """One of some nodes that could ask for a batch now."""
    refusal = AuthError(403, "nobody", "no node was there that could ask for it")
    for node in nodes:
        try:
            return require_trainer(turn, node).node.node
        except AuthError as error:
            refusal = error
    raise refusal


_STATED = (_commit, _judge, _appeal, _publish, _redeem, _unbond, _command)
"""Decisions about what somebody else says: it stands in the ledger with that signature."""
_CASES: dict[Kind, Case] = {
    Kind.PARAMS: _command,
    Kind.ADMIN: _command,
    Kind.COORDINATOR_UP: _start,
    Kind.COORDINATOR_DOWN: lambda turn, event: membership.record_stop(turn),
    Kind.NODE_JOIN: _join,
    Kind.NODE_DELEGATE: _join,
    Kind.NODE_REVOKE: _revoke,
    Kind.NODE_STANDING: lambda turn, event: membership.lift_limits(turn),
    Kind.NODE_LEAVE: _leave,
    Kind.LEASE_GRANT: _grant,
    Kind.LEASE_END: _end_lease,
    Kind.SUB_COMMIT: _commit,
    Kind.SUB_RECEIPT: _receive,
    Kind.SUB_OUTCOME: lambda turn, event: judging.expire_opinions(turn),
    Kind.VAL_CLAIM: _claim,
    Kind.VAL_VERDICT: _judge,
    Kind.VAL_LAPSE: lambda turn, event: queueing.expire_claims(turn),
    Kind.BATCH_CUT: _cut,
    Kind.VERSION_PUBLISH: _publish,
    Kind.BLOB_DROP: _drop_blobs,
    Kind.CREDIT_POST: lambda turn, event: crediting.release_holds(turn),
    Kind.STAKE_REQUEST: _unbond,
    Kind.STAKE_UNBOND: _move_bond,
    Kind.BAN: _command,
    Kind.UNBAN: _unban,
    Kind.APPEAL: _appeal,
    Kind.CANARY_SEAL: _command,
    Kind.CANARY_REVEAL: _command,
    Kind.REDEEM_REQUEST: _redeem,
    Kind.REDEEM_DONE: _command,
    Kind.REDEEM_FAILED: _command,
}
"""Kinds that are not here only follow: steps that a version opens, slashes, doubts about a verdict, grades."""
