"""Validators: which verdicts need a second opinion, and how verdicts are graded once the truth is known.

Second opinions. One verdict decides most submissions, so a share of verdicts is compared with another owner's:

    accepted     `second_share` of them, drawn with the coordinator's secret after the verdict, so unpredictable
    rejected     `reject_share`, by default all of them: honest work is hardly ever rejected, so this
                 costs almost nothing, and a validator that rejects good work is contradicted at once. A suspect has
                 just had a rejection confirmed; only a share of its work is drawn, so that bad work does not cost
                 twice, except for the rejection that would ban it
    watched      all submissions of an owner whose work drifts away from that of others

Each owner judges a submission once, including appeals, and never its own work. So a second opinion takes two owners, an
appeal of a rejection one more than judged it, and an appeal of a conviction two more. If nobody is available, no second
opinion is requested.

Grades. A verdict is compared with what the work turned out to be, and graded again if that changes:

    by verdicts   two owners agree, and their numbers are unambiguous
    by an appeal  more than half of all validators that judged it, before and now, agree with the result unambiguously
    by a canary   the operator knew what the work was

    wrong once: unpaid    again: limited, it may not judge for a while    a third time: its bond is burned, it is banned
    inconclusive too often where others could judge: limited

Invariants:
- honest doubt is never graded: neither an inconclusive verdict nor one on work about which others could not be sure. A
  validator that is always inconclusive is limited, see `rules.validator_trust`;
- a verdict counts once, whatever shows that it was wrong;
- a single liar harms only itself: it is one against two, and has no part in the result that it contradicts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shoal.coordinator.decide.context import Decision, RunView, require_row, require_validator
from shoal.coordinator.decide.settlement import burn_credit, void_work
from shoal.coordinator.rules.standing import STRIKE, is_shut_out, is_suspect
from shoal.coordinator.rules.validator_trust import (
    BANNED_AT,
    LIMITED_AT,
    SILENT_AT,
    ActualOutcome,
    next_score,
    undo_score,
)
from shoal.coordinator.state.credit import last_appeal
from shoal.coordinator.state.drift import is_watched
from shoal.coordinator.state.members import OwnerRow, find_node, find_owner, list_named
from shoal.coordinator.state.queue import JobRow, list_unheard
from shoal.coordinator.state.submissions import SubmissionRow, find_submission
from shoal.coordinator.state.validators import VerdictRow, find_grade, find_validator, list_verdicts
from shoal.net.api_error import ApiError
from shoal.protocol.events import Ban, NodeStanding, VerdictGrade, VerdictGrades
from shoal.protocol.messages import Standing, SubmissionState, Verdict
from shoal.protocol.outcome import REJECTIONS, Vote, agrees, list_majority
from shoal.protocol.params import MILLION
from shoal.util.clock import show_time
from shoal.util.units import count_things

BOND = ("stake", "unbond")
CONVICTIONS = 2
"""validators that must clear a submission that as many convicted"""


class OpinionNeed(NamedTuple):
    """Whether one verdict is sufficient."""

    because: str = ""
    """reason for a second opinion; empty if none is needed"""
    share: int = 0
    """probability of the draw in millionths; 0 if nothing was drawn"""


def needs_second_opinion(decision: Decision, submission: SubmissionRow, verdict: Verdict) -> OpinionNeed:
    """Whether another owner must judge a submission that one verdict would decide."""
    owner = require_row(find_owner(decision.connection, submission.owner), "every submission has an owner")
    because, share = _choose_share(decision, owner, verdict)
    if not share:
        return OpinionNeed()
    if share < MILLION and decision.context.chain.draw_second(submission.submission, submission.blob) >= share:
        return OpinionNeed(share=share)
    return OpinionNeed(because, share) if count_opinions(decision, submission) else OpinionNeed()


def count_opinions(decision: RunView, submission: SubmissionRow) -> int:
    """The number of validator owners that could still judge a submission."""
    return len(set(_list_able(decision)) - set(_list_heard(decision, submission)))


def list_forsaken(decision: Decision, most: int) -> list[JobRow]:
    """Jobs for which no validator is available to give another opinion.

    A validator judges a claim within `claim_s`. So no verdict is expected from an owner that could have claimed that
    long and has given no verdict on any job since. One that is busy gives verdicts, and is waited for.
    """
    jobs = list_unheard(decision.connection, decision.now_ms - 1000 * decision.params.claim_s, most)
    if not jobs:
        return []
    heard = {owner: find_validator(decision.connection, owner).heard_ms for owner in set(_list_able(decision))}
    return [job for job in jobs if not _is_awaited(decision, job, heard)]


def _is_awaited(decision: Decision, job: JobRow, heard: Mapping[str, int]) -> bool:
    """Whether some owner that could judge a job has given a verdict since the job is waiting."""
    submission = require_row(find_submission(decision.connection, job.submission), "every job has a submission")
    spent = set(_list_heard(decision, submission))
    return any(heard_ms > job.since_ms for owner, heard_ms in heard.items() if owner not in spent)


def refuse_early(decision: RunView, owner: str) -> None:
    """Reject an appeal that follows the owner's last one too soon."""
    last, every_s = last_appeal(decision.connection, owner), decision.params.appeal_every_s
    if last and decision.now_ms < (next_ms := last + 1000 * every_s):
        text = f"this owner appealed recently; it may appeal again from {show_time(next_ms)} on"
        raise ApiError(409, "too_early", text)


