"""Credit that leaves the run, in two phases.

redeem: open -> done | failed

A request takes the credit out of what is free, so nobody spends it twice; what the operator says of it later pays it
out or gives it back.
"""

from typing import NamedTuple

from sqlalchemy import Column, Connection, Index, Text

from shoal.swarm.db import INT64, define_table
from shoal.swarm.event import Event, Kind
from shoal.swarm.sql import Sql, fetch_number, fetch_row, fetch_rows, insert_into, list_columns

REDEEM = define_table(
    "redeem",
    Column("request", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("amount", INT64, nullable=False),
    Column("goal", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("asked_ms", INT64, nullable=False),
    Column("ended_ms", INT64, nullable=False),
    Column("seq", INT64, nullable=False),
)
Index("redeem_state", REDEEM.c.state, REDEEM.c.asked_ms)


class RedeemRow(NamedTuple):
    """A request to pay credit out."""

    request: str
    owner: str
    amount: int
    goal: str
    state: str
    """open, done or failed"""
    asked_ms: int
    ended_ms: int
    seq: int


_INSERT = insert_into(REDEEM)
_SELECT = Sql(f"SELECT {list_columns(REDEEM)} FROM redeem WHERE request = :request")
_END = Sql("UPDATE redeem SET state = :state, ended_ms = :time_ms WHERE request = :request AND state = 'open'")
_SELECT_OPEN = Sql(
    f"SELECT {list_columns(REDEEM)} FROM redeem WHERE state = 'open' ORDER BY asked_ms, request LIMIT :most"
)
_COUNT_OPEN = Sql("SELECT count(*) FROM redeem WHERE state = 'open'")


def find_redeem(connection: Connection, request: str) -> RedeemRow | None:
    return fetch_row(connection, _SELECT, RedeemRow, request=request)


def list_redeems(connection: Connection, most: int) -> list[RedeemRow]:
    """Requests that wait for the operator, the oldest first."""
    return fetch_rows(connection, _SELECT_OPEN, RedeemRow, most=most)


def count_redeems(connection: Connection) -> int:
    """How many do."""
    return fetch_number(connection, _COUNT_OPEN)


def add_redeem(event: Event, connection: Connection) -> None:
    """redeem.request"""
    row = {name: event.content[name] for name in ("request", "amount", "goal")}
    row |= {"owner": event.actor, "state": "open", "asked_ms": event.time_ms, "ended_ms": 0, "seq": event.seq}
    _INSERT.run(connection, row)


def end_redeem(event: Event, connection: Connection) -> None:
    """redeem.done, redeem.failed"""
    state = "done" if event.kind == Kind.REDEEM_DONE else "failed"
    values = {"request": event.content["request"], "state": state, "time_ms": event.time_ms}
    if _END.run(connection, values).rowcount != 1:
        raise ValueError("the end of a request that is not open")
