"""What a validator is asked about a submission: fixed when it claims, so that it can be shown, and done, again.

A claim's event says how much is to be checked and which rollouts are copies. Both depend on what the run knew then: the
owner's standing, the parameters, what had become of others. All else follows from the manifest, the step and the secret
of the beacons.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.swarm.event import Event, Kind
from shoal.swarm.messages import Job, Manifest, Standing, SubmissionState
from shoal.swarm.rows import list_events, read_event
from shoal.swarm.state.history import is_watched
from shoal.swarm.state.judges import find_doubt
from shoal.swarm.state.nodes import find_owner
from shoal.swarm.state.queue import JobRow
from shoal.swarm.state.steps import find_step
from shoal.swarm.state.submissions import SubmissionRow, find_submission, list_duplicates
from shoal.swarm.turn import Turn


def fix_terms(turn: Turn, job: JobRow) -> dict[str, Any]:
    """What a claim of a job fixes about it now, for the claim's event."""
    submission = _find_submission(turn, job.submission)
    owner = find_owner(turn.connection, submission.owner)
    assert owner is not None, "a submission has an owner"
    in_full = job.round > 1 or job.appeal or is_watched(turn.connection, owner.owner)
    standing = Standing.PROBATION if in_full else Standing(owner.standing)
    share = turn.params.check_share(standing, submission.count * turn.params.group_size)
    doubt = None if job.appeal else find_doubt(turn.connection, job.submission)
    if doubt is not None and doubt.check_ppm:  # who is asked too looks at what was looked at, to be held against it
        share = doubt.check_ppm
    return {"check_ppm": share, "duplicates": _list_copies(turn, job.submission)}


def describe_job(turn: Turn, job: JobRow) -> Job:
    """What is asked of who has claimed a job."""
    claims = [*list_events(turn.connection, job.submission, Kind.VAL_CLAIM), *turn.events]
    claim = find_claim(claims, job.submission, job.validator, job.round)
    # One that was made a moment ago, in the same group of decisions, is not on disk yet, and says what it would now.
    terms = fix_terms(turn, job) if claim is None else claim.content
    return tell_job(turn, job.submission, {**terms, "round": job.round, "deadline_ms": job.deadline_ms})


def tell_job(turn: Turn, name: str, terms: Mapping[str, Any]) -> Job:
    """A job by what its claim says."""
    submission = _find_submission(turn, name)
    step = find_step(turn.connection, submission.step)
    assert step is not None, "a submission is of a step that was opened"
    return Job(
        submission=submission.submission,
        round=terms["round"],
        step=submission.step,
        first=submission.first,
        count=submission.count,
        group_size=turn.params.group_size,
        max_tokens=turn.params.max_tokens,
        beacon=step.beacon,
        version=submission.version,
        manifest=_read_manifest(turn, submission),
        check_ppm=terms["check_ppm"],
        check_seed=turn.setting.chain.draw_check(submission.submission, submission.blob),
        duplicates=tuple(terms["duplicates"]),
        deadline_ms=terms["deadline_ms"],
    )


def find_claim(events: Sequence[Event], submission: str, validator: str, number: int) -> Event | None:
    """Of some events the last claim by which a validator was asked for the verdict of a round."""
    for event in reversed(events):
        if (event.kind, event.subject) != (Kind.VAL_CLAIM, submission):
            continue
        if (event.content["validator"], event.content["round"]) == (validator, number):
            return event
    return None


def _find_submission(turn: Turn, name: str) -> SubmissionRow:
    row = find_submission(turn.connection, name)
    assert row is not None, "a job has a submission"
    return row


def _list_copies(turn: Turn, submission: str) -> list[int]:
    """Rollouts that accepted work had before. Who only announced them, or handed in rubbish, has no claim to them."""
    rows = list_duplicates(turn.connection, submission)
    return [row.place for row in rows if row.rival_state == SubmissionState.ACCEPTED]


def _read_manifest(turn: Turn, submission: SubmissionRow) -> Manifest:
    """As it was committed."""
    event = read_event(turn.connection, int(submission.submission[1:]))
    assert event is not None, "it was committed before it was received"
    return Manifest.model_validate_json(event.body)
