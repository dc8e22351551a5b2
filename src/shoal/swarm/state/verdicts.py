"""The verdicts: what each validator said of a submission, and what came of it."""

from typing import NamedTuple

from sqlalchemy import Column, Connection, Text

from shoal.swarm.db import INT64, define_table
from shoal.swarm.event import Event
from shoal.swarm.messages import Verdict
from shoal.swarm.rules.outcome import CRASH_CHECK
from shoal.swarm.rules.trust import is_sure
from shoal.swarm.sql import Sql, fetch_row, fetch_rows, insert_into, list_columns

VERDICT = define_table(
    "verdict",
    Column("submission", Text, primary_key=True),
    Column("round", INT64, primary_key=True, autoincrement=False),
    Column("validator", Text, nullable=False),
    Column("verdict", Text, nullable=False),
    Column("tokens", INT64, nullable=False),
    Column("crashed", INT64, nullable=False),
    Column("appeal", INT64, nullable=False),
    Column("time_ms", INT64, nullable=False),
    Column("seq", INT64, nullable=False),
    Column("state", Text, nullable=False),
    Column("paid", INT64, nullable=False),
    Column("signals", Text, nullable=False),
    Column("sure", INT64, nullable=False),
)


class VerdictRow(NamedTuple):
    """A validator's word."""

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
    """of the submission right after it"""
    paid: int
    """to the submission's owner by the outcome that it brought"""
    signals: str
    """of who accepts: a 1 or a 0 for each group, whether it has a signal"""
    sure: int
    """1 if its numbers are so far from their thresholds that no honest validator could find the opposite"""


_SELECT = Sql(f"SELECT {list_columns(VERDICT)} FROM verdict WHERE submission = :submission ORDER BY round")
_SELECT_SUBMISSION = Sql("SELECT state FROM submission WHERE submission = :submission")
_INSERT = insert_into(VERDICT)
_SET_RESULT = Sql("UPDATE verdict SET state = :state, paid = :paid WHERE submission = :submission AND round = :round")


def list_verdicts(connection: Connection, submission: str) -> list[VerdictRow]:
    return fetch_rows(connection, _SELECT, VerdictRow, submission=submission)


def record_verdict(event: Event, connection: Connection, *, appeal: int) -> None:
    """A verdict of the job's round; `appeal` is 1 if it is of an appeal."""
    content = event.content
    row = {name: content[name] for name in ("submission", "round", "verdict", "tokens")}
    row |= {"validator": event.actor, "time_ms": event.time_ms, "seq": event.seq, "appeal": appeal}
    crashed = any(finding["check"] == CRASH_CHECK for finding in content["findings"])
    row |= {"crashed": int(crashed and content["verdict"] == "inconclusive"), "paid": 0}
    row |= {
        "signals": "".join(str(int(group["signal"])) for group in content["groups"]),
        "sure": int(is_sure(content["findings"], accepts=content["verdict"] == Verdict.ACCEPTED)),
    }
    state = fetch_row(connection, _SELECT_SUBMISSION, str, submission=content["submission"])
    _INSERT.run(connection, {**row, "state": state})


def note_result(event: Event, connection: Connection) -> None:
    """What the verdict of the outcome's round brought."""
    values = {name: event.content[name] for name in ("state", "paid", "round")}
    _SET_RESULT.run(connection, {**values, "submission": event.subject})
