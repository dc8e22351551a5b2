"""Evidence that owners use other weights than they state, by owner and by owner of the validators that found it.

It follows from the odds that verdicts on accepted work state. A ban ends it, and so does its end: what is found between
them concerns an appeal, and an owner that returns starts from zero.
"""

from typing import NamedTuple

from sqlalchemy import Connection

from shoal.coordinator.rules.suspicion import LINE, Suspicion, read_suspicion
from shoal.coordinator.state.members import find_node
from shoal.coordinator.state.queue import find_job
from shoal.coordinator.state.run import read_run
from shoal.coordinator.state.submissions import find_submission
from shoal.ledger import db
from shoal.ledger.event import Event
from shoal.protocol.events import read_ban, read_body
from shoal.protocol.messages import VerdictStatement
from shoal.protocol.params import count_drawn


class SuspicionRow(NamedTuple):
    """What one owner of validators has found about the work of one owner."""

    owner: str
    judge: str
    """owner of the validators"""
    submissions: int
    """that it weighed"""
    wealth: str
    evidence: int
    """mean wealth"""
    leader: str
    """rival with the most"""


SUSPICION = db.define_table("suspicion", SuspicionRow, key=("owner", "judge"))


def find_suspicion(connection: Connection, owner: str, judge: str) -> SuspicionRow | None:
    return db.find_row(connection, SuspicionRow, owner=owner, judge=judge)


def list_proven(connection: Connection, owner: str) -> list[SuspicionRow]:
    """The findings on an owner's work that are sufficient, strongest first."""
    condition = "WHERE owner = :owner AND evidence >= :line ORDER BY evidence DESC, judge"
    return db.list_rows(connection, SuspicionRow, condition, owner=owner, line=LINE)


def weigh_odds(event: Event, connection: Connection) -> None:
    """val.verdict, before it changes the job"""
    said = read_body(event, VerdictStatement)
    if not said.odds:
        return
    submission, job = find_submission(connection, said.submission), find_job(connection, said.submission)
    node = find_node(connection, event.actor)
    if submission is None or job is None or node is None:
        raise ValueError("verdict on an unknown submission, or by an unknown node")
    old = find_suspicion(connection, submission.owner, node.owner)
    found = read_suspicion(old.wealth) if old is not None else Suspicion({})
    rollouts = count_drawn(job.check_ppm, submission.count * read_run(connection).params.group_size)
    found = found.weigh({own.rival: own.odds for own in said.odds}, rollouts)
    row = SuspicionRow(
        submission.owner,
        node.owner,
        1 + (0 if old is None else old.submissions),
        found.to_text(),
        found.evidence,
        found.leader,
    )
    db.replace_rows(connection, SUSPICION, row._asdict())


def drop_suspicion(event: Event, connection: Connection) -> None:
    """ban, unban"""
    db.execute(connection, "DELETE FROM suspicion WHERE owner = :owner", owner=read_ban(event).target)
