"""Credit that is not available yet, burned credit, appeals, and payouts.

hold: held -> ready -> released | burned, held -> released;   bond being returned: waiting -> released | burned
both are frozen while their owner is banned, and can still be burned then
appeal: open -> upheld | reversed;   payout: open -> done | failed

Invariants:
- a hold is ready if its owner has had enough more submissions accepted since, by the current parameters, and held if
  not. So holds whose time has come are found by an index, however many there are;
- a request to redeem reserves available credit, so nobody spends it twice; the operator's command pays it out or
  returns it.
"""

from typing import NamedTuple

from sqlalchemy import Connection, Index

from shoal.ledger import db
from shoal.ledger.event import Event, EventKind
from shoal.protocol import events
from shoal.protocol.events import parse_event, read_ban, read_body
from shoal.protocol.messages import AppealStatement, Command, RedeemStatement, SubmissionState

LOSS = db.define_table("loss", {"submission": str, "owner": str, "amount": int}, key=("submission", "owner"))


class HoldRow(NamedTuple):
    """Pending pay."""

    seq: int
    line: int
    owner: str
    amount: int
    made_ms: int
    number: int
    """number of the owner's accepted submissions when it was created"""
    state: str
    """held, ready, frozen, released or burned"""


HOLD = db.define_table("hold", HoldRow, key=("seq", "line"))
Index("hold_due", HOLD.c.state, HOLD.c.made_ms, HOLD.c.seq, HOLD.c.line)
Index("hold_owner", HOLD.c.owner, HOLD.c.state, HOLD.c.number)


class BondRow(NamedTuple):
    """A bond that is being returned to its owner."""

    seq: int
    owner: str
    amount: int
    free_ms: int
    state: str
    request: str
    """request of the owner; empty for the remainder after a slash"""


BOND = db.define_table("bond", BondRow, key="seq")
Index("bond_due", BOND.c.state, BOND.c.free_ms, BOND.c.seq)
Index("bond_request", BOND.c.request)
Index("bond_owner", BOND.c.owner, BOND.c.state)


class AppealRow(NamedTuple):
    """An owner's appeal."""

    submission: str
    owner: str
    opened_ms: int
    fee: int
    state: str


APPEAL = db.define_table("appeal", AppealRow, key="submission", index="owner")


_SELECT_RIPE = db.Sql(
    f"SELECT {db.list_columns(HOLD)} FROM hold WHERE state = :state AND made_ms <= :until_ms "
    "ORDER BY made_ms, seq, line LIMIT :most"
)
_MORE = (
    "(SELECT CAST(json_extract(params, '$.hold_submissions') AS INTEGER) FROM run_state)",
    "(SELECT CAST(CAST(params AS jsonb) ->> 'hold_submissions' AS bigint) FROM run_state)",
)
_ENOUGH = "number <= (SELECT o.accepted FROM owner o WHERE o.owner = hold.owner) - "
_RIPEN = db.Sql(
    *(f"UPDATE hold SET state = 'ready' WHERE owner = :owner AND state = 'held' AND {_ENOUGH}{more}" for more in _MORE)
)
_GRADE = db.Sql(
    *(
        f"UPDATE hold SET state = CASE WHEN {_ENOUGH}{more} THEN 'ready' ELSE 'held' END "
        "WHERE state IN ('held', 'ready')"
        for more in _MORE
    )
)
_FREEZE_HOLDS = db.Sql("UPDATE hold SET state = 'frozen' WHERE owner = :owner AND state IN ('held', 'ready')")
_FREEZE_BONDS = db.Sql("UPDATE bond SET state = 'frozen' WHERE owner = :owner AND state = 'waiting'")
_THAW_HOLDS = db.Sql("UPDATE hold SET state = 'held' WHERE owner = :owner AND state = 'frozen'")
_THAW_BONDS = db.Sql("UPDATE bond SET state = 'waiting' WHERE owner = :owner AND state = 'frozen'")
_COUNT_APPEALS = db.Sql("SELECT count(*) FROM appeal WHERE owner = :owner AND state = 'open'")
_SELECT_LOSS = db.Sql("SELECT amount FROM loss WHERE submission = :submission AND owner = :owner")
_RELEASE_HOLD = db.Sql(
    "UPDATE hold SET state = 'released' WHERE seq = :seq AND line = :line AND state IN ('held', 'ready')"
)
_RESET_STAKED = db.Sql("UPDATE owner SET staked = 0 WHERE owner = :owner")
_BURN_HOLDS = db.Sql("UPDATE hold SET state = 'burned' WHERE owner = :owner AND state IN ('held', 'ready', 'frozen')")
_BURN_BONDS = db.Sql("UPDATE bond SET state = 'burned' WHERE owner = :owner AND state IN ('waiting', 'frozen')")


