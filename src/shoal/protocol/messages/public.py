"""Operator commands, requests for credit, and public answers. Clients import this, so it imports no server code."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from shoal.ledger.merkle import MAX_PROOF_HASHES
from shoal.protocol.messages.base import (
    MAX_NUMBER,
    Digest,
    LongText,
    Message,
    Number,
    RequestKey,
    SignatureText,
    Standing,
    SubmissionId,
    SubmissionState,
)

MAX_SEALS = 64
"""per command: as many submissions as one reveal names"""


class Action(StrEnum):
    """The commands of an operator."""

    BAN = "ban"
    UNBAN = "unban"
    PARAMS = "params"
    STOP = "stop"
    RESUME = "resume"
    CANARY_SEAL = "canary_seal"
    """record that some owners, not named yet, will submit work that must be rejected"""
    CANARY_REVEAL = "canary_reveal"
    """name one of them, and which of its submissions are bad, or certainly good"""
    REDEEM_DONE = "redeem_done"
    """credit was paid out as its owner requested"""
    REDEEM_FAILED = "redeem_failed"
    """the payout failed, and the credit is returned"""


class CanaryReveal(Message):
    """Opens a seal and names the owner's submissions known to be bad, and those known to be good."""

    signature: SignatureText
    """the owner's, see `beacon.sign_seal`"""
    submissions: Annotated[tuple[SubmissionId, ...], Field(max_length=MAX_SEALS)]
    """the bad submissions"""
    good: Annotated[tuple[SubmissionId, ...], Field(max_length=MAX_SEALS)] = ()


class Command(Message):
    """A command that the operator signs."""

    nonce: RequestKey
    action: Action
    target: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """owner or node of a ban or unban, or the owner that is revealed"""
    reason: LongText = ""
    params: dict[str, Any] | None = None
    """all parameters after the change"""
    seals: Annotated[tuple[Digest, ...], Field(max_length=MAX_SEALS)] = ()
    canary: CanaryReveal | None = None
    request: str = Field(default="", pattern=r"^([0-9a-f]{32})?$")
    """of the redemption that ended"""


class SignedCommand(Message):
    """A command and the operator's signature (kind by action, subject: the target)."""

    command: Command
    signature: SignatureText


class CanaryGrade(Message):
    """How validators judged a submission that was known to be bad, or good."""

    submission: SubmissionId
    state: str
    """of a bad one: caught, missed, unseen; of a good one: passed, wronged, unseen"""
    missed_by: tuple[Digest, ...]
    """validators that accepted bad work, or rejected good work"""
    good: Number = 0
    """1 if it was good"""
    trained: Number
    """step whose batch was already cut with it; 0 for none"""


class CommandAnswer(Message):
    """The command was recorded in the ledger."""

    nonce: RequestKey
    seq: Number
    """event that recorded it"""
    grades: tuple[CanaryGrade, ...] = ()
    """for a revealed canary"""


class WaitInfo(Message):
    """Something that is waiting."""

    name: str
    owner: str
    """who waits"""
    for_whom: str
    since_ms: Number
    deadline_ms: Number
    """0 for none"""
    overdue: bool
    text: str
    """as a sentence"""


class StepInfo(Message):
    """Progress of a step."""

    step: Number
    state: str
    """open, cut, trained"""
    needed: Number
    accepted: Number
    """groups with a learning signal"""
    dull: Number
    """accepted groups without a learning signal"""
    leased: Number
    offered: Number
    judged: Number
    """groups whose submission is waiting for a verdict"""


NodeRole = Literal["worker", "validator", "trainer"]


class NodeInfo(Message):
    """A live node. What it reports about itself is not checked."""

    node: Digest
    role: NodeRole
    """by the run's parameters"""
    version: int
    """newest version it reports; -1 for none"""
    tokens_per_s: Number
    """rate that it reports"""
    heard_ms: Number
    """time of its last heartbeat"""


class Status(Message):
    """Overview of the run."""

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
    nodes: tuple[NodeInfo, ...] = ()
    """live nodes, limited in number: the run's own first, then by accepted submissions of their owners"""
    waits: tuple[WaitInfo, ...]
    alarms: tuple[str, ...]
    watched: tuple[str, ...] = ()
    """owners whose work differs from that of others and is checked in full for a while; as sentences"""
    checks: tuple[str, ...] = ()
    """the detection guarantee, and the share replayed for each standing; as sentences"""


class LeaderLine(Message):
    """One owner in the leaderboard."""

    owner: Digest
    standing: Standing
    accepted: Number
    rejected: Number
    tokens: Number
    earned: Number
    """micro-credits, all accounts"""
    scopes: tuple[str, ...] = ()
    """what its nodes may do: work, validate, train, relay"""

    @property
    def shown_standing(self) -> str:
        """Its standing, empty for an owner on probation without workers: only accepted work ends a probation."""
        return "" if self.standing is Standing.PROBATION and "work" not in self.scopes else self.standing.value