def refuse_vain(decision: RunView, submission: SubmissionRow) -> None:
    """Reject an appeal that cannot succeed, because there are too few validators."""
    needed = CONVICTIONS if submission.state == SubmissionState.HARD else 1
    able = count_opinions(decision, submission)
    if able < needed:
        num_named = len(set(_list_able(decision)))
        others, named = (count_things(number, "validator owner") for number in (needed, num_named))
        left = f"{f'only {able}' if able else 'none'} of the run's {named} is available"
        left = left if num_named else "the run has none now"
        text = f"an appeal takes {others} that did not judge it yet, and {left}"
        raise ApiError(409, "no_validators", f"{text}; its operator can name more, or decide the case")


def _choose_share(decision: Decision, owner: OwnerRow, verdict: Verdict) -> tuple[str, int]:
    """Why a second opinion is requested, and with which probability."""
    params = decision.params
    if is_watched(decision.connection, owner.owner):
        return "watched", MILLION
    is_last = is_shut_out(params, SubmissionState.SOFT, owner.strikes + STRIKE)
    if verdict is not Verdict.ACCEPTED and (is_last or not is_suspect(owner.strikes)):
        return "rejected", params.reject_share
    return "drawn", params.second_share


def _list_able(decision: RunView) -> Iterator[str]:
    for key in decision.params.validators:
        for row in list_named(decision.connection, key):
            try:
                yield require_validator(decision, row.node).owner.owner
            except ApiError:
                continue  # it may not judge now: banned, limited, left


def _list_heard(decision: RunView, submission: SubmissionRow) -> Iterator[str]:
    """The owners that judged it, and its own owner."""
    yield submission.owner
    for vote in list_verdicts(decision.connection, submission.submission):
        node = require_row(find_node(decision.connection, vote.validator), "every verdict has a node")
        yield node.owner


def read_votes(rows: Sequence[VerdictRow]) -> list[Vote]:
    """Verdicts in the form that the rules use."""
    return [Vote(Verdict(row.verdict), bool(row.crashed), (row.tokens, row.signals)) for row in rows]


def grade_verdicts(decision: Decision, submission: SubmissionRow, rows: Sequence[VerdictRow]) -> None:
    """Grade the verdicts on a submission by their majority, if it is unambiguous."""
    votes = read_votes(rows)
    agreed = list_majority(votes)
    majority = [row for row, is_one in zip(rows, agreed, strict=True) if is_one]
    if not majority or not all(row.sure for row in majority):
        return
    side = ActualOutcome.GOOD if majority[0].verdict == Verdict.ACCEPTED else ActualOutcome.BAD
    clear = [(row, is_one) for row, is_one in zip(rows, agreed, strict=True) if is_clear(row)]
    _record_grades(decision, submission, side, {row.validator: right for row, right in clear}, by="verdicts")


