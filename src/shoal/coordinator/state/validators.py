"""Validators: their verdicts, the results, required second opinions, and grades.

A verdict is graded once the truth about its submission is known, by other verdicts or by a canary, and graded again if
a canary shows that the others were wrong.
"""

from typing import NamedTuple

from sqlalchemy import Connection

from shoal.coordinator.rules.validator_trust import ActualOutcome, halve_silence, is_sure, next_silence
from shoal.coordinator.state.members import find_node
from shoal.coordinator.state.submissions import SubmissionRow
from shoal.ledger import db
from shoal.ledger.event import Event
from shoal.protocol.events import NodeStanding, SecondOpinion, SubmissionOutcome, VerdictGrades, read_ban, read_body
from shoal.protocol.messages import Standing, SubmissionState, Verdict, VerdictStatement
from shoal.protocol.outcome import CRASH_CHECK


class VerdictRow(NamedTuple):
    """A validator's verdict."""

    submission: str
    round: int
    validator: str
    verdict: str
    tokens: int
    crashed: int
    appeal: int
    time_ms: int
    seq: int
    state: str
    """state of the submission right after it"""
    paid: int
    """micro-credits to the submission's owner by the outcome that it caused"""
    signals: str
    """for an acceptance: a 1 or a 0 for each group, whether it has a signal"""
    sure: int
    """1 if its numbers are so far from their thresholds that no honest validator could find the opposite"""
    cpu_ms: int
    """CPU time of its validator"""


VERDICT = db.define_table("verdict", VerdictRow, key=("submission", "round"))


_SELECT_SUBMISSION = db.Sql("SELECT state FROM submission WHERE submission = :submission")


def list_verdicts(connection: Connection, submission: str) -> list[VerdictRow]:
    return db.list_rows(connection, VerdictRow, "WHERE submission = :submission ORDER BY round", submission=submission)


def is_convicted_by_odds(connection: Connection, submission: SubmissionRow) -> bool:
    """Whether the odds of several submissions convicted its owner, the last of them this one: no verdict on it did."""
    votes = [vote for vote in list_verdicts(connection, submission.submission) if not vote.appeal]
    return submission.state == SubmissionState.HARD and all(vote.verdict != Verdict.HARD for vote in votes)


def record_verdict(event: Event, connection: Connection, *, appeal: int) -> None:
    """Store a verdict of the job's round; `appeal` is 1 if it is on an appeal."""
    said = read_body(event, VerdictStatement)
    row = {"submission": said.submission, "round": said.round, "verdict": said.verdict.value, "tokens": said.tokens}
    row |= {"validator": event.actor, "time_ms": event.time_ms, "seq": event.seq, "appeal": appeal}
    crashed = any(finding.check == CRASH_CHECK for finding in said.findings)
    row |= {"crashed": int(crashed and said.verdict is Verdict.INCONCLUSIVE), "paid": 0, "cpu_ms": said.cpu_ms}
    row |= {
        "signals": "".join(str(int(group.signal)) for group in said.groups),
        "sure": int(is_sure(said.findings, accepts=said.verdict is Verdict.ACCEPTED)),
    }
    state = db.fetch_row(connection, _SELECT_SUBMISSION, str, submission=said.submission)
    db.insert_rows(connection, VERDICT, {**row, "state": state})


def note_result(event: Event, connection: Connection) -> None:
    """Store the result of the verdict in the outcome's round."""
    body = read_body(event, SubmissionOutcome)
    changes = {"state": body.state.value, "paid": body.paid}
    db.update_rows(connection, VERDICT, changes, submission=event.subject, round=body.round)


class OpinionNeedRow(NamedTuple):
    """Whether one verdict was sufficient for a submission; no row if nothing was drawn and nothing requested."""

    submission: str
    because: str
    """reason for a second opinion: drawn, rejected or watched; empty if none was needed"""
    share: int
    """probability of the draw, in millionths"""
    check_ppm: int
    """share of rollouts that further validators check, if the first verdict accepted it; 0 for all"""


DOUBT = db.define_table("doubt", OpinionNeedRow, key="submission")


class ValidatorRow(NamedTuple):
    """An owner of validators and its record."""

    owner: str
    good: int
    """score on work that was good"""
    bad: int
    """score on work that was bad"""
    graded: int
    wrong: int
    heard_ms: int
    """when it last gave a verdict"""
    silence: int
    """inconclusive verdicts on work that others accepted, minus clear ones; never below 0"""


JUDGE = db.define_table("judge", ValidatorRow, key="owner")


