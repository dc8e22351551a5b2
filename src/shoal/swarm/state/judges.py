"""Validators and their verdicts: which submissions needed a second opinion, and how often an owner was wrong.

A verdict is graded once the truth of its submission is plain, by other verdicts or by a canary, and graded anew if a
canary shows that the others were wrong.
"""

from typing import NamedTuple

from sqlalchemy import Column, Connection, Text

from shoal.swarm.db import INT64, define_table
from shoal.swarm.event import Event
from shoal.swarm.messages import Standing, SubmissionState, Verdict
from shoal.swarm.rules.trust import Side, halve_silence, next_silence
from shoal.swarm.sql import Sql, fetch_row, fetch_rows, insert_into, list_columns
from shoal.swarm.state.nodes import find_node
from shoal.swarm.state.verdicts import list_verdicts

DOUBT = define_table(
    "doubt",
    Column("submission", Text, primary_key=True),
    Column("because", Text, nullable=False),
    Column("share", INT64, nullable=False),
    Column("check_ppm", INT64, nullable=False),
)
JUDGE = define_table(
    "judge",
    Column("owner", Text, primary_key=True),
    Column("good", INT64, nullable=False),
    Column("bad", INT64, nullable=False),
    Column("graded", INT64, nullable=False),
    Column("wrong", INT64, nullable=False),
    Column("heard_ms", INT64, nullable=False),
    Column("silence", INT64, nullable=False),
)
GRADE = define_table(
    "grade",
    Column("submission", Text, primary_key=True),
    Column("owner", Text, primary_key=True),
    Column("side", Text, nullable=False),
    Column("correct", INT64, nullable=False),
)


class DoubtRow(NamedTuple):
    """Whether one verdict was enough for a submission; no row where nothing was drawn and nothing asked."""

    submission: str
    because: str
    """of a second opinion: drawn, rejected or watched; empty if none was needed"""
    share: int
    """in millionths, with which it was drawn"""
    check_ppm: int
    """share of rollouts that those who are asked look at, if the first verdict accepted it; 0 for all"""


class JudgeRow(NamedTuple):
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
    """how much more often it said nothing of what others accepted than it said something"""


class GradeRow(NamedTuple):
    """What a verdict turned out to be."""

    submission: str
    owner: str
    """of the validator"""
    side: str
    correct: int


_SELECT_DOUBT = Sql(f"SELECT {list_columns(DOUBT)} FROM doubt WHERE submission = :submission")
_SELECT_DRAWN = Sql(
    "SELECT d.submission, s.blob, d.share, d.because FROM doubt d JOIN submission s ON s.submission = d.submission "
    "WHERE d.share > 0 AND d.share < 1000000 ORDER BY d.submission"
)
_SELECT_JUDGE = Sql(f"SELECT {list_columns(JUDGE)} FROM judge WHERE owner = :owner")
_SELECT_WRONG = Sql(f"SELECT {list_columns(JUDGE)} FROM judge WHERE wrong > 0 ORDER BY wrong DESC, owner LIMIT :most")
_SELECT_GRADE = Sql(f"SELECT {list_columns(GRADE)} FROM grade WHERE submission = :submission AND owner = :owner")
_INSERT_DOUBT = insert_into(DOUBT)
_SET_GRADE = Sql(
    "INSERT INTO grade (submission, owner, side, correct) VALUES (:submission, :owner, :side, :correct) "
    "ON CONFLICT (submission, owner) DO UPDATE SET side = excluded.side, correct = excluded.correct"
)
_SET_JUDGE = Sql(
    "INSERT INTO judge (owner, good, bad, graded, wrong, heard_ms, silence) "
    "VALUES (:owner, :good, :bad, :graded, :wrong, 0, 0) "
    "ON CONFLICT (owner) DO UPDATE SET good = excluded.good, bad = excluded.bad, graded = excluded.graded, "
    "wrong = excluded.wrong"
)
_HEAR_JUDGE = Sql(
    "INSERT INTO judge (owner, good, bad, graded, wrong, heard_ms, silence) "
    "VALUES (:owner, 0, 0, 0, 0, :heard_ms, 0) "
    "ON CONFLICT (owner) DO UPDATE SET heard_ms = excluded.heard_ms"
)
_SET_SILENCE = Sql("UPDATE judge SET silence = :silence WHERE owner = :owner")
_FORGIVE = Sql("UPDATE judge SET good = 0, bad = 0, silence = 0 WHERE owner = :owner")


