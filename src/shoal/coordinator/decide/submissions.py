"""Submissions: a signed manifest first, then the file, then a receipt; and the deletion of files that are not needed.

Invariants:
- the manifest is in the ledger before anything is uploaded, so nobody can copy a file seen in transit;
- of several holders of a range of groups, the first with a complete file delivers it; the others are not blamed;
- a rollout that was submitted before is found by its hash, and only the later submission is blamed. The tokens alone do
  not show whether two rollouts are equal by chance; validators decide that, because they see their probability;
- a file is deleted before that is recorded: a kill in between leaves a file that is deleted again, never one that the
  tables forgot;
- while a file is being deleted no upload of the same file starts, and while one is uploaded it is not deleted. Both are
  decided in the coordinator's event loop.

A file is needed while its submission is expected or judged, while its rejection can be appealed, and until the step of
its batch is trained; and for the challenge window after that.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.coordinator.decide.context import Decision, build_from, require_member, require_row
from shoal.coordinator.decide.leases import drop_upload, end_lease
from shoal.coordinator.rules.leases import upload_time
from shoal.coordinator.state import submissions
from shoal.coordinator.state.leases import LeaseRow, find_lease, find_range, list_on_range
from shoal.coordinator.state.run import count_away, find_step
from shoal.identity.delegation import Scope
from shoal.identity.documents import Tag
from shoal.net.api_error import ApiError
from shoal.protocol.events import BlobDrop, SubmissionReceipt
from shoal.protocol.messages import CommitAnswer, Manifest, Receipt, ReceiptAnswer, SignedManifest, SubmissionState
from shoal.protocol.params import is_allowed

MAX_AT_ONCE = 64
MAX_DROPPED = 64
CLEANUP_EVERY_S = 60
APPEAL_SLACK_S = 120
"""after the end of the time to appeal: a restart may move that end by up to a minute that was not recorded"""


def commit_manifest(decision: Decision, node: str, signed: SignedManifest) -> CommitAnswer:
    """Record the manifest of an upload; the same manifest again gets the first answer."""
    require_member(decision, node, Scope.WORK)
    manifest = signed.manifest
    lease = find_lease(decision.connection, manifest.lease)
    if lease is None or lease.node != node:
        raise ApiError(404, "unknown_lease", "this node has no such lease")
    earlier = submissions.find_of_lease(decision.connection, lease.lease)
    if earlier is not None:
        if not decision.is_recorded(int(earlier.submission[1:]), manifest):
            raise ApiError(409, "committed", f"a different manifest was committed for this lease: {earlier.submission}")
        return _answer_commit(decision, earlier)
    statement = decision.open_message(node, manifest, signed.signature)
    _check_lease(decision, lease, manifest.fence)
    _check_manifest(decision, lease, manifest)
    event = decision.record(statement)
    submission = require_row(submissions.find_submission(decision.connection, f"s{event.seq}"), "committed above")
    return _answer_commit(decision, submission)


def plan_upload(
    decision: Decision, *, node: str, submission: str, past_us: bool = False
) -> submissions.SubmissionRow | ReceiptAnswer:
    """The submission whose file may be uploaded now, or its receipt if the file has already arrived."""
    require_member(decision, node)
    row = _find_own(decision, node, submission)
    if row.received_ms:
        return _answer_receipt(decision, row)
    if row.state != SubmissionState.COMMITTED:
        raise ApiError(410, row.state, f"this submission is {row.state}: its file is no longer expected")
    if past_us and len(submissions.list_with_blob(decision.connection, row.blob)) > 1:
        # That the blob exists does not prove that this node has it.
        raise ApiError(
            409, "upload_here", "the same file was submitted before; upload yours here to prove that you have it"
        )
    return row


def record_receipt(decision: Decision, *, node: str, submission: str) -> ReceiptAnswer:
    """Record that the file is in the store."""
    row = plan_upload(decision, node=node, submission=submission)
    if isinstance(row, ReceiptAnswer):
        return row
    decision.append(submission, build_from(SubmissionReceipt, row))
    _end_rivals(decision, row)
    return _answer_receipt(decision, _find_own(decision, node, submission))


def expire_uploads(decision: Decision) -> bool:
    """Give up files that did not arrive in time; return whether more may remain."""
    late = submissions.list_unsent(decision.connection, decision.now_ms, MAX_AT_ONCE)
    for submission in late:
        drop_upload(decision, submission, SubmissionState.UNSENT, blame=True)
    return len(late) == MAX_AT_ONCE


def _find_own(decision: Decision, node: str, submission: str) -> submissions.SubmissionRow:
    row = submissions.find_submission(decision.connection, submission)
    if row is None or row.node != node:
        raise ApiError(404, "unknown_submission", "this node has no such submission")
    return row


def _check_lease(decision: Decision, lease: LeaseRow, fence: int) -> None:
    """Reject a manifest whose lease is no longer valid."""
    groups = find_range(decision.connection, lease.step, lease.first)
    step = find_step(decision.connection, lease.step)
    assert groups is not None and step is not None, "every lease has a range of a step"
    if fence != lease.fence:
        raise ApiError(409, "fence", "wrong fence for this lease")
    if groups.state in ("delivered", "accepted") or step.state != "open":
        raise ApiError(409, "superseded", "another node delivered these groups first; this has no penalty")
    if lease.state == "active":
        return
    if lease.state != "expired":
        raise ApiError(410, "lease_ended", f"this lease was {lease.state}")
    is_late = decision.now_ms > lease.ended_ms + 1000 * decision.params.late_s
    if is_late and groups.state != "offered":
        raise ApiError(410, "lease_ended", "this lease expired and another node holds its groups now")


def _check_manifest(decision: Decision, lease: LeaseRow, manifest: Manifest) -> None:
    """Reject a manifest that no valid file can match."""
    params = decision.params
    if len(manifest.rollouts) != lease.count * params.group_size:
        raise ApiError(
            400, "rollouts", f"a lease of {lease.count} groups needs {lease.count * params.group_size} rollouts"
        )
    if any(not 1 <= rollout.tokens <= params.max_tokens for rollout in manifest.rollouts):
        raise ApiError(400, "tokens", f"invalid rollout length: must be 1 to {params.max_tokens} tokens")
    if not 1 <= manifest.size <= params.blob_max_bytes:
        raise ApiError(413, "too_large", f"invalid file size: must be 1 to {params.blob_max_bytes} bytes")
    if manifest.version != lease.version:
        raise ApiError(409, "version", f"the lease is for rollouts of v{lease.version}, not of v{manifest.version}")
    assert is_allowed(lease.step, lease.version, params.async_level), "checked when the lease was granted"
    for other in submissions.list_with_blob(decision.connection, manifest.blob):
        if (other.step, other.first) != (lease.step, lease.first):
            raise ApiError(409, "blob_known", "this file was already submitted for other groups")


def _end_rivals(decision: Decision, delivered: submissions.SubmissionRow) -> None:
    """End the leases and uploads of other holders of the same groups."""
    for lease in list_on_range(decision.connection, delivered.step, delivered.first):
        end_lease(decision, lease, "cancelled", "somebody else delivered these groups")
    for rival in submissions.list_rivals(decision.connection, delivered.step, delivered.first):
        drop_upload(decision, rival, SubmissionState.SUPERSEDED)


def _answer_commit(decision: Decision, row: submissions.SubmissionRow) -> CommitAnswer:
    """The same answer as the first time; the upload reports later changes."""
    lease = require_row(find_lease(decision.connection, row.lease), "a committed submission has a lease")
    deadline_ms = row.committed_ms + upload_time(lease.upload_s, row.size, row.count * decision.params.group_size)
    return build_from(CommitAnswer, row, state=SubmissionState.COMMITTED, deadline_ms=deadline_ms)


def _answer_receipt(decision: Decision, row: submissions.SubmissionRow) -> ReceiptAnswer:
    receipt = build_from(Receipt, row, run=decision.run)
    return ReceiptAnswer(receipt=receipt, document=decision.sign(Tag.RECEIPT, receipt))


class BlobGate:
    """Which files are in use: several concurrent uploads, or one deletion. For one event loop."""

    def __init__(self) -> None:
        self._uploads: Counter[str] = Counter()
        self._removals: set[str] = set()

    @contextmanager
    def upload(self, blob: str) -> Iterator[None]:
        """Protect a file from deletion; `ApiError` if it is being deleted."""
        if blob in self._removals:
            # The same file was submitted long ago.
            raise ApiError(503, "busy", "the blob store is busy with this file; try again soon", retry_after_s=1)
        self._uploads[blob] += 1
        try:
            yield
        finally:
            self._uploads[blob] -= 1
            if not self._uploads[blob]:
                del self._uploads[blob]

    @contextmanager
    def removal(self, blobs: list[str]) -> Iterator[list[str]]:
        """Protect files from being uploaded; yields those that are not being uploaded now."""
        taken = [blob for blob in blobs if blob not in self._uploads and blob not in self._removals]
        self._removals.update(taken)
        try:
            yield taken
        finally:
            self._removals.difference_update(taken)


def find_unneeded(decision: Decision) -> list[str]:
    """Files to delete."""
    kept_ms, appealed_ms = _find_times(decision)
    return submissions.list_free_blobs(decision.connection, kept_ms, appealed_ms, MAX_DROPPED)


def confirm_unneeded(decision: Decision, *, blobs: list[str]) -> list[str]:
    """Those of the files that can still be deleted: the others were committed again meanwhile."""
    kept_ms, appealed_ms = _find_times(decision)
    return [blob for blob in blobs if submissions.is_free_blob(decision.connection, blob, kept_ms, appealed_ms)]


def record_drop(decision: Decision, *, blobs: list[str]) -> None:
    """Record that the files are deleted."""
    decision.append("", BlobDrop(blobs=tuple(blobs)))


def _find_times(decision: Decision) -> tuple[int, int]:
    params, now_ms = decision.params, decision.now_ms
    kept_ms = now_ms - 1000 * params.challenge_s
    appealed_ms = now_ms - 1000 * (params.appeal_s + APPEAL_SLACK_S) - count_away(decision.connection, 0)
    return kept_ms, min(kept_ms, appealed_ms)
