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

A file is needed while its submission is expected or judged, while its rejection can be appealed (for a short time if
its form is wrong), and until the step of its batch is trained; and for the challenge window after that. A file that
arrived too late is not needed. While room is short, files of owners without accepted work are kept for `form_keep_s`
only (`rules.storage`). The hash and the verdict stay in the ledger.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from shoal.coordinator.decide.context import Decision, build_from, require_member, require_row
from shoal.coordinator.decide.leases import drop_upload, end_lease, explain_shortage
from shoal.coordinator.rules.leases import upload_time
from shoal.coordinator.rules.storage import appeal_time, find_patience
from shoal.coordinator.state import submissions
from shoal.coordinator.state.leases import LeaseRow, find_lease, find_range, list_on_range
from shoal.coordinator.state.run import count_away, find_step
from shoal.coordinator.state.storage import find_total_room
from shoal.identity.delegation import Scope
from shoal.identity.documents import Tag
from shoal.net.api_error import ApiError
from shoal.protocol.events import BlobDrop, SubmissionReceipt
from shoal.protocol.messages import CommitAnswer, Manifest, Receipt, ReceiptAnswer, SignedManifest, SubmissionState
from shoal.protocol.params import is_allowed

MAX_AT_ONCE = 64
MAX_DROPPED = 64
CLEANUP_EVERY_S = 60
MAX_UPLOADS = 64
"""concurrent uploads, unless a store takes fewer or more"""
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
        raise ApiError(409, "superseded", "another node delivered these groups first")
    if lease.state == "active":
        return
    if lease.state != "expired":
        raise ApiError(410, "lease_ended", f"this lease was {lease.state}")
    is_late = decision.now_ms > lease.ended_ms + 1000 * decision.params.late_s
    if is_late and groups.state != "offered":
        raise ApiError(410, "lease_ended", "this lease expired and another node holds its groups now")
    if shortage := explain_shortage(decision, lease.owner, lease.file_bytes):  # its room was released
        raise ApiError(410, "room", shortage)


def _check_manifest(decision: Decision, lease: LeaseRow, manifest: Manifest) -> None:
    """Reject a manifest that no valid file can match."""
    params = decision.params
    if len(manifest.rollouts) != lease.count * params.group_size:
        raise ApiError(
            400, "rollouts", f"a lease of {lease.count} groups needs {lease.count * params.group_size} rollouts"
        )
    if any(not 1 <= rollout.tokens <= params.max_tokens for rollout in manifest.rollouts):
        raise ApiError(400, "tokens", f"invalid rollout length: must be 1 to {params.max_tokens} tokens")
    if not 1 <= manifest.size <= lease.file_bytes:
        raise ApiError(
            413, "too_large", f"invalid file size: a lease of {lease.count} groups has at most {lease.file_bytes} bytes"
        )
    if manifest.version != lease.version:
        raise ApiError(409, "version", f"the lease is for rollouts of v{lease.version}, not of v{manifest.version}")
    assert is_allowed(lease.step, lease.version, params.async_level), "checked when the lease was granted"
    for other in submissions.list_with_blob(decision.connection, manifest.blob):
        if (other.step, other.first) != (lease.step, lease.first):
            raise ApiError(409, "blob_known", "this file was already submitted for other groups")


def _end_rivals(decision: Decision, delivered: submissions.SubmissionRow) -> None:
    """End the leases and uploads of other holders of the same groups; earlier ones were replaced by their backup."""
    fence = _find_fence(decision, delivered)
    for lease in list_on_range(decision.connection, delivered.step, delivered.first):
        is_replaced = lease.fence < fence
        end_lease(decision, lease, "cancelled", "another worker delivered these groups", is_replaced=is_replaced)
    for rival in submissions.list_rivals(decision.connection, delivered.step, delivered.first):
        drop_upload(decision, rival, SubmissionState.SUPERSEDED, is_replaced=_find_fence(decision, rival) < fence)


def _find_fence(decision: Decision, row: submissions.SubmissionRow) -> int:
    return require_row(find_lease(decision.connection, row.lease), "every submission has a lease").fence


