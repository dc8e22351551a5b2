"""Submissions: a signed manifest first, then the file, then a receipt.

Invariants:
- what is promised is in the ledger before anything is uploaded, so nobody can copy what is seen on the way;
- of several holders of a span the first whose file is whole delivers it; the others are told, and not blamed;
- a rollout that somebody handed in before is found by its hash, and is held against the later one only. Whether two
  rollouts are equal by chance their tokens do not say, so that is for validators, who see how likely they are.
"""

from shoal.swarm.callers import require_member
from shoal.swarm.delegation import Scope
from shoal.swarm.ending import drop_upload, end_lease
from shoal.swarm.event import Kind, encode_body
from shoal.swarm.messages import (
    CommitAnswer,
    Manifest,
    Receipt,
    ReceiptAnswer,
    SignedManifest,
    SubmissionState,
)
from shoal.swarm.refusal import AuthError
from shoal.swarm.rows import read_event
from shoal.swarm.rules.age import is_allowed
from shoal.swarm.rules.deadline import upload_time
from shoal.swarm.state.leases import LeaseRow, find_lease, list_on_span
from shoal.swarm.state.spans import find_span
from shoal.swarm.state.steps import find_step, newest_version
from shoal.swarm.state.submissions import (
    SubmissionRow,
    find_of_lease,
    find_submission,
    list_rivals,
    list_unsent,
    list_with_blob,
)
from shoal.swarm.tags import Tag
from shoal.swarm.turn import Turn

MAX_AT_ONCE = 64


def commit_manifest(turn: Turn, *, node: str, signed: SignedManifest) -> CommitAnswer:
    """Record what a node will upload; the same manifest again gets the first answer."""
    require_member(turn, node, Scope.WORK)
    manifest = signed.manifest
    lease = find_lease(turn.connection, manifest.lease)
    if lease is None or lease.node != node:
        raise AuthError(404, "unknown_lease", "this node has no such lease")
    earlier = find_of_lease(turn.connection, lease.lease)
    if earlier is not None:
        return _repeat_commit(turn, earlier, manifest)
    statement = turn.open_message(node, manifest, signed.signature)
    _check_lease(turn, lease, manifest.fence)
    _check_manifest(turn, lease, manifest)
    event = turn.record(statement)
    submission = find_submission(turn.connection, f"s{event.seq}")
    assert submission is not None, "it was committed"
    return _answer_commit(turn, submission)


def plan_upload(turn: Turn, *, node: str, submission: str, past_us: bool = False) -> SubmissionRow | ReceiptAnswer:
    """The submission whose file may come now, or its receipt if it came already."""
    require_member(turn, node)
    row = _find_own(turn, node, submission)
    if row.received_ms:
        return _answer_receipt(turn, row)
    _check_awaited(row)
    if past_us and len(list_with_blob(turn.connection, row.blob)) > 1:
        # That the blob is there says nothing about who has it.
        raise AuthError(
            409, "upload_here", "somebody handed in the same file; upload yours here, so that we see you have it"
        )
    return row


def record_receipt(turn: Turn, *, node: str, submission: str) -> ReceiptAnswer:
    """The file is in the store."""
    require_member(turn, node)
    row = _find_own(turn, node, submission)
    if row.received_ms:
        return _answer_receipt(turn, row)
    _check_awaited(row)
    body = {"blob": row.blob, "first": row.first, "lease": row.lease, "owner": row.owner, "size": row.size}
    turn.append(Kind.SUB_RECEIPT, submission, {**body, "step": row.step})
    _end_rivals(turn, row)
    return _answer_receipt(turn, _find_own(turn, node, submission))


def expire_uploads(turn: Turn) -> bool:
    """Give up files that did not come in time; whether there may be more."""
    late = list_unsent(turn.connection, turn.now_ms, MAX_AT_ONCE)
    for submission in late:
        drop_upload(turn, submission, SubmissionState.UNSENT, blame=True)
    return len(late) == MAX_AT_ONCE


def refuse_busy() -> AuthError:
    """What a node hears whose file is being removed, for it is the same that somebody handed in long ago."""
    return AuthError(503, "busy", "the store is busy with this file; try again soon", retry_after_s=1)


def refuse_absent() -> AuthError:
    """What a node hears that asks for a receipt too early."""
    return AuthError(409, "no_file", "the file is not here; upload it first", retry_after_s=1)


