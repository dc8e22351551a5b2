"""Claims: who judges what. At least once: a claim that is not fulfilled in time goes to somebody else.

A validator that claims and does not judge cannot sink what it claimed: others are asked, and it may not judge for a
while when it did so too often in a row.
"""

from shoal.swarm.callers import Rows, require_validator
from shoal.swarm.event import Kind
from shoal.swarm.messages import ClaimAnswer, Job, Manifest, Standing, SubmissionState
from shoal.swarm.rows import read_event
from shoal.swarm.state.nodes import find_node, find_owner
from shoal.swarm.state.queue import JobRow, find_claimed, find_job, find_lapse, find_next, list_lapsed
from shoal.swarm.state.steps import find_step
from shoal.swarm.state.submissions import SubmissionRow, find_submission, list_duplicates
from shoal.swarm.turn import Turn

MAX_AT_ONCE = 64
_RETRY_S = 2


def claim_job(turn: Turn, *, node: str) -> ClaimAnswer:
    """The submission that a validator judges next; the one it has claimed already, if any."""
    job = take_job(turn, node=node)
    if job is None:
        return ClaimAnswer(job=None, retry_after_s=_RETRY_S)
    return ClaimAnswer(job=_describe_job(turn, job))


def take_job(turn: Turn, *, node: str) -> JobRow | None:
    """What a validator has claimed, and claims now if it had nothing."""
    while expire_claims(turn):  # those whose time is over though nobody has looked since
        pass
    caller = require_validator(turn, node)
    return find_claimed(turn.connection, node, turn.now_ms) or _claim_next(turn, caller)


def holds_claim(turn: Turn, job: JobRow, caller: Rows) -> bool:
    """Whether a validator may judge: it has the claim, or had it and nobody else has it now."""
    if job.state != "queued":
        return False
    node, owner = caller.node.node, caller.owner.owner
    return node == (job.validator or find_lapse(turn.connection, job.submission, owner, job.round))


def expire_claims(turn: Turn) -> bool:
    """End claims that passed their deadline; whether there may be more."""
    lapsed = list_lapsed(turn.connection, turn.now_ms, MAX_AT_ONCE)
    for job in lapsed:
        _lapse_claim(turn, job)
    return len(lapsed) == MAX_AT_ONCE


def _lapse_claim(turn: Turn, job: JobRow) -> None:
    node = find_node(turn.connection, job.validator)
    assert node is not None, "a claim is of a node"
    body = {"owner": node.owner, "round": job.round, "validator": job.validator}
    turn.append(Kind.VAL_LAPSE, job.submission, body)
    owner = find_owner(turn.connection, node.owner)
    assert owner is not None, "a node has an owner"
    if owner.lapses >= turn.params.limit_lapses and owner.standing not in (Standing.LIMITED, Standing.BANNED):
        reason = f"let {owner.lapses} claims in a row lapse"
        turn.append(Kind.NODE_STANDING, owner.owner, {"reason": reason, "standing": Standing.LIMITED.value})


def _claim_next(turn: Turn, caller: Rows) -> JobRow | None:
    node, owner = caller.node.node, caller.owner.owner
    job = find_next(turn.connection, node, owner, turn.params.max_claims)
    if job is None:
        return None
    deadline_ms = turn.now_ms + 1000 * turn.params.claim_s
    body = {"deadline_ms": deadline_ms, "owner": job.owner, "round": job.round, "validator": node}
    turn.append(Kind.VAL_CLAIM, job.submission, body)
    return find_job(turn.connection, job.submission)


def _describe_job(turn: Turn, job: JobRow) -> Job:
    submission = find_submission(turn.connection, job.submission)
    assert submission is not None, "a job has a submission"
    step = find_step(turn.connection, submission.step)
    assert step is not None, "a submission is of a step that was opened"
    owner = find_owner(turn.connection, submission.owner)
    assert owner is not None, "a submission has an owner"
    standing = Standing.PROBATION if job.round > 1 or job.appeal else Standing(owner.standing)
    return Job(
        submission=job.submission,
        round=job.round,
        step=submission.step,
        first=submission.first,
        count=submission.count,
        group_size=turn.params.group_size,
        max_tokens=turn.params.max_tokens,
        beacon=step.beacon,
        version=submission.version,
        manifest=_read_manifest(turn, submission),
        check_ppm=turn.params.check_share(standing),
        check_seed=turn.setting.chain.draw_check(job.submission, submission.blob),
        duplicates=_find_copies(turn, job.submission),
        deadline_ms=job.deadline_ms,
    )


def _find_copies(turn: Turn, submission: str) -> tuple[int, ...]:
    """Rollouts that accepted work had before. Who only announced them, or handed in rubbish, has no claim to them."""
    rows = list_duplicates(turn.connection, submission)
    return tuple(row.place for row in rows if row.rival_state == SubmissionState.ACCEPTED)


def _read_manifest(turn: Turn, submission: SubmissionRow) -> Manifest:
    """As it was committed."""
    event = read_event(turn.connection, int(submission.submission[1:]))
    assert event is not None, "it was committed before it was received"
    return Manifest.model_validate_json(event.body)
