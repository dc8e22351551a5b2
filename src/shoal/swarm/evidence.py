"""What the accused may see once a submission is decided: each job as its validator had it, each verdict, and the file.

Invariants:
- it is shown to the submission's owner alone, by its own key or one of its nodes', and also if it was banned;
- nothing is shown before the submission is decided: who knew which rollouts are checked before its file is there could
  keep the file back;
- a seed that is shown tells nothing of others. Each is SHA-256 over the secret of the beacons, the submission and its
  file's hash; a longer text that begins with one of these is none of them, for all end with a hash of 64 characters.
"""

from shoal.swarm.event import Kind
from shoal.swarm.jobs import find_claim, tell_job
from shoal.swarm.messages import (
    Evidence,
    EvidenceAnswer,
    Job,
    SignedVerdict,
    Sitting,
    SubmissionState,
    VerdictStatement,
)
from shoal.swarm.refusal import AuthError
from shoal.swarm.rows import list_events, read_event
from shoal.swarm.state.nodes import find_node, find_owner
from shoal.swarm.state.steps import find_version
from shoal.swarm.state.submissions import SubmissionRow, find_submission
from shoal.swarm.state.verdicts import VerdictRow, list_verdicts
from shoal.swarm.tags import Tag
from shoal.swarm.turn import Turn


def show_evidence(turn: Turn, *, key: str, submission: str) -> EvidenceAnswer:
    """All by which a submission was judged, for its owner; with the coordinator's signature, to be shown to others."""
    row = _require_decided(turn, key, submission)
    votes = list_verdicts(turn.connection, submission)
    if not votes:
        raise AuthError(409, "not_judged", f"this submission is {row.state}, and nobody judged it")
    pairs = [_tell_sitting(turn, vote) for vote in votes]
    version = find_version(turn.connection, row.version)
    assert version is not None, "work of a version that is not out is refused"
    evidence = Evidence(
        run=turn.run,
        state=SubmissionState(row.state),
        job=pairs[0][0],
        weights=version.root,
        sittings=tuple(sitting for _, sitting in pairs),
    )
    return EvidenceAnswer(
        evidence=evidence,
        verdicts=tuple(_read_verdict(turn, vote) for vote in votes),
        document=turn.sign(Tag.EVIDENCE, evidence),
    )


def allow_evidence(turn: Turn, *, key: str, submission: str) -> str:
    """The name of a submission's file, for its owner."""
    row = _require_decided(turn, key, submission)
    if not row.received_ms:
        raise AuthError(404, "no_file", f"this submission is {row.state}: its file did not come")
    if row.dropped:
        raise AuthError(410, "dropped", "the file is not kept any more; who has it may say so with --file")
    return row.blob


def _require_decided(turn: Turn, key: str, submission: str) -> SubmissionRow:
    row = find_submission(turn.connection, submission)
    if row is None or row.owner != _find_owner(turn, key):
        raise AuthError(404, "unknown_submission", "this owner has no such submission")
    if row.is_open:
        raise AuthError(409, "undecided", "this submission is not decided; by what it is judged is shown afterwards")
    return row


def _find_owner(turn: Turn, key: str) -> str | None:
    """The owner that a key speaks for: its own, or its node's."""
    node = find_node(turn.connection, key)
    if node is not None:
        return None if node.gone == "revoked" else node.owner
    owner = find_owner(turn.connection, key)
    return None if owner is None else owner.owner


def _tell_sitting(turn: Turn, vote: VerdictRow) -> tuple[Job, Sitting]:
    claims = list_events(turn.connection, vote.submission, Kind.VAL_CLAIM)
    claim = find_claim(claims, vote.submission, vote.validator, vote.round)
    if claim is None:  # of the same group of decisions as this question
        raise AuthError(503, "busy", "this was decided a moment ago; try again soon", retry_after_s=1)
    job = tell_job(turn, vote.submission, claim.content)
    return job, Sitting(
        round=vote.round, validator=vote.validator, check_ppm=job.check_ppm, duplicates=job.duplicates, seq=vote.seq
    )


def _read_verdict(turn: Turn, vote: VerdictRow) -> SignedVerdict:
    event = read_event(turn.connection, vote.seq)
    if event is None:
        raise AuthError(503, "busy", "this was decided a moment ago; try again soon", retry_after_s=1)
    return SignedVerdict(verdict=VerdictStatement.model_validate_json(event.body), signature=event.signature.hex())
