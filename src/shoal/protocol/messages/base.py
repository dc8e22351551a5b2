"""Building blocks of messages: texts and numbers with bounds, and the values of standing and verdict."""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MAX_ROLLOUTS = 256
"""of one lease"""
MAX_NUMBER = 2**53

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""a SHA-256 or a public key"""
SignatureText = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
RequestKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
"""chosen at random by the caller; repeating it returns the first answer"""
LeaseId = Annotated[str, StringConstraints(pattern=r"^l[0-9]{1,18}$")]
GroupSeedTexts = Annotated[
    tuple[Annotated[str, StringConstraints(pattern=rf"^([0-9a-f]{{16}}){{2,{MAX_ROLLOUTS + 1}}}$")], ...],
    Field(max_length=MAX_ROLLOUTS),
]
"""seeds of consecutive groups, see `beacon.show_seeds`"""
SubmissionId = Annotated[str, StringConstraints(pattern=r"^s[0-9]{1,18}$")]
Number = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
ShortText = Annotated[str, StringConstraints(max_length=80, pattern=r"^[ -~]*$")]
LongText = Annotated[str, StringConstraints(max_length=400, pattern=r"^[ -~]*$")]
Decimal = Annotated[str, StringConstraints(pattern=r"^-?[0-9]{1,20}(\.[0-9]{1,20})?(e-?[0-9]{1,3})?$")]
"""a measured number, as text: the ledger holds no floats"""


WaitSeconds = Annotated[int, Field(ge=0, le=30)]
"""how long the server may delay an answer until there is something to return; 0: not at all"""


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class Standing(StrEnum):
    """The run's trust in an owner; changes only by events."""

    PROBATION = "probation"
    GOOD = "good"
    TRUSTED = "trusted"
    LIMITED = "limited"
    BANNED = "banned"


class Verdict(StrEnum):
    """What a validator found in a submission."""

    ACCEPTED = "accepted"
    FORM = "rejected_form"
    SOFT = "rejected_soft"
    HARD = "rejected_hard"
    INCONCLUSIVE = "inconclusive"


class SubmissionState(StrEnum):
    """State of a submission; all but the first two are final (an appeal may replace a rejection)."""

    COMMITTED = "committed"
    """the manifest is in the ledger, waiting for the file"""
    RECEIVED = "received"
    """the file has arrived, waiting for verdicts"""
    ACCEPTED = "accepted"
    FORM = "rejected_form"
    SOFT = "rejected_soft"
    HARD = "rejected_hard"
    INCONCLUSIVE = "inconclusive"
    UNSENT = "unsent"
    """the file did not arrive in time"""
    SUPERSEDED = "superseded"
    """another node delivered the same groups first"""
    VOID = "void"
    """its owner was banned before it was judged, or it belonged to a canary"""

    @property
    def phrase(self) -> str:
        """The state as the end of a sentence."""
        return f"was rejected ({self})" if self in REJECTED else f"is {self}"


REJECTED = (SubmissionState.FORM, SubmissionState.SOFT, SubmissionState.HARD)