def grade_appeal(
    decision: Decision, submission: SubmissionRow, rows: Sequence[VerdictRow], state: SubmissionState
) -> None:
    """Grade all verdicts on a submission by the result of its appeal, if more than half clearly support it.

    Two against two is no majority: someone lied, and it is unknown who.
    """
    clear = [row for row in rows if is_clear(row)]
    prevailing = [row for row in clear if agrees(Verdict(row.verdict), state)]
    if 2 * len(prevailing) <= len(clear) or not all(row.sure for row in prevailing):
        return
    side = ActualOutcome.GOOD if state is SubmissionState.ACCEPTED else ActualOutcome.BAD
    _record_grades(decision, submission, side, {row.validator: is_right(row, side) for row in clear}, by="appeal")


def limit_silent(decision: Decision, submission: SubmissionRow, rows: Sequence[VerdictRow]) -> None:
    """Limit validators that abstained on this submission and on too many others that were accepted."""
    for row in rows:
        node = require_row(find_node(decision.connection, row.validator), "every verdict has a validator")
        owner = require_row(find_owner(decision.connection, node.owner), "every node has an owner")
        if is_clear(row) or owner.standing in (Standing.LIMITED, Standing.BANNED):
            continue
        if find_validator(decision.connection, owner.owner).silence >= SILENT_AT:
            reason = f"says nothing of too much that others could judge, the last one {submission.submission}"
            decision.append(owner.owner, NodeStanding(reason=reason, standing=Standing.LIMITED))


def grade_by_canary(
    decision: Decision, submission: SubmissionRow, rows: Sequence[VerdictRow], side: ActualOutcome
) -> None:
    """Grade the verdicts on work of a canary, which was certainly good or bad."""
    right = {row.validator: is_right(row, side) for row in rows if is_clear(row)}
    _record_grades(decision, submission, side, right, by="canary")


def is_clear(row: VerdictRow) -> bool:
    """Whether a verdict is not inconclusive."""
    return row.verdict == Verdict.ACCEPTED or row.verdict in REJECTIONS


def is_right(row: VerdictRow, side: ActualOutcome) -> bool:
    """Whether a clear verdict matches what the work was."""
    return (row.verdict == Verdict.ACCEPTED) is (side is ActualOutcome.GOOD)


def _record_grades(
    decision: Decision, submission: SubmissionRow, side: ActualOutcome, right: Mapping[str, bool], *, by: str
) -> None:
    found = [_grade(decision, submission, side, validator, is_right) for validator, is_right in right.items()]
    grades = [grade for grade in found if grade is not None]
    if not grades:
        return
    decision.append(submission.submission, VerdictGrades(by=by, grades=tuple(grades), side=side.value))
    for grade in grades:
        if not grade.right:
            score = grade.good if side is ActualOutcome.GOOD else grade.bad
            _punish_owner(decision, submission, grade.owner, score)


def _grade(
    decision: Decision, submission: SubmissionRow, side: ActualOutcome, validator: str, right: bool
) -> VerdictGrade | None:
    """The grade of a verdict and its owner's new scores; None if it already has this grade.

    A grade that turned out to be wrong is reverted.
    """
    node = require_row(find_node(decision.connection, validator), "every verdict has a validator")
    before = find_grade(decision.connection, submission.submission, node.owner)
    if before is not None and bool(before.correct) is right:
        return None
    record = find_validator(decision.connection, node.owner)
    scores = {ActualOutcome.GOOD.value: record.good, ActualOutcome.BAD.value: record.bad}
    if before is not None:
        scores[before.side] = undo_score(scores[before.side], right=bool(before.correct))
    scores[side.value] = next_score(scores[side.value], right=right)
    return VerdictGrade(owner=node.owner, right=1 if right else 0, validator=validator, **scores)


def _punish_owner(decision: Decision, submission: SubmissionRow, name: str, score: int) -> None:
    owner = require_row(find_owner(decision.connection, name), "every validator has an owner")
    if owner.standing == Standing.BANNED:
        return
    reason = f"its verdicts are wrong too often, the last one on {submission.submission}"
    if score >= BANNED_AT:
        burn_credit(decision, submission, name, BOND)
        decision.append(name, Ban(reason=reason, target=name))
        void_work(decision, name)
    elif score >= LIMITED_AT and owner.standing != Standing.LIMITED:
        decision.append(name, NodeStanding(reason=reason, standing=Standing.LIMITED))
