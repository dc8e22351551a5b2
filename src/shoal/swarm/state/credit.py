"""Credit that is not free yet, what was taken, and appeals.

hold: held -> ready -> released | burned, held -> released;   bond on its way back: waiting -> released | burned
both are frozen while their owner is banned, and can be burned then too
appeal: open -> upheld | reversed

Invariant: a hold is ready if its owner had enough more submissions accepted since, by the parameters as they are, and
held if not. So who looks each second for what time has freed finds it by an index, however much is held.
"""

from typing import NamedTuple

from sqlalchemy import Column, Connection, Index, Text

from shoal.swarm.db import INT64, define_table
from shoal.swarm.event import Event
from shoal.swarm.messages import SubmissionState
from shoal.swarm.sql import Sql, fetch_number, fetch_row, fetch_rows, insert_into, list_columns

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
Index("hold_due", HOLD.c.state, HOLD.c.made_ms, HOLD.c.seq, HOLD.c.line)
Index("hold_owner", HOLD.c.owner, HOLD.c.state, HOLD.c.number)
BOND = define_table(
    "bond",
    Column("seq", INT64, primary_key=True, autoincrement=False),
    Column("owner", Text, nullable=False),
    Column("amount", INT64, nullable=False),
    Column("free_ms", INT64, nullable=False),
    Column("state", Text, nullable=False),
    Column("request", Text, nullable=False),
)
Index("bond_due", BOND.c.state, BOND.c.free_ms, BOND.c.seq)
Index("bond_request", BOND.c.request)
Index("bond_owner", BOND.c.owner, BOND.c.state)
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
    """held, ready, frozen, released or burned"""


class BondRow(NamedTuple):
    """A bond on its way back to its owner."""

    seq: int
    owner: str
    amount: int
    free_ms: int
    state: str
    request: str
    """of the owner that wants it back; empty for what a slash left of one"""


class AppealRow(NamedTuple):
    """An owner's appeal."""

    submission: str
    owner: str
    opened_ms: int
    fee: int
    state: str


_SELECT_RIPE = Sql(
    f"SELECT {list_columns(HOLD)} FROM hold WHERE state = :state AND made_ms <= :until_ms "
    "ORDER BY made_ms, seq, line LIMIT :most"
)
_MORE = (
    "(SELECT CAST(json_extract(params, '$.hold_submissions') AS INTEGER) FROM run_state)",
    "(SELECT CAST(CAST(params AS jsonb) ->> 'hold_submissions' AS bigint) FROM run_state)",
)
_ENOUGH = "number <= (SELECT o.accepted FROM owner o WHERE o.owner = hold.owner) - "
_RIPEN = Sql(
    *(f"UPDATE hold SET state = 'ready' WHERE owner = :owner AND state = 'held' AND {_ENOUGH}{more}" for more in _MORE)
)
_GRADE = Sql(
    *(
        f"UPDATE hold SET state = CASE WHEN {_ENOUGH}{more} THEN 'ready' ELSE 'held' END "
        "WHERE state IN ('held', 'ready')"
        for more in _MORE
    )
)
_FREEZE_HOLDS = Sql("UPDATE hold SET state = 'frozen' WHERE owner = :owner AND state IN ('held', 'ready')")
_FREEZE_BONDS = Sql("UPDATE bond SET state = 'frozen' WHERE owner = :owner AND state = 'waiting'")
_THAW_HOLDS = Sql("UPDATE hold SET state = 'held' WHERE owner = :owner AND state = 'frozen'")
_THAW_BONDS = Sql("UPDATE bond SET state = 'waiting' WHERE owner = :owner AND state = 'frozen'")
_SELECT_FREE = Sql(
    f"SELECT {list_columns(BOND)} FROM bond WHERE state = 'waiting' AND free_ms <= :now_ms "
    "ORDER BY free_ms, seq LIMIT :most"
)
_SELECT_BONDS = Sql(
    f"SELECT {list_columns(BOND)} FROM bond WHERE owner = :owner AND state IN ('waiting', 'frozen') ORDER BY seq"
)
_SELECT_BOND = Sql(f"SELECT {list_columns(BOND)} FROM bond WHERE request = :request")
_SELECT_APPEAL = Sql(f"SELECT {list_columns(APPEAL)} FROM appeal WHERE submission = :submission")
_COUNT_APPEALS = Sql("SELECT count(*) FROM appeal WHERE owner = :owner AND state = 'open'")
_LAST_APPEAL = Sql("SELECT max(opened_ms) FROM appeal WHERE owner = :owner")
_SELECT_LOSS = Sql("SELECT amount FROM loss WHERE submission = :submission AND owner = :owner")
_INSERT_HOLD, _INSERT_BOND, _INSERT_LOSS = insert_into(HOLD), insert_into(BOND), insert_into(LOSS)
_INSERT_APPEAL = insert_into(APPEAL)
_RELEASE_HOLD = Sql(
    "UPDATE hold SET state = 'released' WHERE seq = :seq AND line = :line AND state IN ('held', 'ready')"
)
_RESET_STAKED = Sql("UPDATE owner SET staked = 0 WHERE owner = :owner")
_RELEASE_BOND = Sql("UPDATE bond SET state = 'released' WHERE seq = :seq AND state = 'waiting'")
_BURN_HOLDS = Sql("UPDATE hold SET state = 'burned' WHERE owner = :owner AND state IN ('held', 'ready', 'frozen')")
_BURN_BONDS = Sql("UPDATE bond SET state = 'burned' WHERE owner = :owner AND state IN ('waiting', 'frozen')")
_END_APPEAL = Sql("UPDATE appeal SET state = :state WHERE submission = :submission AND state = 'open'")


