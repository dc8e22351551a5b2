"""Verdicts and appeals: what validators found, and when a submission is decided."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from shoal.coordinator.decide import validators
from shoal.coordinator.decide.claims import holds_claim
from shoal.coordinator.decide.context import Decision, build_from, require_member, require_row, require_validator
from shoal.coordinator.decide.drift_watch import check_numbers, list_work
from shoal.coordinator.decide.settlement import Settlement, describe_odds, settle_appeal, settle_submission
from shoal.coordinator.decide.validators import is_clear, read_votes
from shoal.coordinator.rules.storage import appeal_time
from shoal.coordinator.rules.suspicion import is_doubtful
from shoal.coordinator.state.canaries import is_revealed
from shoal.coordinator.state.credit import find_appeal
from shoal.coordinator.state.members import find_ban, find_node
from shoal.coordinator.state.queue import JobRow, find_job, list_waiting
from shoal.coordinator.state.run import count_away
from shoal.coordinator.state.submissions import SubmissionRow, find_submission
from shoal.coordinator.state.suspicion import find_suspicion
from shoal.coordinator.state.validators import VerdictRow, find_opinion_need, is_convicted_by_odds, list_verdicts
from shoal.identity.delegation import Scope
from shoal.identity.documents import Tag
from shoal.ledger.db import read_accounts
from shoal.ledger.event import TREASURY, move_credit, name_account
from shoal.net.api_error import ApiError
from shoal.protocol.events import SecondOpinion
from shoal.protocol.messages import (
    REJECTED,
    AppealAnswer,
    SignedAppeal,
    SignedVerdict,
    SubmissionState,
    Verdict,
    VerdictAnswer,
    VerdictRecord,
    VerdictStatement,
)
from shoal.protocol.outcome import REJECTIONS, decide_outcome, end_waiting, find_sight, list_majority

MAX_AT_ONCE = 64


def post_verdict(decision: Decision, node: str, signed: SignedVerdict) -> VerdictAnswer:
    """Record a verdict, and the outcome if it decides."""
    caller = require_validator(decision, node)
    said = signed.verdict
    submission, job = _find_job(decision, said.submission)
    for vote in list_verdicts(decision.connection, said.submission):
        if vote.round == said.round:
            if vote.validator != node or not decision.is_recorded(vote.seq, said):
                raise ApiError(409, "judged", "a different verdict is already recorded for this round")
            return _answer_verdict(decision, vote)
    if job.round != said.round or not holds_claim(decision, job, caller):
        raise ApiError(409, "claim_lost", "this node has no current claim on this submission; no verdict is needed")
    statement = decision.open_message(node, said, signed.signature)
    _check_verdict(submission, said)
    decision.record(statement)
    proof = describe_odds(decision, submission.owner) if said.odds and not job.appeal else ""
    if proof:
        votes = [vote._replace(verdict=Verdict.HARD.value) for vote in _list_votes(decision, submission, job)]
        finding = Settlement(SubmissionState.HARD, proof, votes, round=said.round, by_odds=True)
        _settle(decision, submission, job, finding)
    else:
        _weigh_verdict(decision, submission, job, said)
    return _answer_verdict(decision, list_verdicts(decision.connection, said.submission)[-1])


def _weigh_verdict(decision: Decision, submission: SubmissionRow, job: JobRow, said: VerdictStatement) -> None:
    """Settle a submission if the verdicts so far decide it, the last of which is this one."""
    votes = _list_votes(decision, submission, job)
    state = _decide_votes(decision, submission, job, votes)
    doubt = validators.OpinionNeed() if state is None else _check_opinion_need(decision, submission, job, votes)
    if doubt.because:
        # A second opinion on an acceptance checks the same rollouts, so that both judge the same.
        check_ppm = job.check_ppm if said.verdict is Verdict.ACCEPTED else 0
        body = SecondOpinion(because=doubt.because, check_ppm=check_ppm, share=doubt.share)
        decision.append(submission.submission, body)
    elif state is not None:
        finding = _describe_finding(submission, state, votes, said)
        _settle(decision, submission, job, replace(finding, round=said.round, spared=doubt.share))
    elif (
        validators.count_opinions(decision, submission) == 0
    ):  # no other validator is available, so there is nothing to wait for
        finding = _end_votes(submission, job, votes, "no other validator could be asked")
        _settle(decision, submission, job, replace(finding, round=said.round))


def expire_opinions(decision: Decision) -> bool:
    """Decide submissions that no validator will judge any more; return whether more may remain."""
    params = decision.params
    before_ms = decision.now_ms - 1000 * params.opinion_s
    late = list_waiting(decision.connection, before_ms, params.max_claims, MAX_AT_ONCE)
    _end_waits(decision, late, "nobody gave another opinion in time")
    forsaken = validators.list_forsaken(decision, MAX_AT_ONCE)
    _end_waits(decision, forsaken, "nobody was there to give another opinion")
    return MAX_AT_ONCE in (len(late), len(forsaken))


def _end_waits(decision: Decision, jobs: Sequence[JobRow], because: str) -> None:
    for waiting in jobs:
        submission, job = _find_job(decision, waiting.submission)
        if job.state == "queued":  # not already ended by a conviction
            votes = _list_votes(decision, submission, job)
            _settle(decision, submission, job, _end_votes(submission, job, votes, because))


def open_appeal(decision: Decision, signed: SignedAppeal, *, removing: Collection[str] = frozenset()) -> AppealAnswer:
    """Record an owner's request to judge a rejected submission again; once, and not too often.

    `removing` are the files that are being deleted, which the tables do not show yet."""
    name, owner, params = signed.appeal.submission, signed.owner, decision.params
    submission = find_submission(decision.connection, name)
    if submission is None or submission.owner != owner:
        raise ApiError(404, "unknown_submission", "this owner has no such submission")
    statement = decision.open_message(owner, signed.appeal, signed.signature)
    earlier = find_appeal(decision.connection, name)
    if earlier is not None:
        return AppealAnswer(submission=name, state=earlier.state, fee=earlier.fee)
    if submission.state not in REJECTED:
        raise ApiError(409, "not_rejected", f"this submission is {submission.state}; only a rejection can be appealed")
    if is_revealed(decision.connection, owner):
        raise ApiError(409, "canary", "this owner was a canary; its submissions were known to be bad")
    away_ms = count_away(decision.connection, submission.decided_ms)
    window_s = appeal_time(params, SubmissionState(submission.state))
    if decision.now_ms > submission.decided_ms + 1000 * window_s + away_ms:
        raise ApiError(410, "too_late", "the time to appeal this rejection has expired")
    if submission.dropped or submission.blob in removing:
        raise ApiError(
            410, "dropped", "the file was deleted, because this owner has no accepted work and room is short"
        )
    validators.refuse_early(decision, owner)
    validators.refuse_vain(decision, submission)
    if read_accounts(decision.connection, owner, "avail")["avail"] < params.appeal_fee:
        raise ApiError(402, "fee", f"an appeal costs {params.appeal_fee} micro-credits, returned if it succeeds")
    account = name_account("avail", owner)
    decision.record(statement, move_credit(account, TREASURY, params.appeal_fee) if params.appeal_fee else ())
    return AppealAnswer(submission=name, state="open", fee=params.appeal_fee)


def allow_reading(decision: Decision, *, node: str, submission: str) -> str:
    """The name of a submission's file, for nodes that may read it: its validator while it judges, and trainers."""
    caller = require_member(decision, node)
    row = find_submission(decision.connection, submission)
    job = find_job(decision.connection, submission)
    may_train = Scope.TRAIN.value in caller.node.scopes.split(",")
    is_trainer = may_train and {node, caller.owner.owner} & set(decision.params.trainers)
    is_judge = job is not None and holds_claim(decision, job, caller)
    if row is None or not row.received_ms or not (is_trainer or is_judge):
        raise ApiError(404, "unknown_submission", "no such file, or this node may not read it")
    return row.blob


