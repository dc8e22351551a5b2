"""Verdicts and appeals: what validators found, and when that is enough."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.swarm.balances import read_balances
from shoal.swarm.callers import require_member, require_validator
from shoal.swarm.delegation import Scope
from shoal.swarm.event import Kind, encode_body
from shoal.swarm.grading import grade_appeal, grade_verdicts, is_clear, limit_silent, read_votes
from shoal.swarm.messages import (
    AppealAnswer,
    SignedAppeal,
    SignedVerdict,
    SubmissionState,
    Verdict,
    VerdictAnswer,
    VerdictRecord,
    VerdictStatement,
)
from shoal.swarm.opinions import CONVICTIONS, Doubt, count_opinions, list_forsaken, needs_second_opinion, refuse_vain
from shoal.swarm.postings import TREASURY, move_credit, name_account
from shoal.swarm.queueing import holds_claim
from shoal.swarm.refusal import AuthError
from shoal.swarm.rows import read_event
from shoal.swarm.rules.outcome import REJECTIONS, decide_outcome, end_waiting, find_sight, list_majority
from shoal.swarm.settling import Finding, settle_appeal, settle_submission
from shoal.swarm.state.canaries import is_revealed
from shoal.swarm.state.credit import find_appeal, last_appeal
from shoal.swarm.state.judges import find_doubt
from shoal.swarm.state.nodes import find_ban, find_node
from shoal.swarm.state.queue import JobRow, find_job, list_waiting
from shoal.swarm.state.run import count_away
from shoal.swarm.state.submissions import SubmissionRow, find_submission
from shoal.swarm.state.verdicts import VerdictRow, list_verdicts
from shoal.swarm.tags import Tag
from shoal.swarm.turn import Turn
from shoal.swarm.watching import check_numbers, list_work

MAX_AT_ONCE = 64
_APPEALABLE = (SubmissionState.FORM, SubmissionState.SOFT, SubmissionState.HARD)


def post_verdict(turn: Turn, *, node: str, signed: SignedVerdict) -> VerdictAnswer:
    """Record a verdict, and the outcome if it decides."""
    caller = require_validator(turn, node)
    said = signed.verdict
    submission, job = _find_job(turn, said.submission)
    for vote in list_verdicts(turn.connection, said.submission):
        if vote.round == said.round:
            return _repeat_verdict(turn, vote, node, said)
    if job.round != said.round or not holds_claim(turn, job, caller):
        raise AuthError(409, "claim_lost", "this node has no claim on this submission now; its verdict is not needed")
    statement = turn.open_message(node, said, signed.signature)
    _check_verdict(submission, said)
    turn.record(statement)
    votes = _list_votes(turn, job)
    state = _decide_votes(turn, submission, job, votes)
    doubt = Doubt() if state is None else _doubt_verdict(turn, submission, job, votes)
    if doubt.because:
        turn.append(Kind.VAL_DOUBT, submission.submission, _describe_doubt(job, said, doubt))
    elif state is not None:
        finding = _describe_finding(submission, state, votes, said)
        _settle(turn, submission, job, replace(finding, round=said.round, spared=doubt.share))
    elif count_opinions(turn, submission) == 0:  # nobody else can be asked, so there is nothing to wait for
        finding = _end_votes(submission, job, votes, "no other validator could be asked")
        _settle(turn, submission, job, replace(finding, round=said.round))
    return _answer_verdict(turn, list_verdicts(turn.connection, said.submission)[-1])


def expire_opinions(turn: Turn) -> bool:
    """Decide what nobody judges any more; whether there may be more."""
    params = turn.params
    before_ms = turn.now_ms - 1000 * params.opinion_s
    late = list_waiting(turn.connection, before_ms, params.max_claims, MAX_AT_ONCE)
    _end_waits(turn, late, "nobody gave another opinion in time")
    forsaken = list_forsaken(turn, MAX_AT_ONCE)
    _end_waits(turn, forsaken, "nobody was there to give another opinion")
    return MAX_AT_ONCE in (len(late), len(forsaken))


def _end_waits(turn: Turn, jobs: Sequence[JobRow], because: str) -> None:
    for waiting in jobs:
        submission, job = _find_job(turn, waiting.submission)
        if job.state == "queued":  # not ended by a conviction a moment ago
            _settle(turn, submission, job, _end_votes(submission, job, _list_votes(turn, job), because))


def open_appeal(turn: Turn, *, signed: SignedAppeal) -> AppealAnswer:
    """An owner wants a rejected submission judged again; once, and not too often."""
    name, owner, params = signed.appeal.submission, signed.owner, turn.params
    submission = find_submission(turn.connection, name)
    if submission is None or submission.owner != owner:
        raise AuthError(404, "unknown_submission", "this owner has no such submission")
    statement = turn.open_message(owner, signed.appeal, signed.signature)
    earlier = find_appeal(turn.connection, name)
    if earlier is not None:
        return AppealAnswer(submission=name, state=earlier.state, fee=earlier.fee)
    if submission.state not in _APPEALABLE:
        raise AuthError(409, "not_rejected", f"this submission is {submission.state}; only a rejection can be appealed")
    if is_revealed(turn.connection, owner):
        raise AuthError(409, "canary", "this owner was a canary; what it handed in was known to be bad")
    away_ms = count_away(turn.connection, submission.decided_ms)
    if turn.now_ms > submission.decided_ms + 1000 * params.appeal_s + away_ms:
        raise AuthError(410, "too_late", "the time to appeal this rejection is over")
    if (last := last_appeal(turn.connection, owner)) and turn.now_ms < last + 1000 * params.appeal_every_s:
        wait_s = (last - turn.now_ms) // 1000 + params.appeal_every_s
        raise AuthError(429, "too_many", "this owner appealed not long ago", retry_after_s=max(1, wait_s))
    refuse_vain(turn, submission)
    purse = name_account("avail", owner)
    if read_balances(turn.connection, [purse])[purse] < params.appeal_fee:
        raise AuthError(402, "fee", f"an appeal costs {params.appeal_fee} micro-credits, returned if you are right")
    turn.record(statement, move_credit(purse, TREASURY, params.appeal_fee) if params.appeal_fee else ())
    return AppealAnswer(submission=name, state="open", fee=params.appeal_fee)


def allow_reading(turn: Turn, *, node: str, submission: str) -> str:
    """The name of a submission's file, for who may read it: its validator while it judges, and trainers."""
    caller = require_member(turn, node)
    row = find_submission(turn.connection, submission)
    job = find_job(turn.connection, submission)
    may_train = Scope.TRAIN.value in caller.node.scopes.split(",")
    is_trainer = may_train and {node, caller.owner.owner} & set(turn.params.trainers)
    is_judge = job is not None and holds_claim(turn, job, caller)
    if row is None or not row.received_ms or not (is_trainer or is_judge):
        raise AuthError(404, "unknown_submission", "there is no such file, or it is not for this node")
    return row.blob


