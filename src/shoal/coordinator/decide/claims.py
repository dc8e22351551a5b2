"""Claims: which validator judges which submission, and what it is asked to check.

A claim that is not fulfilled in time goes to another validator, so a validator that claims and does not judge cannot
block a submission; after several consecutive lapses it may not judge for a while. It may hold a few claims of one
version at once, because judging them together is cheaper; each is a separate decision with its own deadline and
verdict.

The event of a claim fixes what it asks, so that it can be shown and repeated: how much to check, and which rollouts are
copies. Both depend on the state of the run then: the owner's standing, the parameters, the outcomes of other
submissions. Everything else follows from the manifest, the step and the secret of the beacons.
"""

from collections.abc import Sequence

from shoal.coordinator.decide.context import CallerRows, Decision, build_from, require_row, require_validator
from shoal.coordinator.state import queue
from shoal.coordinator.state.drift import is_watched
from shoal.coordinator.state.members import SUSPECT, find_node, find_owner
from shoal.coordinator.state.submissions import SubmissionRow, find_submission, list_duplicates
from shoal.coordinator.state.validators import find_opinion_need
from shoal.ledger.event import Event, EventKind
from shoal.ledger.reader import list_events, read_event
from shoal.protocol.events import ClaimLapse, NodeStanding, ValidationClaim, read_body
from shoal.protocol.messages import MAX_JOBS, ClaimAnswer, Job, Manifest, Standing, SubmissionState

MAX_AT_ONCE = 64
_RETRY_S = 2


def plan_claim(decision: Decision, job: queue.JobRow, validator: str) -> ValidationClaim:
    """The claim of a job as it would be made now, with everything that it fixes about the job."""
    submission = _find_submission(decision, job.submission)
    owner = require_row(find_owner(decision.connection, submission.owner), "every submission has an owner")
    is_known = owner.has_record and owner.standing in (Standing.GOOD, Standing.TRUSTED)
    in_full = job.round > 1 or job.appeal or is_watched(decision.connection, owner.owner)
    standing = Standing.PROBATION if in_full else Standing(owner.standing)
    share = decision.params.check_share(standing, submission.count * decision.params.group_size)
    doubt = None if job.appeal else find_opinion_need(decision.connection, job.submission)
    if doubt is not None and doubt.check_ppm:  # a second opinion checks the same rollouts, so that both can be compared
        share = doubt.check_ppm
    # Rollouts also in earlier accepted work. Submissions that only announced them, or were rejected, do not count.
    rows = list_duplicates(decision.connection, job.submission)
    return ValidationClaim(
        bounded=0 if is_known else 1,
        check_ppm=share,
        deadline_ms=decision.now_ms + 1000 * decision.params.claim_s,
        duplicates=tuple(row.place for row in rows if row.rival_state == SubmissionState.ACCEPTED),
        owner=job.owner,
        round=job.round,
        validator=validator,
    )


def describe_job(decision: Decision, job: queue.JobRow) -> Job:
    """The job as its claimant sees it."""
    claims = [*list_events(decision.connection, job.submission, EventKind.VAL_CLAIM), *decision.events]
    claim = find_claim(claims, job.submission, job.validator, job.round)
    # A claim made in the same group of decisions is not on disk yet; planning it now gives the same result.
    return show_job(decision, job.submission, claim or plan_claim(decision, job, job.validator), job.deadline_ms)


def show_job(decision: Decision, name: str, claim: ValidationClaim, deadline_ms: int) -> Job:
    """A job as its claim defines it; its deadline may have moved since."""
    submission = _find_submission(decision, name)
    chain, group_size = decision.context.chain, decision.params.group_size
    return build_from(
        Job,
        submission,
        round=claim.round,
        group_size=group_size,
        max_tokens=decision.params.max_tokens,
        seeds=chain.reveal_groups(submission.step, submission.first, submission.count, group_size),
        bounded=bool(claim.bounded),
        manifest=_read_manifest(decision, submission),
        check_ppm=claim.check_ppm,
        check_seed=chain.draw_check(submission.submission, submission.blob),
        duplicates=claim.duplicates,
        deadline_ms=deadline_ms,
    )


def find_claim(events: Sequence[Event], submission: str, validator: str, number: int) -> ValidationClaim | None:
    """The last of these claims in which a validator was asked for the verdict of a round."""
    for event in reversed(events):
        if (event.kind, event.subject) != (EventKind.VAL_CLAIM, submission):
            continue
        claim = read_body(event, ValidationClaim)
        if (claim.validator, claim.round) == (validator, number):
            return claim
    return None