def _find_job(decision: Decision, name: str) -> tuple[SubmissionRow, JobRow]:
    submission, job = find_submission(decision.connection, name), find_job(decision.connection, name)
    if submission is None or job is None:
        raise ApiError(404, "unknown_submission", "no such submission to judge")
    return submission, job


def _check_verdict(submission: SubmissionRow, said: VerdictStatement) -> None:
    """Reject a verdict that does not match its submission."""
    if len({own.rival for own in said.odds}) < len(said.odds):
        raise ApiError(400, "odds", "the odds of a rival must be stated once")
    if said.verdict is not Verdict.ACCEPTED:
        if said.odds:
            raise ApiError(400, "odds", "only an accepting verdict states odds: a rejection decides by itself")
        return
    indices = [group.index for group in said.groups]
    if indices != list(range(submission.first, submission.first + submission.count)):
        raise ApiError(400, "groups", "an accepting verdict must describe every group of the submission, in order")
    if said.tokens > submission.tokens:
        raise ApiError(400, "tokens", "more validated tokens than the manifest lists")
    check_numbers(said)


def _decide_votes(
    decision: Decision, submission: SubmissionRow, job: JobRow, votes: list[VerdictRow]
) -> SubmissionState | None:
    doubt = None if job.appeal else find_opinion_need(decision.connection, job.submission)
    doubted = doubt is not None and bool(doubt.because)
    state = decide_outcome(read_votes(votes), decision.params.max_rounds, doubted=doubted)
    if state is None or _lacks_clearance(submission, job, state, votes):
        return None
    return _weigh_clearance(decision, submission) if _clears_convict(submission, job, state) else state


