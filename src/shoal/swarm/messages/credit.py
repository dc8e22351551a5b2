"""Credit that leaves the run, and bonds that are given back."""

from typing import Annotated

from pydantic import Field

from shoal.swarm.messages.base import MAX_NUMBER, Digest, LongText, Message, Number, RequestKey, SignatureText


class RedeemStatement(Message):
    """An owner asks for credit to be paid out."""

    request: RequestKey
    amount: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    """micro-credits"""
    goal: LongText = ""
    """where to; a text for the operator"""


class SignedRedeem(Message):
    """The request and the owner's signature (kind redeem.request, subject: the request)."""

    redeem: RedeemStatement
    owner: Digest
    signature: SignatureText


class UnbondStatement(Message):
    """An owner asks for its bond back."""

    request: RequestKey


class SignedUnbond(Message):
    """The request and the owner's signature (kind stake.request, subject: the request)."""

    unbond: UnbondStatement
    owner: Digest
    signature: SignatureText


class UnbondAnswer(Message):
    """The bond is on its way back."""

    request: RequestKey
    amount: Number
    """micro-credits"""
    free_ms: Number
    """when it is free, if its owner is not convicted before"""


class RedeemAnswer(Message):
    """The request is in the ledger, and the credit out of what is free."""

    request: RequestKey
    state: str
    """open, done, failed"""
    amount: Number
    seq: Number
    """event that recorded it"""