def _answer_commit(decision: Decision, row: submissions.SubmissionRow) -> CommitAnswer:
    """The same answer as the first time; the upload reports later changes."""
    lease = require_row(find_lease(decision.connection, row.lease), "a committed submission has a lease")
    deadline_ms = row.committed_ms + upload_time(lease.upload_s, row.size, row.count * decision.params.group_size)
    return build_from(CommitAnswer, row, state=SubmissionState.COMMITTED, deadline_ms=deadline_ms)


def _answer_receipt(decision: Decision, row: submissions.SubmissionRow) -> ReceiptAnswer:
    receipt = build_from(Receipt, row, run=decision.run)
    return ReceiptAnswer(receipt=receipt, document=decision.sign(Tag.RECEIPT, receipt))


class BlobGate:
    """Which files are in use: uploaded, or deleted. For one event loop.

    A submission has one upload at a time, an owner a quarter of all uploads, and owners without accepted work together
    half of them: nobody can occupy the uploads that others need.
    """

    def __init__(self, max_uploads: int = MAX_UPLOADS) -> None:
        self._most_own, self._most_new = max(1, max_uploads // 4), max(1, max_uploads // 2)
        self._uploads: dict[str, tuple[submissions.SubmissionRow, bool]] = {}
        self.removals: set[str] = set()
        """files that are being deleted"""

    @contextmanager
    def upload(self, row: submissions.SubmissionRow, *, has_record: bool) -> Iterator[None]:
        """Protect a submission's file from deletion; `ApiError` if it is in use, or others are to be served first."""
        if row.blob in self.removals:
            # The same file was submitted long ago.
            raise ApiError(503, "busy", "the blob store is busy with this file; try again soon", retry_after_s=1)
        if row.submission in self._uploads:
            raise ApiError(503, "busy", "this file is already being uploaded; try again soon", retry_after_s=1)
        num_own = sum(other.owner == row.owner for other, _ in self._uploads.values())
        num_new = sum(not is_known for _, is_known in self._uploads.values())
        if num_own >= self._most_own or (not has_record and num_new >= self._most_new):
            raise ApiError(503, "busy", "too many concurrent uploads of such owners; try again soon", retry_after_s=1)
        self._uploads[row.submission] = row, has_record
        try:
            yield
        finally:
            del self._uploads[row.submission]

    @contextmanager
    def removal(self, blobs: list[str]) -> Iterator[list[str]]:
        """Protect files from being uploaded; yields those that are not being uploaded now."""
        used = {row.blob for row, _ in self._uploads.values()} | self.removals
        taken = [blob for blob in blobs if blob not in used]
        self.removals.update(taken)
        try:
            yield taken
        finally:
            self.removals.difference_update(taken)


def find_unneeded(decision: Decision) -> list[str]:
    """Files to delete."""
    return submissions.list_free_blobs(decision.connection, _find_times(decision), MAX_DROPPED)


def confirm_unneeded(decision: Decision, *, blobs: list[str]) -> list[str]:
    """Those of the files that can still be deleted: the others were committed again meanwhile."""
    times = _find_times(decision)
    return [blob for blob in blobs if submissions.is_free_blob(decision.connection, blob, times)]


def record_drop(decision: Decision, *, blobs: list[str]) -> None:
    """Record that the files are deleted."""
    decision.append("", BlobDrop(blobs=tuple(blobs)))


def _find_times(decision: Decision) -> submissions.KeepTimes:
    params, now_ms = decision.params, decision.now_ms
    kept_ms = now_ms - 1000 * params.challenge_s
    away_ms = count_away(decision.connection, 0)
    form_ms, appealed_ms = (
        now_ms - 1000 * (appeal_time(params, state) + APPEAL_SLACK_S) - away_ms
        for state in (SubmissionState.FORM, SubmissionState.SOFT)
    )
    return submissions.KeepTimes(
        now_ms=now_ms,
        kept_ms=kept_ms,
        form_ms=form_ms,
        appealed_ms=min(kept_ms, appealed_ms),
        patience=find_patience(params, find_total_room(decision.connection).over),
    )