def _find_job(turn: Turn, name: str) -> tuple[SubmissionRow, JobRow]:
    submission, job = find_submission(turn.connection, name), find_job(turn.connection, name)
    if submission is None or job is None:
        raise AuthError(404, "unknown_submission", "there is no such submission to judge")
    return submission, job


def _check_verdict(submission: SubmissionRow, said: VerdictStatement) -> None:
    """Refuse a verdict that contradicts what it is about."""
    if said.verdict is not Verdict.ACCEPTED:
        return
    indices = [group.index for group in said.groups]
    if indices != list(range(submission.first, submission.first + submission.count)):
        raise AuthError(400, "groups", "an accepted submission is described group by group, in order")
    if said.tokens > submission.tokens:
        raise AuthError(400, "tokens", "more validated tokens than the manifest has")
    check_numbers(said)


def _decide_votes(
    turn: Turn, submission: SubmissionRow, job: JobRow, votes: list[VerdictRow]
) -> SubmissionState | None:
    doubt = None if job.appeal else find_doubt(turn.connection, job.submission)
    doubted = doubt is not None and bool(doubt.because)
    state = decide_outcome(read_votes(votes), turn.params.max_rounds, doubted=doubted)
    if state is None or _lacks_clearance(submission, job, state, votes):
        return None
    return _weigh_clearance(turn, submission) if _clears_convict(submission, job, state) else state


def _lacks_clearance(
    submission: SubmissionRow, job: JobRow, state: SubmissionState, votes: Sequence[VerdictRow]
) -> bool:
    """Whether too few clear what two convicted."""
    if not _clears_convict(submission, job, state):
        return False
    return sum(vote.verdict == Verdict.ACCEPTED for vote in votes) < CONVICTIONS


def _weigh_clearance(turn: Turn, submission: SubmissionRow) -> SubmissionState | None:
    """What becomes of a conviction that two owners cleared: who is left is asked, until more are of one mind.

    As many on either side is doubt, and doubt is for the accused.
    """
    verdicts = [vote.verdict for vote in _list_all_votes(turn, submission.submission)]
    convict, clear = sum(verdict in REJECTIONS for verdict in verdicts), verdicts.count(Verdict.ACCEPTED)
    if clear <= convict and count_opinions(turn, submission):
        return None
    return SubmissionState.ACCEPTED if clear >= convict else SubmissionState.INCONCLUSIVE


def _clears_convict(submission: SubmissionRow, job: JobRow, state: SubmissionState) -> bool:
    return bool(job.appeal) and state is SubmissionState.ACCEPTED and submission.state == SubmissionState.HARD


def _doubt_verdict(turn: Turn, submission: SubmissionRow, job: JobRow, votes: Sequence[VerdictRow]) -> Doubt:
    """Whether what the verdicts decide needs another opinion: only what one alone decides can."""
    clear = [vote for vote in votes if is_clear(vote)]
    if job.appeal or len(clear) != 1 or find_doubt(turn.connection, job.submission) is not None:
        return Doubt()
    return needs_second_opinion(turn, submission, Verdict(clear[0].verdict))


