"""Who is paid what for a decided submission, and what a hard verdict costs; all in integer micro-credits.

Pay goes from `mint` to the owner's bond for its first few submissions, then to its pending purse. What is slashed goes
to `burn`: neither the accuser nor the operator gains by a conviction.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shoal.swarm.params import MILLION, RunParams
from shoal.swarm.postings import BURN, MINT, Posting, name_account


class Payment(NamedTuple):
    """What one owner gets."""

    owner: str
    purse: str
    """pending or stake"""
    amount: int


def pay_tokens(params: RunParams, price: int, owner: str, tokens: int, staked: int) -> Payment | None:
    """The pay of an accepted submission at the price of its lease; `staked` is how many went into the owner's bond."""
    amount = price * tokens
    return Payment(owner, _choose_purse(params, staked), amount) if amount else None


def pay_verdicts(params: RunParams, staked: Mapping[str, int]) -> list[Payment]:
    """The pay of the validators' owners whose verdicts decided, given by how many pays went into the bond of each."""
    if not params.verdict_price:
        return []
    return [Payment(owner, _choose_purse(params, number), params.verdict_price) for owner, number in staked.items()]


def post_payments(payments: Iterable[Payment]) -> list[Posting]:
    """The postings of payments, all from `mint`."""
    totals: Counter[str] = Counter()
    for payment in payments:
        totals[name_account(payment.purse, payment.owner)] += payment.amount
    postings = [Posting(account, amount) for account, amount in totals.items()]
    return [*postings, Posting(MINT, -sum(totals.values()))] if postings else []


class Loss(NamedTuple):
    """What a conviction takes from an owner's purses."""

    pending: int
    stake: int
    unbond: int

    @property
    def total(self) -> int:
        return self.pending + self.stake + self.unbond


def count_loss(params: RunParams, *, pending: int = 0, stake: int, unbond: int) -> Loss:
    """All that is pending, and a share of the bond, also of one that is on its way back."""
    return Loss(pending, stake * params.slash_share // MILLION, unbond * params.slash_share // MILLION)


def _choose_purse(params: RunParams, staked: int) -> str:
    return "stake" if staked < params.stake_submissions else "pending"


def post_loss(owner: str, loss: Loss) -> list[Posting]:
    """The postings of a conviction."""
    return burn_purses(owner, loss._asdict())


def burn_purses(owner: str, amounts: Mapping[str, int]) -> list[Posting]:
    """The postings that burn so much out of each purse of an owner."""
    postings = [Posting(name_account(purse, owner), -amount) for purse, amount in amounts.items() if amount]
    return [*postings, Posting(BURN, sum(amounts.values()))] if postings else []