def _lacks_clearance(
    submission: SubmissionRow, job: JobRow, state: SubmissionState, votes: Sequence[VerdictRow]
) -> bool:
    """Whether too few validators clear a submission that two convicted."""
    if not _clears_convict(submission, job, state):
        return False
    return sum(vote.verdict == Verdict.ACCEPTED for vote in votes) < validators.CONVICTIONS


def _weigh_clearance(decision: Decision, submission: SubmissionRow) -> SubmissionState | None:
    """The outcome of a conviction that two owners cleared: the remaining owners are asked until one side has more.

    A tie is doubt, and doubt favours the accused.
    """
    verdicts = [vote.verdict for vote in _list_all_votes(decision, submission)]
    convict, clear = sum(verdict in REJECTIONS for verdict in verdicts), verdicts.count(Verdict.ACCEPTED)
    if clear <= convict and validators.count_opinions(decision, submission):
        return None
    return SubmissionState.ACCEPTED if clear >= convict else SubmissionState.INCONCLUSIVE


def _clears_convict(submission: SubmissionRow, job: JobRow, state: SubmissionState) -> bool:
    return bool(job.appeal) and state is SubmissionState.ACCEPTED and submission.state == SubmissionState.HARD


def _check_opinion_need(
    decision: Decision, submission: SubmissionRow, job: JobRow, votes: Sequence[VerdictRow]
) -> validators.OpinionNeed:
    """Whether the decision of the verdicts needs another opinion: only if a single verdict decides."""
    clear = [vote for vote in votes if is_clear(vote)]
    if job.appeal or len(clear) != 1 or find_opinion_need(decision.connection, job.submission) is not None:
        return validators.OpinionNeed()
    return validators.needs_second_opinion(decision, submission, Verdict(clear[0].verdict))


def _list_votes(decision: Decision, submission: SubmissionRow, job: JobRow) -> list[VerdictRow]:
    """The verdicts that count now: those on the appeal, if there is one; without those of banned validators."""
    return [vote for vote in _list_all_votes(decision, submission) if vote.appeal == job.appeal]


def _list_all_votes(decision: Decision, submission: SubmissionRow) -> list[VerdictRow]:
    """The verdicts on an appeal and those before it; without those of banned validators.

    The work of an owner that was convicted by odds passes every check by itself. So those that accepted it before count
    as convicting, and those that accept it on appeal do if their odds lean to other weights as well.
    """
    votes = [
        vote for vote in list_verdicts(decision.connection, submission.submission) if not _is_banned(decision, vote)
    ]
    if not is_convicted_by_odds(decision.connection, submission):
        return votes
    return [vote._replace(verdict=Verdict.HARD.value) if _leans(decision, submission, vote) else vote for vote in votes]