def _describe_doubt(job: JobRow, said: VerdictStatement, doubt: Doubt) -> dict[str, Any]:
    """Who is asked about what was accepted looks at the same rollouts, or they would not judge the same."""
    share = job.check_ppm if said.verdict is Verdict.ACCEPTED else 0
    return {"because": doubt.because, "check_ppm": share, "share": doubt.share}


def _list_votes(turn: Turn, job: JobRow) -> list[VerdictRow]:
    """The verdicts that count now: those on the appeal, if there is one; none of who was banned since."""
    return [vote for vote in _list_all_votes(turn, job.submission) if vote.appeal == job.appeal]


def _list_all_votes(turn: Turn, submission: str) -> list[VerdictRow]:
    """Those on an appeal and those before it; none of who was banned since."""
    return [vote for vote in list_verdicts(turn.connection, submission) if not _is_banned(turn, vote)]


def _is_banned(turn: Turn, vote: VerdictRow) -> bool:
    node = find_node(turn.connection, vote.validator)
    assert node is not None, "a verdict has a validator"
    return find_ban(turn.connection, node.node, node.owner) is not None


def _end_votes(submission: SubmissionRow, job: JobRow, votes: list[VerdictRow], because: str) -> Finding:
    """What is left if nobody else says anything."""
    state = _end_appeal(votes) if job.appeal else end_waiting(read_votes(votes))
    if _lacks_clearance(submission, job, state, votes):
        return Finding(SubmissionState.INCONCLUSIVE, because, votes)
    if state is SubmissionState.ACCEPTED:
        return _describe_accepted(submission, [vote for vote in votes if is_clear(vote)], because)
    return Finding(state, because, votes)


def _end_appeal(votes: Sequence[VerdictRow]) -> SubmissionState:
    """Two that clear it are enough where a third was asked for and did not come."""
    verdicts, cleared = {vote.verdict for vote in votes if is_clear(vote)}, find_sight(read_votes(votes))
    if cleared is not None and verdicts == {Verdict.ACCEPTED}:
        return SubmissionState.ACCEPTED
    return end_waiting(read_votes(votes))


def _describe_finding(
    submission: SubmissionRow, state: SubmissionState, votes: list[VerdictRow], said: VerdictStatement
) -> Finding:
    failed = [finding.check for finding in said.findings if not finding.passed]
    if state is not SubmissionState.ACCEPTED:
        return Finding(state, f"failed: {', '.join(failed)}" if failed else f"by {len(votes)} verdicts", votes)
    agreed = list_majority(read_votes(votes))
    together = [vote for vote, is_one in zip(votes, agreed, strict=True) if is_one]
    lone = [vote for vote in votes if vote.verdict == Verdict.ACCEPTED]
    finding = _describe_accepted(submission, together or lone, f"by {len(votes)} verdicts")
    return replace(finding, work=list_work(said)) if said.verdict is Verdict.ACCEPTED else finding


def _describe_accepted(submission: SubmissionRow, votes: Sequence[VerdictRow], because: str) -> Finding:
    """Accepted, with the numbers that these verdicts have in common."""
    tokens, signals = min(votes[-1].tokens, submission.tokens), tuple(map(int, votes[-1].signals))
    return Finding(SubmissionState.ACCEPTED, because, votes, tokens=tokens, signals=signals)


def _settle(turn: Turn, submission: SubmissionRow, job: JobRow, finding: Finding) -> None:
    votes = _list_votes(turn, job)
    if job.appeal:
        state = settle_appeal(turn, submission, finding)
        grade_appeal(turn, submission, _list_all_votes(turn, submission.submission), state)
    else:
        settle_submission(turn, submission, finding)
        grade_verdicts(turn, submission, votes)
    limit_silent(turn, submission, votes)


def _repeat_verdict(turn: Turn, vote: VerdictRow, node: str, said: VerdictStatement) -> VerdictAnswer:
    event = read_event(turn.connection, vote.seq)
    if vote.validator != node or (event is not None and event.body != encode_body(said.model_dump(mode="json"))):
        raise AuthError(409, "judged", "this round of this submission was judged otherwise")
    return _answer_verdict(turn, vote)


def _answer_verdict(turn: Turn, vote: VerdictRow) -> VerdictAnswer:
    """What the verdict brought when it was given; what came later is not its matter."""
    record = VerdictRecord(
        run=turn.run,
        submission=vote.submission,
        validator=vote.validator,
        round=vote.round,
        verdict=Verdict(vote.verdict),
        state=SubmissionState(vote.state),
        paid=vote.paid,
        time_ms=vote.time_ms,
    )
    return VerdictAnswer(record=record, document=turn.sign(Tag.VERDICT, record))
