"""What stands in an owner's purses is what the tables say is on its way: nothing is pending without a hold.

    pending = holds,   unbond = bonds on their way back,   redeeming = open requests

This is no rule that the coordinator runs but one that follows from all of them, so a fault in one is found here too.
"""

from sqlalchemy import Connection

from shoal.swarm.law.docket import LawError
from shoal.swarm.sql import Sql, fetch_row

_HELD = (
    ("pending", "SELECT owner, sum(amount) AS amount FROM hold WHERE state IN ('held', 'ready', 'frozen')"),
    ("unbond", "SELECT owner, sum(amount) AS amount FROM bond WHERE state IN ('waiting', 'frozen')"),
    ("redeeming", "SELECT owner, sum(amount) AS amount FROM redeem WHERE state = 'open'"),
)
_UNEQUAL = (
    "SELECT account, max(have), max(due) FROM ("
    "SELECT account, amount AS have, 0 AS due FROM balance WHERE account LIKE '{purse}:%' AND amount <> 0 UNION ALL "
    "SELECT '{purse}:' || owner, 0, amount FROM ({held} GROUP BY owner) AS held) AS sums "
    "GROUP BY account HAVING max(have) <> max(due) ORDER BY account LIMIT 1"
)


def check_purses(connection: Connection) -> None:
    """Refuse a purse that holds another amount than what is on its way; none can hold more than a number here can."""
    for purse, held in _HELD:
        row = fetch_row(connection, Sql(_UNEQUAL.format(purse=purse, held=held)), _describe)
        if row is not None:
            raise LawError(f"at the end of the ledger: {row}")


def _describe(account: str, have: int, due: int) -> str:
    return f"{account[:24]} holds {have}, but what is on its way there sums to {due}"
