"""Claims: who judges what. At least once: a claim that is not fulfilled in time goes to somebody else.

A validator that claims and does not judge cannot sink what it claimed: others are asked, and it may not judge for a
while when it did so too often in a row. It may have a few claims at once, of one version, for they are cheaper to judge
together; each is a decision of its own, has a deadline of its own and ends by a verdict of its own.
"""

from shoal.swarm.callers import Rows, require_validator
from shoal.swarm.event import Kind
from shoal.swarm.jobs import describe_job, fix_terms
from shoal.swarm.messages import MAX_JOBS, ClaimAnswer, Standing
from shoal.swarm.state.nodes import find_node, find_owner
from shoal.swarm.state.queue import (
    JobRow,
    count_ready,
    find_job,
    find_lapse,
    find_like,
    find_next,
    list_barred,
    list_claimed,
    list_lapsed,
)
from shoal.swarm.state.submissions import find_submission
from shoal.swarm.turn import Turn

MAX_AT_ONCE = 64
_RETRY_S = 2


def claim_jobs(turn: Turn, *, node: str, most: int = 1) -> ClaimAnswer:
    """The submissions that a validator judges next; those it has claimed already, if any.

    Not more than half of what waits, so that others find work too.
    """
    held = _list_held(turn, node)
    if not held:
        room = min(most, MAX_JOBS, -(-count_ready(turn.connection, 2 * MAX_JOBS) // 2))
        while len(held) < max(room, 1) and (job := take_job(turn, node=node)):
            held.append(job)
    if not held:
        return ClaimAnswer(retry_after_s=_RETRY_S)
    return ClaimAnswer(jobs=tuple(describe_job(turn, job) for job in held))


def take_job(turn: Turn, *, node: str) -> JobRow | None:
    """What a validator claims now: the job whose turn it is; beside what it holds, another of the same version."""
    held = _list_held(turn, node)
    caller = require_validator(turn, node)
    job = _find_more(turn, caller, held) if held else _find_next(turn, caller)
    if job is None:
        return None
    deadline_ms = turn.now_ms + 1000 * turn.params.claim_s
    body = {"deadline_ms": deadline_ms, "owner": job.owner, "round": job.round, "validator": node}
    turn.append(Kind.VAL_CLAIM, job.submission, {**body, **fix_terms(turn, job)})
    return find_job(turn.connection, job.submission)


def holds_claim(turn: Turn, job: JobRow, caller: Rows) -> bool:
    """Whether a validator may judge: it has the claim, or had it and nobody else has it now."""
    if job.state != "queued":
        return False
    node, owner = caller.node.node, caller.owner.owner
    return node == (job.validator or find_lapse(turn.connection, job.submission, owner, job.round))


def expire_claims(turn: Turn) -> bool:
    """End claims that passed their deadline, and those of who may judge no more; whether there may be more."""
    lapsed = list_lapsed(turn.connection, turn.now_ms, MAX_AT_ONCE)
    for job in lapsed:
        _lapse_claim(turn, job)
    barred = list_barred(turn.connection, MAX_AT_ONCE)  # or the run would wait for what nobody may say
    for job in barred:
        _lapse_claim(turn, job)
    return MAX_AT_ONCE in (len(lapsed), len(barred))


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


def _list_held(turn: Turn, node: str) -> list[JobRow]:
    """What a validator has claimed and may still judge."""
    while expire_claims(turn):  # those whose time is over though nobody has looked since
        pass
    require_validator(turn, node)
    return list_claimed(turn.connection, node, turn.now_ms)


def _find_next(turn: Turn, caller: Rows) -> JobRow | None:
    return find_next(turn.connection, caller.node.node, caller.owner.owner, turn.params.max_claims)


def _find_more(turn: Turn, caller: Rows, held: list[JobRow]) -> JobRow | None:
    """Another first opinion, beside first opinions.

    A file that ends who looks at it takes the claims beside it along. So only what nobody has tried is claimed with
    others: what lapsed once is claimed alone from then on, and cannot sink others a second time. Claims that lapse
    together count as one, so who let some lapse claims one at a time until it has judged again.
    """
    if len(held) >= MAX_JOBS or caller.owner.lapses or any(job.claims != 1 or job.judge for job in held):
        return None
    submission = find_submission(turn.connection, held[0].submission)
    assert submission is not None, "a job has a submission"
    return find_like(turn.connection, caller.owner.owner, submission.version)