def _find_own(turn: Turn, node: str, submission: str) -> SubmissionRow:
    row = find_submission(turn.connection, submission)
    if row is None or row.node != node:
        raise AuthError(404, "unknown_submission", "this node has no such submission")
    return row


def _check_awaited(row: SubmissionRow) -> None:
    if row.state != SubmissionState.COMMITTED:
        raise AuthError(410, row.state, f"this submission is {row.state}: its file is no longer awaited")


def _check_lease(turn: Turn, lease: LeaseRow, fence: int) -> None:
    """Refuse what comes under a lease that does not hold any more."""
    span = find_span(turn.connection, lease.step, lease.first)
    step = find_step(turn.connection, lease.step)
    assert span is not None and step is not None, "a lease is of a span of a step"
    if fence != lease.fence:
        raise AuthError(409, "fence", "not the fence of this lease")
    if span.state in ("delivered", "accepted") or step.state != "open":
        raise AuthError(409, "superseded", "somebody else delivered these groups first; nothing is held against you")
    if lease.state == "active":
        return
    if lease.state != "expired":
        raise AuthError(410, "lease_ended", f"this lease was {lease.state}")
    is_late = turn.now_ms > lease.ended_ms + 1000 * turn.params.late_s
    if is_late and span.state != "offered":
        raise AuthError(410, "lease_ended", "this lease expired and somebody else holds its groups now")


def _check_manifest(turn: Turn, lease: LeaseRow, manifest: Manifest) -> None:
    """Refuse a manifest that no file could fulfil."""
    params = turn.params
    if len(manifest.rollouts) != lease.count * params.group_size:
        raise AuthError(
            400, "rollouts", f"a lease of {lease.count} groups has {lease.count * params.group_size} rollouts"
        )
    if any(not 1 <= rollout.tokens <= params.max_tokens for rollout in manifest.rollouts):
        raise AuthError(400, "tokens", f"a rollout has 1 to {params.max_tokens} tokens")
    if not 1 <= manifest.size <= params.blob_max_bytes:
        raise AuthError(413, "too_large", f"a file has 1 to {params.blob_max_bytes} bytes")
    newest = newest_version(turn.connection)
    if manifest.version > newest or not is_allowed(lease.step, manifest.version, params.async_level):
        raise AuthError(
            409, "version", f"step {lease.step} takes no rollouts of v{manifest.version}; v{newest} is newest"
        )
    for other in list_with_blob(turn.connection, manifest.blob):
        if (other.step, other.first) != (lease.step, lease.first):
            raise AuthError(409, "blob_known", "this file was handed in for other groups")


def _repeat_commit(turn: Turn, earlier: SubmissionRow, manifest: Manifest) -> CommitAnswer:
    event = read_event(turn.connection, int(earlier.submission[1:]))
    if event is not None and event.body != encode_body(manifest.model_dump(mode="json")):
        raise AuthError(409, "committed", f"another manifest was committed for this lease, as {earlier.submission}")
    return _answer_commit(turn, earlier)


def _end_rivals(turn: Turn, delivered: SubmissionRow) -> None:
    """Others who hold the span need not go on."""
    for lease in list_on_span(turn.connection, delivered.step, delivered.first):
        end_lease(turn, lease, "cancelled", "somebody else delivered these groups")
    for rival in list_rivals(turn.connection, delivered.step, delivered.first):
        drop_upload(turn, rival, SubmissionState.SUPERSEDED)


def _answer_commit(turn: Turn, row: SubmissionRow) -> CommitAnswer:
    """As it was the first time; what became of it since, the upload will tell."""
    lease = find_lease(turn.connection, row.lease)
    assert lease is not None, "a submission that a node committed has a lease"
    deadline_ms = row.committed_ms + upload_time(lease.upload_s, row.size, row.count * turn.params.group_size)
    return CommitAnswer(
        submission=row.submission, state=SubmissionState.COMMITTED, size=row.size, deadline_ms=deadline_ms
    )


def _answer_receipt(turn: Turn, row: SubmissionRow) -> ReceiptAnswer:
    receipt = Receipt(
        run=turn.run,
        submission=row.submission,
        lease=row.lease,
        node=row.node,
        blob=row.blob,
        size=row.size,
        received_ms=row.received_ms,
    )
    return ReceiptAnswer(receipt=receipt, document=turn.sign(Tag.RECEIPT, receipt))
