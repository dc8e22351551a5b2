"""Canaries: seals that the operator noted, and how validators did on what a canary handed in.

seal: sealed -> opened;   submission of a canary, once it is revealed:
    bad: caught | missed | unseen       good: passed | wronged | unseen

Until its seal is opened a canary stands nowhere here: it is an owner, with nodes, leases and submissions as any other.
"""

from typing import NamedTuple

from sqlalchemy import Column, Connection, Index, Text

from shoal.swarm.db import INT64, define_table
from shoal.swarm.event import Event
from shoal.swarm.messages import CanaryGrade
from shoal.swarm.seals import find_seal
from shoal.swarm.sql import Sql, fetch_number, fetch_row, fetch_rows, insert_into, list_columns
from shoal.swarm.state.nodes import first_join
from shoal.swarm.state.run import read_run

CANARY_STATES = ("caught", "missed", "passed", "wronged", "unseen")
SEAL = define_table(
    "seal",
    Column("seal", Text, primary_key=True),
    Column("seq", INT64, nullable=False),
    Column("owner", Text, nullable=False, index=True),
)
CANARY = define_table(
    "canary",
    Column("submission", Text, primary_key=True),
    Column("owner", Text, nullable=False, index=True),
    Column("state", Text, nullable=False),
    Column("missed_by", Text, nullable=False),
    Column("trained", INT64, nullable=False),
    Column("graded_ms", INT64, nullable=False),
    Column("good", INT64, nullable=False),
)
Index("canary_state", CANARY.c.state, CANARY.c.graded_ms)


class SealRow(NamedTuple):
    """A seal."""

    seal: str
    seq: int
    """of the event that noted it"""
    owner: str
    """that it turned out to be; empty while it is closed"""


class CanaryRow(NamedTuple):
    """A submission that was known to be bad, or to be good."""

    submission: str
    owner: str
    state: str
    """caught: it was rejected, and nobody accepted it; missed: somebody did; unseen: nobody judged it.
    passed: it was accepted, and nobody rejected it; wronged: somebody did"""
    missed_by: str
    """validators that were wrong about it, separated by commas"""
    trained: int
    """step whose batch had been cut with it; 0 for none"""
    graded_ms: int
    good: int

    @property
    def validators(self) -> tuple[str, ...]:
        return tuple(self.missed_by.split(",")) if self.missed_by else ()

    @property
    def grade(self) -> CanaryGrade:
        return CanaryGrade(
            submission=self.submission,
            state=self.state,
            missed_by=self.validators,
            trained=self.trained,
            good=self.good,
        )


_CANARIES = f"SELECT {list_columns(CANARY)} FROM canary"
_SELECT_SEAL = Sql(f"SELECT {list_columns(SEAL)} FROM seal WHERE seal = :seal")
_SELECT_OPENED = Sql("SELECT count(*) FROM seal WHERE owner = :owner")
_SELECT_OWNER = Sql(f"{_CANARIES} WHERE owner = :owner ORDER BY length(submission), submission")
_SELECT_MISSED = Sql(
    f"{_CANARIES} WHERE state IN ('missed', 'wronged') ORDER BY graded_ms DESC, submission LIMIT :most"
)
_COUNT_STATE = Sql("SELECT count(*) FROM canary WHERE state = :state")
_LAST_CAUGHT = Sql("SELECT max(graded_ms) FROM canary WHERE state = 'caught'")
_INSERT_SEAL, _INSERT_CANARY = insert_into(SEAL), insert_into(CANARY)
_OPEN = Sql("UPDATE seal SET owner = :owner WHERE seal = :seal")


def find_sealed(connection: Connection, seal: str) -> SealRow | None:
    return fetch_row(connection, _SELECT_SEAL, SealRow, seal=seal)


def is_revealed(connection: Connection, owner: str) -> bool:
    """Whether an owner is known to be a canary."""
    return bool(fetch_number(connection, _SELECT_OPENED, owner=owner))


def list_grades(connection: Connection, owner: str) -> list[CanaryRow]:
    """What was graded of a canary, in order."""
    return fetch_rows(connection, _SELECT_OWNER, CanaryRow, owner=owner)


def list_missed(connection: Connection, most: int) -> list[CanaryRow]:
    """Submissions about which a validator was wrong though it is known what they were, the newest ones."""
    return fetch_rows(connection, _SELECT_MISSED, CanaryRow, most=most)


def count_graded(connection: Connection, state: str) -> int:
    """Submissions of canaries that were caught, missed, passed, wronged or unseen."""
    return fetch_number(connection, _COUNT_STATE, state=state)


def last_caught(connection: Connection) -> int:
    """When a canary was last found to be caught; 0 for never."""
    return fetch_number(connection, _LAST_CAUGHT)


def add_seals(event: Event, connection: Connection) -> None:
    """canary.seal"""
    rows = [{"seal": seal, "seq": event.seq, "owner": ""} for seal in event.content["seals"]]
    _INSERT_SEAL.run_many(connection, rows)


def open_seal(event: Event, connection: Connection) -> None:
    """canary.reveal"""
    signature = event.content["canary"]["signature"]
    seal = find_seal(read_run(connection).run, event.subject, signature)
    row = None if seal is None else find_sealed(connection, seal)
    if row is None or row.owner or not row.seq < first_join(connection, event.subject):
        raise ValueError("a canary without a seal from before it joined")
    _OPEN.run(connection, {"seal": row.seal, "owner": event.subject})


def add_grade(event: Event, connection: Connection) -> None:
    """canary.grade"""
    row = {name: event.content[name] for name in ("good", "owner", "state", "trained")}
    row |= {"submission": event.subject, "missed_by": ",".join(event.content["missed_by"])}
    _INSERT_CANARY.run(connection, {**row, "graded_ms": event.time_ms})