def list_ripe(connection: Connection, *, challenged_ms: int, longest_ms: int, most: int) -> list[HoldRow]:
    """Holds to release: made before `challenged_ms`, and enough accepted since or made before `longest_ms`."""
    ready = fetch_rows(connection, _SELECT_RIPE, HoldRow, state="ready", until_ms=challenged_ms, most=most)
    left = most - len(ready)
    return ready + fetch_rows(connection, _SELECT_RIPE, HoldRow, state="held", until_ms=longest_ms, most=left)


def list_free(connection: Connection, now_ms: int, most: int) -> list[BondRow]:
    return fetch_rows(connection, _SELECT_FREE, BondRow, now_ms=now_ms, most=most)


def list_bonds(connection: Connection, owner: str) -> list[BondRow]:
    """Bonds of an owner that are on their way back."""
    return fetch_rows(connection, _SELECT_BONDS, BondRow, owner=owner)


def find_bond(connection: Connection, request: str) -> BondRow | None:
    """The bond that an owner asked for by a request, whatever became of it."""
    return fetch_row(connection, _SELECT_BOND, BondRow, request=request)


def find_appeal(connection: Connection, submission: str) -> AppealRow | None:
    return fetch_row(connection, _SELECT_APPEAL, AppealRow, submission=submission)


def has_appeal(connection: Connection, owner: str) -> bool:
    """Whether an appeal of an owner is open."""
    return bool(fetch_number(connection, _COUNT_APPEALS, owner=owner))


def last_appeal(connection: Connection, owner: str) -> int:
    """When an owner last appealed; 0 for never."""
    return fetch_number(connection, _LAST_APPEAL, owner=owner)


def find_loss(connection: Connection, submission: str, owner: str) -> int:
    """What was taken from an owner because of a submission."""
    return fetch_number(connection, _SELECT_LOSS, submission=submission, owner=owner)


def add_holds(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    rows = [
        {"seq": event.seq, "line": line, "owner": hold["owner"], "amount": hold["amount"], "number": hold["number"]}
        for line, hold in enumerate(event.content["holds"])
    ]
    if rows:
        _INSERT_HOLD.run_many(connection, [{**row, "made_ms": event.time_ms, "state": "held"} for row in rows])
    for owner in {event.content["owner"], *(row["owner"] for row in rows)}:
        _RIPEN.run(connection, {"owner": owner})


def grade_holds(event: Event, connection: Connection) -> None:
    """params: what is enough may be another number now"""
    _GRADE.run(connection)


def freeze_credit(event: Event, connection: Connection) -> None:
    """ban"""
    for freeze in (_FREEZE_HOLDS, _FREEZE_BONDS):
        freeze.run(connection, {"owner": event.content["target"]})


def thaw_credit(event: Event, connection: Connection) -> None:
    """unban"""
    for thaw in (_THAW_HOLDS, _THAW_BONDS, _RIPEN):
        thaw.run(connection, {"owner": event.content["target"]})


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
        _INSERT_BOND.run(connection, {**row, "state": "waiting", "request": content["request"]})
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
        _INSERT_BOND.run(connection, {**row, "state": "waiting", "request": ""})
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


def burn_canary(event: Event, connection: Connection) -> None:
    """canary.reveal"""
    for burn in (_BURN_HOLDS, _BURN_BONDS, _RESET_STAKED):
        burn.run(connection, {"owner": event.subject})
