"""Credit that is not free yet, what was taken, appeals, and planted submissions.

hold: held -> released | burned;   bond on its way back: waiting -> released | burned
appeal: open -> upheld | reversed;   canary: planted -> caught | missed | unseen
"""

from typing import NamedTuple

from sqlalchemy import Column, Connection, Index, Text

from shoal.swarm.db import INT64, define_table
from shoal.swarm.event import Event
from shoal.swarm.messages import SubmissionState
from shoal.swarm.state.sql import Sql, fetch_number, fetch_row, fetch_rows, insert_into, list_columns

HOLD = define_table(
    "hold",
    Column("seq", INT64, primary_key=True, autoincrement=False),
    Column("line", INT64, primary_key=True, autoincrement=False),
    Column("owner", Text, nullable=False),
    Column("amount", INT64, nullable=False),
    Column("made_ms", INT64, nullable=False),
    Column("number", INT64, nullable=False),
    Column("state", Text, nullable=False),
)
Index("hold_due", HOLD.c.state, HOLD.c.made_ms)
Index("hold_owner", HOLD.c.owner, HOLD.c.state)
BOND = define_table(
    "bond",
    Column("seq", INT64, primary_key=True, autoincrement=False),
    Column("owner", Text, nullable=False),
    Column("amount", INT64, nullable=False),
    Column("free_ms", INT64, nullable=False),
    Column("state", Text, nullable=False),
)
LOSS = define_table(
    "loss",
    Column("submission", Text, primary_key=True),
    Column("owner", Text, primary_key=True),
    Column("amount", INT64, nullable=False),
)
APPEAL = define_table(
    "appeal",
    Column("submission", Text, primary_key=True),
    Column("owner", Text, nullable=False, index=True),
    Column("opened_ms", INT64, nullable=False),
    Column("fee", INT64, nullable=False),
    Column("state", Text, nullable=False),
)
CANARY = define_table(
    "canary",
    Column("submission", Text, primary_key=True),
    Column("planted_ms", INT64, nullable=False),
    Column("state", Text, nullable=False),
    Column("decided_ms", INT64, nullable=False),
)


class HoldRow(NamedTuple):
    """Pay that is pending."""

    seq: int
    line: int
    owner: str
    amount: int
    made_ms: int
    number: int
    """how many submissions the owner had accepted when it was made"""
    state: str


class BondRow(NamedTuple):
    """A bond on its way back to its owner."""

    seq: int
    owner: str
    amount: int
    free_ms: int
    state: str


class AppealRow(NamedTuple):
    """An owner's appeal."""

    submission: str
    owner: str
    opened_ms: int
    fee: int
    state: str


class CanaryRow(NamedTuple):
    """A planted submission."""

    submission: str
    planted_ms: int
    state: str
    decided_ms: int


_HOLDS = f"SELECT {list_columns(HOLD, 'h.')} FROM hold h"
_SELECT_RIPE = Sql(
    f"{_HOLDS} JOIN owner o ON o.owner = h.owner WHERE h.state = 'held' AND h.made_ms <= :challenged_ms "
    "AND o.standing <> 'banned' AND (h.made_ms <= :longest_ms OR o.accepted - h.number >= :more) "
    "ORDER BY h.made_ms, h.seq, h.line LIMIT :most"
)
_SELECT_FREE = Sql(
    f"SELECT {list_columns(BOND, 'b.')} FROM bond b JOIN owner o ON o.owner = b.owner WHERE b.state = 'waiting' "
    "AND b.free_ms <= :now_ms AND o.standing <> 'banned' ORDER BY b.free_ms, b.seq LIMIT :most"
)
_SELECT_BONDS = Sql(f"SELECT {list_columns(BOND)} FROM bond WHERE owner = :owner AND state = 'waiting' ORDER BY seq")
_SELECT_APPEAL = Sql(f"SELECT {list_columns(APPEAL)} FROM appeal WHERE submission = :submission")
_LAST_APPEAL = Sql("SELECT max(opened_ms) FROM appeal WHERE owner = :owner")
_SELECT_LOSS = Sql("SELECT amount FROM loss WHERE submission = :submission AND owner = :owner")
_SELECT_CANARY = Sql(f"SELECT {list_columns(CANARY)} FROM canary WHERE submission = :submission")
_SELECT_MISSED = Sql(f"SELECT {list_columns(CANARY)} FROM canary WHERE state = 'missed' ORDER BY decided_ms LIMIT 10")
_LAST_CAUGHT = Sql("SELECT max(decided_ms) FROM canary WHERE state = 'caught'")
_INSERT_HOLD, _INSERT_BOND, _INSERT_LOSS = insert_into(HOLD), insert_into(BOND), insert_into(LOSS)
_INSERT_APPEAL, _INSERT_CANARY = insert_into(APPEAL), insert_into(CANARY)
_RELEASE_HOLD = Sql("UPDATE hold SET state = 'released' WHERE seq = :seq AND line = :line AND state = 'held'")
_RESET_STAKED = Sql("UPDATE owner SET staked = 0 WHERE owner = :owner")
_RELEASE_BOND = Sql("UPDATE bond SET state = 'released' WHERE seq = :seq AND state = 'waiting'")
_BURN_HOLDS = Sql("UPDATE hold SET state = 'burned' WHERE owner = :owner AND state = 'held'")
_BURN_BONDS = Sql("UPDATE bond SET state = 'burned' WHERE owner = :owner AND state = 'waiting'")
_END_APPEAL = Sql("UPDATE appeal SET state = :state WHERE submission = :submission AND state = 'open'")
_END_CANARY = Sql(
    "UPDATE canary SET state = :state, decided_ms = :time_ms WHERE submission = :submission AND state = 'planted'"
)