class GradeRow(NamedTuple):
    """The grade of a verdict."""

    submission: str
    owner: str
    """of the validator"""
    side: str
    correct: int


GRADE = db.define_table("grade", GradeRow, key=("submission", "owner"))


_SELECT_DRAWN = db.Sql(
    "SELECT d.submission, s.blob, d.share, d.because FROM doubt d JOIN submission s ON s.submission = d.submission "
    "WHERE d.share > 0 AND d.share < 1000000 ORDER BY d.submission"
)


class DrawRow(NamedTuple):
    """A secret draw, and its recorded result."""

    submission: str
    blob: str
    share: int
    because: str


def find_opinion_need(connection: Connection, submission: str) -> OpinionNeedRow | None:
    """Whether a second opinion was requested, or drawn as not needed; None if neither."""
    return db.find_row(connection, OpinionNeedRow, submission=submission)


def list_draws(connection: Connection) -> list[DrawRow]:
    """All draws of the run."""
    return db.fetch_rows(connection, _SELECT_DRAWN, DrawRow)


def find_validator(connection: Connection, owner: str) -> ValidatorRow:
    """The record of an owner of validators; an empty one if it has none."""
    return db.find_row(connection, ValidatorRow, owner=owner) or ValidatorRow(owner, 0, 0, 0, 0, 0, 0)


def find_grade(connection: Connection, submission: str, owner: str) -> GradeRow | None:
    """The grade of an owner's verdict on a submission; None if it is not graded."""
    return db.find_row(connection, GradeRow, submission=submission, owner=owner)


def note_verdict_time(event: Event, connection: Connection) -> None:
    """val.verdict"""
    node = find_node(connection, event.actor)
    if node is None:
        raise ValueError("verdict of a node that never joined")
    heard = find_validator(connection, node.owner)._replace(heard_ms=event.time_ms)
    db.replace_rows(connection, JUDGE, heard._asdict())


def add_opinion_need(event: Event, connection: Connection) -> None:
    """val.doubt"""
    db.insert_rows(connection, DOUBT, {"submission": event.subject, **dict(read_body(event, SecondOpinion))})


def note_single_verdict(event: Event, connection: Connection) -> None:
    """sub.outcome of a submission that one verdict decided because of the draw"""
    if share := read_body(event, SubmissionOutcome).spared:
        row = {"submission": event.subject, "because": "", "share": share, "check_ppm": 0}
        db.insert_rows(connection, DOUBT, row)


def add_grades(event: Event, connection: Connection) -> None:
    """val.grade"""
    body = read_body(event, VerdictGrades)
    side = ActualOutcome(body.side)
    for grade in body.grades:
        owner, correct = grade.owner, grade.right
        before, judge = find_grade(connection, event.subject, owner), find_validator(connection, owner)
        graded, wrong = judge.graded, judge.wrong + (1 - correct)
        if before is None:
            graded += 1
        else:
            wrong -= 1 - before.correct
        judge = judge._replace(good=grade.good, bad=grade.bad, graded=graded, wrong=wrong)
        db.replace_rows(connection, JUDGE, judge._asdict())
        db.replace_rows(connection, GRADE, GradeRow(event.subject, owner, side.value, correct)._asdict())


def note_silence(event: Event, connection: Connection) -> None:
    """sub.outcome: count inconclusive and clear verdicts on work that others accepted"""
    body = read_body(event, SubmissionOutcome)
    if body.state is SubmissionState.VOID:
        return
    for vote in list_verdicts(connection, event.subject):
        speaks = vote.verdict != Verdict.INCONCLUSIVE
        if vote.appeal == body.appeal and (speaks or body.state is SubmissionState.ACCEPTED):
            node = find_node(connection, vote.validator)
            assert node is not None, "every verdict has a node"
            silence = next_silence(find_validator(connection, node.owner).silence, speaks=speaks)
            db.update_rows(connection, JUDGE, {"silence": silence}, owner=node.owner)


def ease_silence(event: Event, connection: Connection) -> None:
    """node.standing"""
    if read_body(event, NodeStanding).standing is Standing.LIMITED:
        silence = halve_silence(find_validator(connection, event.subject).silence)
        db.update_rows(connection, JUDGE, {"silence": silence}, owner=event.subject)


def forgive_validator(event: Event, connection: Connection) -> None:
    """unban"""
    db.update_rows(connection, JUDGE, {"good": 0, "bad": 0, "silence": 0}, owner=read_ban(event).target)