def list_ripe(connection: Connection, *, challenged_ms: int, longest_ms: int, most: int) -> list[HoldRow]:
    """Holds to release: made before `challenged_ms`, and either enough accepted since or made before `longest_ms`."""
    ready = db.fetch_rows(connection, _SELECT_RIPE, HoldRow, state="ready", until_ms=challenged_ms, most=most)
    left = most - len(ready)
    return ready + db.fetch_rows(connection, _SELECT_RIPE, HoldRow, state="held", until_ms=longest_ms, most=left)


def list_free(connection: Connection, now_ms: int, most: int) -> list[BondRow]:
    condition = "WHERE state = 'waiting' AND free_ms <= :now_ms ORDER BY free_ms, seq LIMIT :most"
    return db.list_rows(connection, BondRow, condition, now_ms=now_ms, most=most)


def list_bonds(connection: Connection, owner: str) -> list[BondRow]:
    """Bonds of an owner that are being returned."""
    condition = "WHERE owner = :owner AND state IN ('waiting', 'frozen') ORDER BY seq"
    return db.list_rows(connection, BondRow, condition, owner=owner)


def find_bond(connection: Connection, request: str) -> BondRow | None:
    """The bond of an owner's request, in any state."""
    return db.find_row(connection, BondRow, request=request)


def find_appeal(connection: Connection, submission: str) -> AppealRow | None:
    return db.find_row(connection, AppealRow, submission=submission)


def has_appeal(connection: Connection, owner: str) -> bool:
    """Whether an owner has an open appeal."""
    return bool(db.fetch_number(connection, _COUNT_APPEALS, owner=owner))


def last_appeal(connection: Connection, owner: str) -> int:
    """When an owner last appealed; 0 for never."""
    return db.fetch_number(connection, "SELECT max(opened_ms) FROM appeal WHERE owner = :owner", owner=owner)


def find_loss(connection: Connection, submission: str, owner: str) -> int:
    """The amount taken from an owner because of a submission."""
    return db.fetch_number(connection, _SELECT_LOSS, submission=submission, owner=owner)


