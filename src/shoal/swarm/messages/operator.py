"""Commands, and what all can see."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from shoal.swarm.messages.base import (
    Digest,
    LongText,
    Message,
    Number,
    RequestKey,
    SignatureText,
    Standing,
    SubmissionId,
)

MAX_SEALS = 64
"""in one command, as many submissions as a reveal names"""


class Action(StrEnum):
    """What an operator may command."""

    BAN = "ban"
    UNBAN = "unban"
    PARAMS = "params"
    STOP = "stop"
    RESUME = "resume"
    CANARY_SEAL = "canary_seal"
    """note that some owners, which are not named yet, will hand in work that must be rejected"""
    CANARY_REVEAL = "canary_reveal"
    """name one of them, and what it handed in that is bad, or good beyond doubt"""
    REDEEM_DONE = "redeem_done"
    """credit was paid out, as its owner asked"""
    REDEEM_FAILED = "redeem_failed"
    """it could not be, and is given back"""


class CanaryReveal(Message):
    """What opens a seal, and which submissions of the owner are known to be bad, and which to be good."""

    signature: SignatureText
    """the owner's, see `seals`"""
    submissions: Annotated[tuple[SubmissionId, ...], Field(max_length=MAX_SEALS)]
    """the bad ones"""
    good: Annotated[tuple[SubmissionId, ...], Field(max_length=MAX_SEALS)] = ()


class Command(Message):
    """What the operator signs."""

    nonce: RequestKey
    action: Action
    target: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """owner or node of a ban or unban, owner that is revealed"""
    reason: LongText = ""
    params: dict[str, Any] | None = None
    """all parameters as they shall be"""
    seals: Annotated[tuple[Digest, ...], Field(max_length=MAX_SEALS)] = ()
    canary: CanaryReveal | None = None
    request: str = Field(default="", pattern=r"^([0-9a-f]{32})?$")
    """of a redemption that ended"""


class SignedCommand(Message):
    """A command and the operator's signature (kind by action, subject: the target)."""

    command: Command
    signature: SignatureText


class CanaryGrade(Message):
    """How validators did on a submission that was known to be bad, or good."""

    submission: SubmissionId
    state: str
    """of a bad one: caught, missed, unseen; of a good one: passed, wronged, unseen"""
    missed_by: tuple[Digest, ...]
    """validators that accepted what was bad, or rejected what was good"""
    good: Number = 0
    """1 if it was good"""
    trained: Number
    """step whose batch had been cut with it; 0 for none"""


class CommandAnswer(Message):
    """The command is in the ledger."""

    nonce: RequestKey
    seq: Number
    """event that recorded it"""
    grades: tuple[CanaryGrade, ...] = ()
    """of a canary that was revealed"""


class WaitInfo(Message):
    """Something that waits."""

    name: str
    owner: str
    """who waits"""
    for_whom: str
    since_ms: Number
    deadline_ms: Number
    """0 for none"""
    overdue: bool
    text: str
    """in words"""


class StepInfo(Message):
    """Where a step is."""

    step: Number
    state: str
    """open, cut, trained"""
    needed: Number
    accepted: Number
    """groups with a learning signal"""
    dull: Number
    """accepted groups without one"""
    leased: Number
    offered: Number
    judged: Number
    """groups whose submission waits for a verdict"""


class Status(Message):
    """The run at a glance."""

    run: str
    server_time_ms: Number
    finished: bool
    stopped: bool
    steps: Number
    trained: Number
    """last trained step"""
    newest_version: int
    open_steps: tuple[StepInfo, ...]
    queue: Number
    nodes_live: Number
    nodes_stale: Number
    nodes_gone: Number
    waits: tuple[WaitInfo, ...]
    alarms: tuple[str, ...]
    watched: tuple[str, ...] = ()
    """owners whose work is unlike that of others, and is checked in full for a while; in words"""
    checks: tuple[str, ...] = ()
    """what is promised about cheats, and what is replayed for it of each standing, in words"""


class LeaderLine(Message):
    """One owner in the table of honours."""

    owner: Digest
    standing: Standing
    accepted: Number
    rejected: Number
    tokens: Number
    earned: Number
    """micro-credits, all purses"""