class DrawRow(NamedTuple):
    """A draw that was made in secret, and what it is said to have been."""

    submission: str
    blob: str
    share: int
    because: str


def find_doubt(connection: Connection, submission: str) -> DoubtRow | None:
    """Whether a second opinion was asked for, or drawn not to be; None if neither."""
    return fetch_row(connection, _SELECT_DOUBT, DoubtRow, submission=submission)


def list_draws(connection: Connection) -> list[DrawRow]:
    """All draws of the run."""
    return fetch_rows(connection, _SELECT_DRAWN, DrawRow)


def find_judge(connection: Connection, owner: str) -> JudgeRow:
    """The record of an owner of validators, an empty one if it has none."""
    return fetch_row(connection, _SELECT_JUDGE, JudgeRow, owner=owner) or JudgeRow(owner, 0, 0, 0, 0, 0, 0)


def list_wrong(connection: Connection, most: int) -> list[JudgeRow]:
    """Owners whose verdicts were wrong, the worst first."""
    return fetch_rows(connection, _SELECT_WRONG, JudgeRow, most=most)


def find_grade(connection: Connection, submission: str, owner: str) -> GradeRow | None:
    """What the verdict of an owner on a submission turned out to be; None if that is not known."""
    return fetch_row(connection, _SELECT_GRADE, GradeRow, submission=submission, owner=owner)


def hear_judge(event: Event, connection: Connection) -> None:
    """val.verdict"""
    node = find_node(connection, event.actor)
    if node is None:
        raise ValueError("a verdict of a node that never joined")
    _HEAR_JUDGE.run(connection, {"owner": node.owner, "heard_ms": event.time_ms})


def add_doubt(event: Event, connection: Connection) -> None:
    """val.doubt"""
    row = {name: event.content[name] for name in ("because", "share", "check_ppm")}
    _INSERT_DOUBT.run(connection, {"submission": event.subject, **row})


def note_spared(event: Event, connection: Connection) -> None:
    """sub.outcome of what one verdict decided by the draw"""
    if share := event.content["spared"]:
        row = {"submission": event.subject, "because": "", "share": share, "check_ppm": 0}
        _INSERT_DOUBT.run(connection, row)


def add_grades(event: Event, connection: Connection) -> None:
    """val.grade"""
    side = Side(event.content["side"])
    for grade in event.content["grades"]:
        owner, correct = grade["owner"], grade["right"]
        before, judge = find_grade(connection, event.subject, owner), find_judge(connection, owner)
        scores = {name: grade[name] for name in ("good", "bad")}
        counts = {"graded": judge.graded, "wrong": judge.wrong + (1 - correct)}
        if before is None:
            counts["graded"] += 1
        else:
            counts["wrong"] -= 1 - before.correct
        _SET_JUDGE.run(connection, {"owner": owner, **scores, **counts})
        _SET_GRADE.run(
            connection, {"submission": event.subject, "owner": owner, "side": side.value, "correct": correct}
        )


def note_silence(event: Event, connection: Connection) -> None:
    """sub.outcome: who said nothing of what others accepted, and who said something"""
    content = event.content
    if content["state"] == SubmissionState.VOID:
        return
    for vote in list_verdicts(connection, event.subject):
        speaks = vote.verdict != Verdict.INCONCLUSIVE
        if vote.appeal == content["appeal"] and (speaks or content["state"] == SubmissionState.ACCEPTED):
            node = find_node(connection, vote.validator)
            assert node is not None, "a verdict is of a node"
            silence = next_silence(find_judge(connection, node.owner).silence, speaks=speaks)
            _SET_SILENCE.run(connection, {"owner": node.owner, "silence": silence})


def ease_silence(event: Event, connection: Connection) -> None:
    """node.standing"""
    if event.content["standing"] == Standing.LIMITED:
        silence = halve_silence(find_judge(connection, event.subject).silence)
        _SET_SILENCE.run(connection, {"owner": event.subject, "silence": silence})


def forgive_judge(event: Event, connection: Connection) -> None:
    """unban"""
    _FORGIVE.run(connection, {"owner": event.content["target"]})