def _leans(decision: Decision, submission: SubmissionRow, vote: VerdictRow) -> bool:
    """Whether a validator that accepted the work of a convicted owner found odds against it."""
    if vote.verdict != Verdict.ACCEPTED or not vote.appeal:
        return vote.verdict == Verdict.ACCEPTED
    node = require_row(find_node(decision.connection, vote.validator), "every verdict has a validator")
    found = find_suspicion(decision.connection, submission.owner, node.owner)
    return found is not None and is_doubtful(found.evidence, submission.count * decision.params.group_size)


def _is_banned(decision: Decision, vote: VerdictRow) -> bool:
    node = require_row(find_node(decision.connection, vote.validator), "every verdict has a validator")
    return find_ban(decision.connection, node.node, node.owner) is not None


def _end_votes(submission: SubmissionRow, job: JobRow, votes: list[VerdictRow], because: str) -> Settlement:
    """The outcome if no further verdict arrives."""
    state = _end_appeal(votes) if job.appeal else end_waiting(read_votes(votes))
    if _lacks_clearance(submission, job, state, votes):
        return Settlement(SubmissionState.INCONCLUSIVE, because, votes)
    if state is SubmissionState.ACCEPTED:
        return _describe_accepted(submission, [vote for vote in votes if is_clear(vote)], because)
    return Settlement(state, because, votes)


def _end_appeal(votes: Sequence[VerdictRow]) -> SubmissionState:
    """Two that clear it are sufficient if a third was asked and did not answer."""
    verdicts, cleared = ({vote.verdict for vote in votes if is_clear(vote)}, find_sight(read_votes(votes)))
    if cleared is not None and verdicts == {Verdict.ACCEPTED}:
        return SubmissionState.ACCEPTED
    return end_waiting(read_votes(votes))


def _describe_finding(
    submission: SubmissionRow, state: SubmissionState, votes: list[VerdictRow], said: VerdictStatement
) -> Settlement:
    failed = [finding.check for finding in said.findings if not finding.passed]
    if state is not SubmissionState.ACCEPTED:
        return Settlement(state, f"failed: {', '.join(failed)}" if failed else f"by {len(votes)} verdicts", votes)
    agreed = list_majority(read_votes(votes))
    together = [vote for vote, is_one in zip(votes, agreed, strict=True) if is_one]
    lone = [vote for vote in votes if vote.verdict == Verdict.ACCEPTED]
    finding = _describe_accepted(submission, together or lone, f"by {len(votes)} verdicts")
    return replace(finding, work=list_work(said)) if said.verdict is Verdict.ACCEPTED else finding


def _describe_accepted(submission: SubmissionRow, votes: Sequence[VerdictRow], because: str) -> Settlement:
    """Accepted, with the numbers that these verdicts have in common."""
    tokens, signals = min(votes[-1].tokens, submission.tokens), tuple(map(int, votes[-1].signals))
    return Settlement(SubmissionState.ACCEPTED, because, votes, tokens=tokens, signals=signals)


def _settle(decision: Decision, submission: SubmissionRow, job: JobRow, finding: Settlement) -> None:
    votes = _list_votes(decision, submission, job)
    # Odds are weak evidence: nobody is graded by them.
    is_graded = not finding.by_odds and not is_convicted_by_odds(decision.connection, submission)
    if job.appeal:
        state = settle_appeal(decision, submission, finding)
        if is_graded:
            validators.grade_appeal(decision, submission, _list_all_votes(decision, submission), state)
    else:
        settle_submission(decision, submission, finding)
        if is_graded:
            validators.grade_verdicts(decision, submission, votes)
    validators.limit_silent(decision, submission, votes)


def _answer_verdict(decision: Decision, vote: VerdictRow) -> VerdictAnswer:
    """The result of the verdict when it was given, regardless of later changes."""
    verdict, state = Verdict(vote.verdict), SubmissionState(vote.state)
    record = build_from(VerdictRecord, vote, run=decision.run, verdict=verdict, state=state)
    return VerdictAnswer(record=record, document=decision.sign(Tag.VERDICT, record))
