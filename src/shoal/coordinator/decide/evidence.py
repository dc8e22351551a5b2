"""Evidence for the accused once a submission is decided: each job as its validator got it, each verdict, and the file.

Invariants:
- only the submission's owner sees it, with its own key or one of its nodes', even if it was banned;
- nothing is shown before the submission is decided: an owner that knew which rollouts are checked before its file
  arrived could withhold the file;
- a revealed seed reveals nothing about others. Each is SHA-256 over the secret of the beacons, the submission and its
  file's hash; no length extension of one is another, because all end with a hash of 64 characters.
"""

from shoal.coordinator.decide.claims import find_claim, show_job
from shoal.coordinator.decide.context import Decision
from shoal.coordinator.state.members import find_node, find_owner
from shoal.coordinator.state.run import find_version
from shoal.coordinator.state.submissions import SubmissionRow, find_submission
from shoal.coordinator.state.validators import VerdictRow, list_verdicts
from shoal.identity.documents import Tag
from shoal.ledger.event import EventKind
from shoal.ledger.reader import list_events, read_event
from shoal.net.api_error import ApiError
from shoal.protocol import messages
from shoal.protocol.events import read_body


def show_evidence(decision: Decision, key: str, submission: str) -> messages.EvidenceAnswer:
    """The basis of a submission's judgement, for its owner; signed by the coordinator, to be shown to others."""
    row = _require_decided(decision, key, submission)
    votes = list_verdicts(decision.connection, submission)
    if not votes:
        raise ApiError(409, "not_judged", f"this submission is {row.state} and was not judged")
    pairs = [_describe_round(decision, vote) for vote in votes]
    version = find_version(decision.connection, row.version)
    assert version is not None, "work of an unpublished version is refused"
    evidence = messages.Evidence(
        run=decision.run,
        state=messages.SubmissionState(row.state),
        job=pairs[0][0],
        weights=version.root,
        sittings=tuple(context for _, context in pairs),
    )
    return messages.EvidenceAnswer(
        evidence=evidence,
        verdicts=tuple(_read_verdict(decision, vote) for vote in votes),
        document=decision.sign(Tag.EVIDENCE, evidence),
    )


def allow_evidence(decision: Decision, *, key: str, submission: str) -> str:
    """The name of a submission's file, for its owner."""
    row = _require_decided(decision, key, submission)
    if not row.received_ms:
        raise ApiError(404, "no_file", f"this submission is {row.state}: its file did not arrive")
    if row.dropped:
        raise ApiError(410, "dropped", "the file was deleted; if you have a copy, pass it with --file")
    return row.blob


def _require_decided(decision: Decision, key: str, submission: str) -> SubmissionRow:
    row = find_submission(decision.connection, submission)
    if row is None or row.owner != _find_owner(decision, key):
        raise ApiError(404, "unknown_submission", "this owner has no such submission")
    if row.is_open:
        raise ApiError(409, "undecided", "this submission is not decided yet; the evidence is available afterwards")
    return row


def _find_owner(decision: Decision, key: str) -> str | None:
    """The owner that a key belongs to: the key itself, or its node's owner."""
    node = find_node(decision.connection, key)
    if node is not None:
        return None if node.gone == "revoked" else node.owner
    owner = find_owner(decision.connection, key)
    return None if owner is None else owner.owner


def _describe_round(decision: Decision, vote: VerdictRow) -> tuple[messages.Job, messages.VerdictContext]:
    claims = list_events(decision.connection, vote.submission, EventKind.VAL_CLAIM)
    claim = find_claim(claims, vote.submission, vote.validator, vote.round)
    if claim is None:  # made in the same group of decisions as this request
        raise ApiError(503, "busy", "this was decided a moment ago; try again soon", retry_after_s=1)
    job = show_job(decision, vote.submission, claim, claim.deadline_ms)
    return job, messages.VerdictContext(
        round=vote.round, validator=vote.validator, check_ppm=job.check_ppm, duplicates=job.duplicates, seq=vote.seq
    )


def _read_verdict(decision: Decision, vote: VerdictRow) -> messages.SignedVerdict:
    event = read_event(decision.connection, vote.seq)
    if event is None:
        raise ApiError(503, "busy", "this was decided a moment ago; try again soon", retry_after_s=1)
    return messages.SignedVerdict(verdict=read_body(event, messages.VerdictStatement), signature=event.signature.hex())