def list_ripe(connection: Connection, *, challenged_ms: int, longest_ms: int, more: int, most: int) -> list[HoldRow]:
    """Holds to release: made before `challenged_ms`, and `more` accepted since or made before `longest_ms`."""
    values = {"challenged_ms": challenged_ms, "longest_ms": longest_ms, "more": more, "most": most}
    return fetch_rows(connection, _SELECT_RIPE, HoldRow, **values)


def list_free(connection: Connection, now_ms: int, most: int) -> list[BondRow]:
    return fetch_rows(connection, _SELECT_FREE, BondRow, now_ms=now_ms, most=most)


def list_bonds(connection: Connection, owner: str) -> list[BondRow]:
    """Bonds of an owner that are on their way back."""
    return fetch_rows(connection, _SELECT_BONDS, BondRow, owner=owner)


def find_appeal(connection: Connection, submission: str) -> AppealRow | None:
    return fetch_row(connection, _SELECT_APPEAL, AppealRow, submission=submission)


def last_appeal(connection: Connection, owner: str) -> int:
    """When an owner last appealed; 0 for never."""
    return fetch_number(connection, _LAST_APPEAL, owner=owner)


def find_loss(connection: Connection, submission: str, owner: str) -> int:
    """What was taken from an owner because of a submission."""
    return fetch_number(connection, _SELECT_LOSS, submission=submission, owner=owner)


def find_canary(connection: Connection, submission: str) -> CanaryRow | None:
    return fetch_row(connection, _SELECT_CANARY, CanaryRow, submission=submission)


def list_missed(connection: Connection) -> list[CanaryRow]:
    """Planted submissions that were accepted, the first ones."""
    return fetch_rows(connection, _SELECT_MISSED, CanaryRow)


def last_caught(connection: Connection) -> int:
    """When a planted submission was last rejected; 0 for never."""
    return fetch_number(connection, _LAST_CAUGHT)


def add_holds(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    rows = [
        {"seq": event.seq, "line": line, "owner": hold["owner"], "amount": hold["amount"], "number": hold["number"]}
        for line, hold in enumerate(event.content["holds"])
    ]
    if rows:
        _INSERT_HOLD.run_many(connection, [{**row, "made_ms": event.time_ms, "state": "held"} for row in rows])


def release_holds(event: Event, connection: Connection) -> None:
    """credit.post"""
    rows = [{"seq": seq, "line": line} for seq, line in event.content["holds"]]
    if rows:
        _RELEASE_HOLD.run_many(connection, rows)


def move_bond(event: Event, connection: Connection) -> None:
    """stake.unbond"""
    content = event.content
    if content["state"] == "waiting":
        row = {"seq": event.seq, "owner": event.subject, "amount": content["amount"], "free_ms": content["free_ms"]}
        _INSERT_BOND.run(connection, {**row, "state": "waiting"})
        _RESET_STAKED.run(connection, {"owner": event.subject})
    else:
        _RELEASE_BOND.run(connection, {"seq": content["bond"]})


def burn_credit(event: Event, connection: Connection) -> None:
    """slash"""
    content = event.content
    if content["pending"]:
        _BURN_HOLDS.run(connection, {"owner": content["owner"]})
    _BURN_BONDS.run(connection, {"owner": content["owner"]})
    if content["rest"]:  # of a bond that was on its way: what is left stays on its way
        row = {"seq": event.seq, "owner": content["owner"], "amount": content["rest"], "free_ms": content["free_ms"]}
        _INSERT_BOND.run(connection, {**row, "state": "waiting"})
    _RESET_STAKED.run(connection, {"owner": content["owner"]})
    values = {"submission": event.subject, "owner": content["owner"], "amount": content["amount"]}
    _INSERT_LOSS.run(connection, values)


def add_appeal(event: Event, connection: Connection) -> None:
    """appeal"""
    fee = sum(posting.amount for posting in event.postings if posting.amount > 0)
    row = {"submission": event.content["submission"], "owner": event.actor, "opened_ms": event.time_ms, "fee": fee}
    _INSERT_APPEAL.run(connection, {**row, "state": "open"})


def end_appeal(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    state = "reversed" if event.content["state"] == SubmissionState.ACCEPTED else "upheld"
    _END_APPEAL.run(connection, {"submission": event.subject, "state": state})


def add_canary(event: Event, connection: Connection) -> None:
    """canary"""
    row = {"submission": f"s{event.seq}", "planted_ms": event.time_ms, "state": "planted", "decided_ms": 0}
    _INSERT_CANARY.run(connection, row)


def end_canary(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    state = event.content["state"]
    if state == SubmissionState.INCONCLUSIVE:
        found = "unseen"
    else:
        found = "missed" if state == SubmissionState.ACCEPTED else "caught"
    values = {"submission": event.subject, "state": found, "time_ms": event.time_ms}
    _END_CANARY.run(connection, values)
