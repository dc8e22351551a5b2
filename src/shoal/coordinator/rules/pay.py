"""The pay for a decided submission, and the cost of a hard verdict; all in integer micro-credits.

Pay goes from `mint` to the owner's bond for its first few submissions, then to its pending account. Slashed credit goes
to `burn`: neither the accuser nor the operator gains by a conviction.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shoal.ledger.event import BURN, MINT, Posting, name_account
from shoal.protocol.params import MILLION, RunParams


class Payment(NamedTuple):
    """The pay of one owner."""

    owner: str
    account: str
    """pending or stake"""
    amount: int


def pay_tokens(params: RunParams, price: int, owner: str, tokens: int, staked: int) -> Payment | None:
    """The pay of an accepted submission at its lease's price; `staked` is how many pays went into the owner's bond."""
    amount = price * tokens
    return Payment(owner, _choose_account(params, staked), amount) if amount else None


def pay_verdicts(params: RunParams, staked: Mapping[str, int]) -> list[Payment]:
    """The pay of the owners whose verdicts decided; `staked` is how many pays went into each owner's bond."""
    if not params.verdict_price:
        return []
    return [Payment(owner, _choose_account(params, number), params.verdict_price) for owner, number in staked.items()]


def post_payments(payments: Iterable[Payment]) -> list[Posting]:
    """The postings of payments, all from `mint`."""
    totals: Counter[str] = Counter()
    for payment in payments:
        totals[name_account(payment.account, payment.owner)] += payment.amount
    postings = [Posting(account, amount) for account, amount in totals.items()]
    return [*postings, Posting(MINT, -sum(totals.values()))] if postings else []


def count_loss(params: RunParams, held: Mapping[str, int]) -> dict[str, int]:
    """What a conviction takes: all pending pay, and a share of the bond, including a bond that is being returned."""
    shares = {account: MILLION if account == "pending" else params.slash_share for account in held}
    return {account: amount * shares[account] // MILLION for account, amount in held.items()}


def _choose_account(params: RunParams, staked: int) -> str:
    return "stake" if staked < params.stake_submissions else "pending"


def burn_accounts(owner: str, amounts: Mapping[str, int]) -> list[Posting]:
    """The postings that burn these amounts from an owner's accounts."""
    postings = [Posting(name_account(account, owner), -amount) for account, amount in amounts.items() if amount]
    return [*postings, Posting(BURN, sum(amounts.values()))] if postings else []
