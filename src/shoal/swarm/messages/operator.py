"""Commands, and what all can see."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from shoal.swarm.messages.base import (
    MAX_ROLLOUTS,
    Digest,
    LongText,
    Message,
    Number,
    RequestKey,
    SignatureText,
    Standing,
)
from shoal.swarm.messages.work import RolloutEntry


class Action(StrEnum):
    """What an operator may command."""

    BAN = "ban"
    UNBAN = "unban"
    PARAMS = "params"
    STOP = "stop"
    RESUME = "resume"
    CANARY = "canary"
    """plant a submission that must be rejected"""
    REDEEM_DONE = "redeem_done"
    """credit was paid out, as its owner asked"""
    REDEEM_FAILED = "redeem_failed"
    """it could not be, and is given back"""


class CanaryPlan(Message):
    """A submission known to be bad: the manifest of a lease that was given to nobody, over a blob that is here."""

    step: Number
    first: Number
    count: Number
    version: Number
    blob: Digest
    size: Number
    rollouts: Annotated[tuple[RolloutEntry, ...], Field(min_length=1, max_length=MAX_ROLLOUTS)]


class Command(Message):
    """What the operator signs."""

    nonce: RequestKey
    action: Action
    target: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """owner or node of a ban or unban"""
    reason: LongText = ""
    params: dict[str, Any] | None = None
    """all parameters as they shall be"""
    canary: CanaryPlan | None = None
    request: str = Field(default="", pattern=r"^([0-9a-f]{32})?$")
    """of a redemption that ended"""


class SignedCommand(Message):
    """A command and the operator's signature (kind by action, subject: the target)."""

    command: Command
    signature: SignatureText


class CommandAnswer(Message):
    """The command is in the ledger."""

    nonce: RequestKey
    seq: Number
    """event that recorded it"""


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


class LeaderLine(Message):
    """One owner in the table of honours."""

    owner: Digest
    standing: Standing
    accepted: Number
    rejected: Number
    tokens: Number
    earned: Number
    """micro-credits, all purses"""