KeyPrefix = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8,64}$")]
MAX_OWNERS, MAX_NODES, MAX_REJECTIONS = 4, 8, 8
"""that one answer about a key lists"""


class NodeLine(Message):
    """One node of an owner."""

    node: Digest
    scopes: tuple[str, ...]
    gone: str
    """empty, left or revoked"""
    ban: str = ""
    """why this node alone is banned, and by which event; empty if it is not"""


class OwnerLine(Message):
    """One owner, with its nodes and its latest rejections."""

    owner: Digest
    standing: Standing
    accepted: Number
    rejected: Number
    ban: str = ""
    """why it is banned, and by which event; empty if it is not"""
    nodes: Annotated[tuple[NodeLine, ...], Field(max_length=MAX_NODES)]
    """those whose key was asked for first"""
    rejections: Annotated[tuple[SubmissionId, ...], Field(max_length=MAX_REJECTIONS)]
    """the latest first"""


class KeyAnswer(Message):
    """The owners whose key, or whose node's key, begins with the prefix."""

    owners: Annotated[tuple[OwnerLine, ...], Field(max_length=MAX_OWNERS)]


class OwnerAccount(Message):
    """The record and the credit of one owner; amounts in micro-credits."""

    owner: Digest
    standing: Standing
    accepted: Number
    rejected: Number
    earned: Number
    """by all accepted work, whatever became of it"""
    stake: Number
    """its bond"""
    pending: Number
    """pay that a conviction would still burn"""
    avail: Number
    """free: can be redeemed"""
    unbond: Number
    """a bond on its way back"""
    redeeming: Number
    """requested from the operator and not paid out yet"""


class Done(Message):
    """The request succeeded."""

    ok: Literal[True] = True


class Health(Message):
    """The server is up."""

    ok: Literal[True] = True
    role: Literal["coordinator"] = "coordinator"
    run: str
    coordinator: Digest
    server_time_ms: Number


class ChallengeAnswer(Message):
    """The proof of work required before joining."""

    challenge: str


class HeadAnswer(Message):
    """The newest signed head (`SignedHead.to_bytes` as text), if there is one yet."""

    head: str | None


class ProofAnswer(Message):
    """Proof that the ledger of `new` events begins with that of `old`."""

    old: Number
    new: Number
    proof: Annotated[tuple[Digest, ...], Field(max_length=MAX_PROOF_HASHES)]


class InclusionAnswer(Message):
    """An event with the proof that it is in the ledger (`InclusionProof.to_bytes` as text)."""

    bundle: str


class Leaders(Message):
    """Owners by accepted tokens."""

    leaders: tuple[LeaderLine, ...]


class BlobLink(Message):
    """A URL from which to fetch a file instead of the coordinator; empty if only the coordinator has it."""

    url: str
    expires_s: Number


class Explanation(Message):
    """A submission in words."""

    text: str
    """with the worst value of each check"""
    findings: tuple[str, ...]
    """every value of every check, one line each"""
    state: SubmissionState


MAX_PAGE_EVENTS = 512


class ParamsAnswer(Message):
    """The run's parameters as they are now."""

    params: dict[str, Any]


class PageAnswer(Message):
    """Consecutive events of the ledger, each as a proof without its path (`InclusionProof.to_bytes` as text)."""

    events: Annotated[tuple[str, ...], Field(max_length=MAX_PAGE_EVENTS)]


class RedeemStatement(Message):
    """An owner requests a payout of credit."""

    request: RequestKey
    amount: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    """micro-credits"""
    goal: LongText = ""
    """destination of the payout; free text for the operator"""


class SignedRedeem(Message):
    """The request and the owner's signature (kind redeem.request, subject: the request)."""

    redeem: RedeemStatement
    owner: Digest
    signature: SignatureText


class UnbondStatement(Message):
    """An owner requests its bond back."""

    request: RequestKey


class SignedUnbond(Message):
    """The request and the owner's signature (kind stake.request, subject: the request)."""

    unbond: UnbondStatement
    owner: Digest
    signature: SignatureText


class UnbondAnswer(Message):
    """The bond is being returned."""

    request: RequestKey
    amount: Number
    """micro-credits"""
    free_ms: Number
    """when it is released, unless its owner is convicted before"""


class RedeemAnswer(Message):
    """The request is in the ledger, and the credit is reserved."""

    request: RequestKey
    state: str
    """open, done, failed"""
    amount: Number
    seq: Number
    """event that recorded it"""
