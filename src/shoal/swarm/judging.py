"""Verdicts and appeals: what validators found, and when that is enough."""

from shoal.swarm.balances import read_balances
from shoal.swarm.callers import require_member, require_validator
from shoal.swarm.delegation import Scope
from shoal.swarm.event import encode_body
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
from shoal.swarm.opinions import CONVICTIONS, count_opinions, refuse_vain
from shoal.swarm.postings import TREASURY, move_credit, name_account
from shoal.swarm.queueing import holds_claim
from shoal.swarm.refusal import AuthError
from shoal.swarm.rows import read_event
from shoal.swarm.rules.outcome import Vote, decide_outcome, end_waiting
from shoal.swarm.settling import Finding, settle_appeal, settle_submission
from shoal.swarm.state.canaries import is_revealed
from shoal.swarm.state.credit import find_appeal, last_appeal
from shoal.swarm.state.queue import JobRow, VerdictRow, find_job, list_verdicts, list_waiting
from shoal.swarm.state.run import count_away
from shoal.swarm.state.submissions import SubmissionRow, find_submission
from shoal.swarm.tags import Tag
from shoal.swarm.turn import Turn

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
    votes = [vote for vote in list_verdicts(turn.connection, said.submission) if vote.appeal == job.appeal]
    state = _decide_votes(turn, submission, job, votes)
    if state is not None:
        _settle(turn, submission, job, _describe_finding(submission, state, votes, said))
    elif count_opinions(turn, submission) == 0:  # nobody else can be asked, so there is nothing to wait for
        state, because = end_waiting(_read_votes(votes)), "no other validator could be asked"
        _settle(turn, submission, job, Finding(state, because, votes, round=said.round))
    return _answer_verdict(turn, list_verdicts(turn.connection, said.submission)[-1])


def expire_opinions(turn: Turn) -> bool:
    """Decide what nobody judges any more; whether there may be more."""
    params = turn.params
    before_ms = turn.now_ms - 1000 * params.opinion_s
    jobs = list_waiting(turn.connection, before_ms, params.max_claims, MAX_AT_ONCE)
    for waiting in jobs:
        submission, job = _find_job(turn, waiting.submission)
        if job.state == "queued":  # not ended by a conviction a moment ago
            votes = [vote for vote in list_verdicts(turn.connection, job.submission) if vote.appeal == job.appeal]
            state = end_waiting(_read_votes(votes))
            _settle(turn, submission, job, Finding(state, "nobody gave another opinion in time", votes))
    return len(jobs) == MAX_AT_ONCE


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


def _decide_votes(
    turn: Turn, submission: SubmissionRow, job: JobRow, votes: list[VerdictRow]
) -> SubmissionState | None:
    state = decide_outcome(_read_votes(votes), turn.params.max_rounds)
    if job.appeal and state is SubmissionState.ACCEPTED and submission.state == SubmissionState.HARD:
        cleared = sum(vote.verdict == Verdict.ACCEPTED for vote in votes)
        return state if cleared >= CONVICTIONS else None
    return state


def _read_votes(votes: list[VerdictRow]) -> list[Vote]:
    return [Vote(Verdict(vote.verdict), bool(vote.crashed)) for vote in votes]


def _describe_finding(
    submission: SubmissionRow, state: SubmissionState, votes: list[VerdictRow], said: VerdictStatement
) -> Finding:
    failed = [finding.check for finding in said.findings if not finding.passed]
    because = f"failed: {', '.join(failed)}" if failed else f"by {len(votes)} verdicts"
    if state is not SubmissionState.ACCEPTED:
        return Finding(state, because, votes, round=said.round)
    assert said.verdict is Verdict.ACCEPTED, "what is accepted is accepted by its last verdict"
    signals = tuple(int(group.signal) for group in said.groups)
    tokens = min(said.tokens, submission.tokens)
    return Finding(state, because, votes, round=said.round, tokens=tokens, signals=signals)


def _settle(turn: Turn, submission: SubmissionRow, job: JobRow, finding: Finding) -> None:
    if job.appeal:
        settle_appeal(turn, submission, finding)
    else:
        settle_submission(turn, submission, finding)


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