def _find_submission(decision: Decision, name: str) -> SubmissionRow:
    return require_row(find_submission(decision.connection, name), "every job has a submission")


def _read_manifest(decision: Decision, submission: SubmissionRow) -> Manifest:
    """The manifest as it was committed."""
    event = read_event(decision.connection, int(submission.submission[1:]))
    assert event is not None, "a received submission was committed before"
    return read_body(event, Manifest)


def claim_jobs(decision: Decision, node: str, most: int = 1) -> ClaimAnswer:
    """The submissions that a validator judges next; its current claims, if it has any.

    At most half of what is waiting, so that others find work too.
    """
    held = _list_held(decision, node)
    if not held:
        room = min(most, MAX_JOBS, -(-queue.count_ready(decision.connection, 2 * MAX_JOBS) // 2))
        while len(held) < max(room, 1) and (job := take_job(decision, node=node)):
            held.append(job)
    if not held:
        return ClaimAnswer(retry_after_s=_RETRY_S)
    return ClaimAnswer(jobs=tuple(describe_job(decision, job) for job in held))


def take_job(decision: Decision, *, node: str) -> queue.JobRow | None:
    """Claim a job for a validator: the next in turn, or, if it already holds claims, another of the same version."""
    held = _list_held(decision, node)
    caller = require_validator(decision, node)
    if held:
        job = _find_more(decision, caller, held)
    else:
        aged_ms = decision.now_ms - 1000 * decision.params.claim_s
        job = queue.find_next(decision.connection, node, caller.owner.owner, decision.params.max_claims, aged_ms)
    if job is None:
        return None
    decision.append(job.submission, plan_claim(decision, job, node))
    return queue.find_job(decision.connection, job.submission)


def holds_claim(decision: Decision, job: queue.JobRow, caller: CallerRows) -> bool:
    """Whether a validator may judge: it has the claim, or had it and no one else has it now."""
    if job.state != "queued":
        return False
    node, owner = caller.node.node, caller.owner.owner
    return node == (job.validator or queue.find_lapse(decision.connection, job.submission, owner, job.round))


def expire_claims(decision: Decision) -> bool:
    """End claims past their deadline, and those of validators that may not judge; return whether more may remain."""
    lapsed = queue.list_lapsed(decision.connection, decision.now_ms, MAX_AT_ONCE)
    for job in lapsed:
        _lapse_claim(decision, job)
    barred = queue.list_barred(decision.connection, MAX_AT_ONCE)  # they cannot give a verdict
    for job in barred:
        _lapse_claim(decision, job)
    return MAX_AT_ONCE in (len(lapsed), len(barred))


def _lapse_claim(decision: Decision, job: queue.JobRow) -> None:
    node = require_row(find_node(decision.connection, job.validator), "every claim has a node")
    decision.append(job.submission, ClaimLapse(owner=node.owner, round=job.round, validator=job.validator))
    owner = require_row(find_owner(decision.connection, node.owner), "every node has an owner")
    if owner.lapses >= decision.params.limit_lapses and owner.standing not in (Standing.LIMITED, Standing.BANNED):
        reason = f"let {owner.lapses} claims in a row lapse"
        decision.append(owner.owner, NodeStanding(reason=reason, standing=Standing.LIMITED))


def _list_held(decision: Decision, node: str) -> list[queue.JobRow]:
    """The claims of a validator that it may still fulfil."""
    while expire_claims(decision):  # including those that passed their deadline since the last check
        pass
    require_validator(decision, node)
    return queue.list_claimed(decision.connection, node, decision.now_ms)


def _find_more(decision: Decision, caller: CallerRows, held: list[queue.JobRow]) -> queue.JobRow | None:
    """Another first opinion, in addition to first opinions.

    A file that crashes its validator makes the other claims of that validator lapse too. So only untried files are
    claimed together: a file whose claim lapsed once is claimed alone from then on, and cannot harm others again. So is
    every file of a suspect, and files of new owners are claimed with their like: they may take long.
    Claims that lapse together count as one, so a validator with lapses claims one at a time until it has judged again.
    """
    rank = held[0].rank
    if len(held) >= MAX_JOBS or caller.owner.lapses or rank >= SUSPECT:
        return None
    if any(job.claims != 1 or job.judge for job in held):
        return None
    submission = require_row(find_submission(decision.connection, held[0].submission), "every job has a submission")
    return queue.find_like(decision.connection, caller.owner.owner, submission.version, rank)