def add_holds(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    body = read_body(event, events.SubmissionOutcome)
    made = {"seq": event.seq, "made_ms": event.time_ms, "state": "held"}
    rows = [{**made, "line": line, **dict(hold)} for line, hold in enumerate(body.holds)]
    db.insert_rows(connection, HOLD, *rows)
    for owner in {body.owner, *(hold.owner for hold in body.holds)}:
        _RIPEN.run(connection, {"owner": owner})


def grade_holds(event: Event, connection: Connection) -> None:
    """params: the required number of submissions may have changed"""
    _GRADE.run(connection)


def freeze_credit(event: Event, connection: Connection) -> None:
    """ban"""
    for freeze in (_FREEZE_HOLDS, _FREEZE_BONDS):
        freeze.run(connection, {"owner": read_ban(event).target})


def thaw_credit(event: Event, connection: Connection) -> None:
    """unban"""
    for thaw in (_THAW_HOLDS, _THAW_BONDS, _RIPEN):
        thaw.run(connection, {"owner": read_ban(event).target})


def release_holds(event: Event, connection: Connection) -> None:
    """credit.post"""
    rows = [{"seq": seq, "line": line} for seq, line in read_body(event, events.CreditPost).holds]
    if rows:
        _RELEASE_HOLD.run_many(connection, rows)


def move_bond(event: Event, connection: Connection) -> None:
    """stake.unbond"""
    match parse_event(event):
        case events.BondWaiting() as body:
            db.insert_rows(connection, BOND, {**dict(body), "seq": event.seq, "owner": event.subject})
            _RESET_STAKED.run(connection, {"owner": event.subject})
        case events.BondReleased() as body:
            db.update_rows(connection, BOND, {"state": "released"}, seq=body.bond, state="waiting")


def burn_credit(event: Event, connection: Connection) -> None:
    """slash"""
    body = read_body(event, events.Slash)
    owner = {"owner": body.owner}
    if body.pending:
        _BURN_HOLDS.run(connection, owner)
    _BURN_BONDS.run(connection, owner)
    if body.rest:  # the remainder of a bond that was being returned is still being returned
        row = {"seq": event.seq, "amount": body.rest, "free_ms": body.free_ms, "state": "waiting", "request": ""}
        db.insert_rows(connection, BOND, {**row, **owner})
    _RESET_STAKED.run(connection, owner)
    db.insert_rows(connection, LOSS, {"submission": event.subject, "amount": body.amount, **owner})


def add_appeal(event: Event, connection: Connection) -> None:
    """appeal"""
    fee = sum(posting.amount for posting in event.postings if posting.amount > 0)
    row = {
        "submission": read_body(event, AppealStatement).submission,
        "owner": event.actor,
        "opened_ms": event.time_ms,
        "fee": fee,
    }
    db.insert_rows(connection, APPEAL, {**row, "state": "open"})


def end_appeal(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    state = "reversed" if read_body(event, events.SubmissionOutcome).state is SubmissionState.ACCEPTED else "upheld"
    db.update_rows(connection, APPEAL, {"state": state}, submission=event.subject, state="open")


def burn_canary(event: Event, connection: Connection) -> None:
    """canary.reveal"""
    for burn in (_BURN_HOLDS, _BURN_BONDS, _RESET_STAKED):
        burn.run(connection, {"owner": event.subject})


class RedeemRow(NamedTuple):
    """A payout request."""

    request: str
    owner: str
    amount: int
    goal: str
    state: str
    """open, done or failed"""
    asked_ms: int
    ended_ms: int
    seq: int


REDEEM = db.define_table("redeem", RedeemRow, key="request")
Index("redeem_state", REDEEM.c.state, REDEEM.c.asked_ms)
Index("redeem_owner", REDEEM.c.owner, REDEEM.c.state)


def find_redeem(connection: Connection, request: str) -> RedeemRow | None:
    return db.find_row(connection, RedeemRow, request=request)


def list_redeems(connection: Connection, most: int) -> list[RedeemRow]:
    """Open requests, oldest first."""
    return db.list_rows(connection, RedeemRow, "WHERE state = 'open' ORDER BY asked_ms, request LIMIT :most", most=most)


def count_redeems(connection: Connection) -> int:
    """The number of open requests."""
    return db.fetch_number(connection, "SELECT count(*) FROM redeem WHERE state = 'open'")


def count_open(connection: Connection, owner: str) -> int:
    """The number of open requests of an owner."""
    statement = "SELECT count(*) FROM redeem WHERE state = 'open' AND owner = :owner"
    return db.fetch_number(connection, statement, owner=owner)


def add_redeem(event: Event, connection: Connection) -> None:
    """redeem.request"""
    row = {"owner": event.actor, "state": "open", "asked_ms": event.time_ms, "ended_ms": 0, "seq": event.seq}
    db.insert_rows(connection, REDEEM, {**row, **dict(read_body(event, RedeemStatement))})


def end_redeem(event: Event, connection: Connection) -> None:
    """redeem.done, redeem.failed"""
    state = "done" if event.kind == EventKind.REDEEM_DONE else "failed"
    changes, request = {"state": state, "ended_ms": event.time_ms}, read_body(event, Command).request
    if not db.update_rows(connection, REDEEM, changes, request=request, state="open"):
        raise ValueError("end of a redeem request that is not open")
