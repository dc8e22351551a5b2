"""The projection of postings into balances, where overdrafts are refused."""

import json

from sqlalchemy import Connection

from shoal.canonical import MAX_INTEGER
from shoal.swarm.db import BALANCE
from shoal.swarm.event import Event
from shoal.swarm.postings import MINT, PostingError
from shoal.swarm.projection import Projection
from shoal.swarm.sql import Sql

_SELECT = Sql(
    "SELECT account, amount FROM balance WHERE account IN (SELECT value FROM json_each(:accounts))",
    "SELECT account, amount FROM balance WHERE account IN (SELECT jsonb_array_elements_text(CAST(:accounts AS jsonb)))",
)
_UPSERT = Sql(
    "INSERT INTO balance (account, amount) VALUES (:account, :amount) "
    "ON CONFLICT (account) DO UPDATE SET amount = excluded.amount"
)


def read_balances(connection: Connection, accounts: list[str]) -> dict[str, int]:
    """The balances of some accounts; one that was never posted to has 0."""
    balances = dict.fromkeys(accounts, 0)
    return balances | dict(_SELECT.run(connection, {"accounts": json.dumps(accounts)}).fetchall())


def _apply_postings(event: Event, connection: Connection) -> None:
    if not event.postings:
        return
    held = read_balances(connection, [posting.account for posting in event.postings])
    rows = []
    for account, amount in event.postings:
        balance = held[account] + amount
        if balance < 0 and account != MINT:
            raise PostingError(f"{account}: holds {held[account]}, which is {-balance} too little")
        if abs(balance) > MAX_INTEGER:
            raise PostingError(f"{account}: a balance of 2**63 or more")
        rows.append({"account": account, "amount": balance})
    _UPSERT.run_many(connection, rows)


BALANCES = Projection("balances", (BALANCE,), _apply_postings)
