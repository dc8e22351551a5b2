"""Canaries: seals that the operator recorded, and how validators judged a canary's submissions.

seal: sealed -> opened;   submission of a canary, once it is revealed:
    bad: caught | missed | unseen       good: passed | wronged | unseen

Until its seal is opened, a canary does not appear here: it is an owner with nodes, leases and submissions like others.
"""

from typing import NamedTuple

from sqlalchemy import Connection, Index

from shoal.coordinator.state.members import first_join
from shoal.coordinator.state.run import read_run
from shoal.ledger import db
from shoal.ledger.event import Event
from shoal.protocol.beacon import find_seal
from shoal.protocol.events import CanaryGraded, read_body
from shoal.protocol.messages import CanaryGrade, Command

CANARY_STATES = ("caught", "missed", "passed", "wronged", "unseen")


class SealRow(NamedTuple):
    """A seal."""

    seal: str
    seq: int
    """number of the event that recorded it"""
    owner: str
    """owner that it was opened for; empty while it is sealed"""


SEAL = db.define_table("seal", SealRow, key="seal", index="owner")


class CanaryRow(NamedTuple):
    """A submission that was known to be bad, or good."""

    submission: str
    owner: str
    state: str
    """caught: rejected, and accepted by no validator; missed: accepted by some; unseen: not judged.
    passed: accepted, and rejected by no validator; wronged: rejected by some"""
    missed_by: str
    """validators that were wrong about it, separated by commas"""
    trained: int
    """step whose batch was already cut with it; 0 for none"""
    graded_ms: int
    good: int

    @property
    def validators(self) -> tuple[str, ...]:
        return tuple(self.missed_by.split(",")) if self.missed_by else ()

    @property
    def grade(self) -> CanaryGrade:
        missed_by = self.validators
        return CanaryGrade(
            submission=self.submission, state=self.state, missed_by=missed_by, trained=self.trained, good=self.good
        )


CANARY = db.define_table("canary", CanaryRow, key="submission", index="owner")
Index("canary_state", CANARY.c.state, CANARY.c.graded_ms)


def find_sealed(connection: Connection, seal: str) -> SealRow | None:
    return db.find_row(connection, SealRow, seal=seal)


def is_revealed(connection: Connection, owner: str) -> bool:
    """Whether an owner is known to be a canary."""
    return bool(db.fetch_number(connection, "SELECT count(*) FROM seal WHERE owner = :owner", owner=owner))


def list_grades(connection: Connection, owner: str) -> list[CanaryRow]:
    """The graded submissions of a canary, in order."""
    return db.list_rows(
        connection, CanaryRow, "WHERE owner = :owner ORDER BY length(submission), submission", owner=owner
    )


def list_missed(connection: Connection, most: int) -> list[CanaryRow]:
    """The newest canary submissions about which a validator was wrong."""
    condition = "WHERE state IN ('missed', 'wronged') ORDER BY graded_ms DESC, submission LIMIT :most"
    return db.list_rows(connection, CanaryRow, condition, most=most)


def count_graded(connection: Connection, state: str) -> int:
    """Number of canary submissions in a state: caught, missed, passed, wronged or unseen."""
    return db.fetch_number(connection, "SELECT count(*) FROM canary WHERE state = :state", state=state)


def last_caught(connection: Connection) -> int:
    """When a canary was last caught; 0 for never."""
    return db.fetch_number(connection, "SELECT max(graded_ms) FROM canary WHERE state = 'caught'")


def add_seals(event: Event, connection: Connection) -> None:
    """canary.seal"""
    rows = [{"seal": seal, "seq": event.seq, "owner": ""} for seal in read_body(event, Command).seals]
    db.insert_rows(connection, SEAL, *rows)


def open_seal(event: Event, connection: Connection) -> None:
    """canary.reveal"""
    canary = read_body(event, Command).canary
    seal = None if canary is None else find_seal(read_run(connection).run, event.subject, canary.signature)
    row = None if seal is None else find_sealed(connection, seal)
    if row is None or row.owner or not row.seq < first_join(connection, event.subject):
        raise ValueError("canary was not sealed before it joined")
    db.update_rows(connection, SEAL, {"owner": event.subject}, seal=row.seal)


def add_grade(event: Event, connection: Connection) -> None:
    """canary.grade"""
    body = read_body(event, CanaryGraded)
    row = {**dict(body), "submission": event.subject, "missed_by": ",".join(body.missed_by)}
    db.insert_rows(connection, CANARY, {**row, "graded_ms": event.time_ms})
