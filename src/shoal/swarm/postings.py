"""Credit by double entry, in integer micro-credits.

Invariants:
- the postings of an event sum to zero, name each account once, and are sorted by account: one spelling;
- an account's name has one spelling: a fixed word, or a word and the owner's public key;
- `mint` only pays and `burn` only receives: credit is made and destroyed in one direction each;
- no account but `mint` is ever below zero (`balances` holds that, for it takes the history to know).

Changing breaks: every hash of an event with postings.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.canonical import MAX_INTEGER, encode_canonical

MICRO = 1_000_000
"""Micro-credits in one credit."""
MINT, BURN, TREASURY, REDEEMED = "mint", "burn", "treasury", "redeemed"
MAX_POSTINGS = 1024

_ACCOUNT = re.compile(r"mint|burn|treasury|redeemed|(?:pending|avail|stake|unbond|redeeming):[0-9a-f]{64}")


class PostingError(ValueError):
    """Postings that do not balance, or that would take an account below zero."""


class Posting(NamedTuple):
    """What one account gains (or loses, below zero) by an event."""

    account: str
    amount: int


def name_account(purse: str, owner: str) -> str:
    """The account of an owner: purse is pending, avail, stake, unbond or redeeming."""
    return check_account(f"{purse}:{owner}")


def check_account(text: str) -> str:
    """The name of an account; PostingError for what is none."""
    if _ACCOUNT.fullmatch(text) is None:
        raise PostingError(f"{text[:120]!r}: not the name of an account")
    return text


def move_credit(source: str, target: str, amount: int) -> tuple[Posting, ...]:
    """The postings of a payment from one account to another."""
    if amount <= 0:
        raise PostingError(f"a payment of {amount}; payments are above zero")
    return sort_postings([Posting(source, -amount), Posting(target, amount)])


def sort_postings(postings: Iterable[Posting]) -> tuple[Posting, ...]:
    """Checked postings in their one order."""
    ordered = tuple(sorted(postings))
    check_postings(ordered)
    return ordered


def check_postings(postings: Sequence[Posting]) -> None:
    """Refuse postings that no event may have."""
    if len(postings) > MAX_POSTINGS:
        raise PostingError(f"{len(postings)} postings, more than the {MAX_POSTINGS} allowed")
    last = ""
    for account, amount in postings:
        check_account(account)
        if account <= last:
            raise PostingError(f"{account}: twice, or not in the order of accounts")
        _check_amount(account, amount)
        last = account
    total = sum(posting.amount for posting in postings)
    if total != 0:
        raise PostingError(f"postings sum to {total}, not to zero")


def encode_postings(postings: Sequence[Posting]) -> bytes:
    """The bytes of postings that an event's hash covers."""
    if not postings:
        return b"[]"  # most events have none
    return encode_canonical([[account, amount] for account, amount in postings])


def _check_amount(account: str, amount: int) -> None:
    if amount == 0 or abs(amount) > MAX_INTEGER:
        raise PostingError(f"{account}: an amount of {amount}; amounts are not zero and below 2**63")
    if account == MINT and amount > 0:
        raise PostingError("mint only pays; what is destroyed goes to burn")
    if account == BURN and amount < 0:
        raise PostingError("burn only receives")
