"""The projection of postings into balances, where overdrafts are refused."""

from sqlalchemy import Connection, bindparam, select, text

from shoal.canonical import MAX_INTEGER
from shoal.swarm.db import BALANCE
from shoal.swarm.event import Event
from shoal.swarm.postings import MINT, PostingError
from shoal.swarm.projection import Projection

_SELECT = select(BALANCE.c.account, BALANCE.c.amount).where(
    BALANCE.c.account.in_(bindparam("accounts", expanding=True))
)
_UPSERT = text(
    "INSERT INTO balance (account, amount) VALUES (:account, :amount) "
    "ON CONFLICT (account) DO UPDATE SET amount = excluded.amount"
)


def read_balances(connection: Connection, accounts: list[str]) -> dict[str, int]:
    """The balances of some accounts; one that was never posted to has 0."""
    balances = dict.fromkeys(accounts, 0)
    for account, amount in connection.execute(_SELECT, {"accounts": accounts}):
        balances[account] = amount
    return balances


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
    connection.execute(_UPSERT, rows)


BALANCES = Projection("balances", (BALANCE,), _apply_postings)
