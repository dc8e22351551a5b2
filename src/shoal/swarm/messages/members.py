"""Joining, and signs of life."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from shoal.swarm.messages.base import MAX_NUMBER, Digest, LeaseId, LongText, Message, Number, ShortText, Standing


class JoinRequest(Message):
    """A node wants to work for the run."""

    delegation: Annotated[str, StringConstraints(max_length=2048)]
    """the owner's signed document, as text"""
    software: ShortText = ""


class RevokeRequest(Message):
    """An owner takes back what it delegated to a node; the document says all, so anybody may bring it."""

    revocation: Annotated[str, StringConstraints(max_length=2048)]


class MemberInfo(Message):
    """What a node is told about itself."""

    run: str
    node: Digest
    owner: Digest
    standing: Standing
    scopes: tuple[str, ...]
    width: Number
    """leases it may hold at once"""
    heartbeat_s: Number
    server_time_ms: Number


MetricName = Literal[
    "tokens_per_s",
    "rollouts_per_s",
    "queued",
    "rollouts_done",
    "verdicts_done",
    "free_disk_mb",
    "free_memory_mb",
    "errors",
    "retries",
]


class Progress(Message):
    """How far a lease is."""

    lease: LeaseId
    done: Number
    """rollouts finished"""


class NodeWait(Message):
    """What a node waits for."""

    name: ShortText
    for_whom: ShortText
    since_ms: Number
    deadline_ms: Number = 0
    reason: LongText = ""
    """what last went wrong, if something did"""


class Heartbeat(Message):
    """What a node says every few seconds."""

    role: Literal["", "worker", "validator", "trainer", "relay"] = ""
    """what it calls itself; nothing follows from it"""
    wait: NodeWait | None = None
    """the longest of its waits"""
    version: Annotated[int, Field(ge=-1, le=MAX_NUMBER)] = -1
    """newest version it holds; -1 for none"""
    leases: Annotated[tuple[Progress, ...], Field(max_length=64)] = ()
    metrics: Annotated[dict[MetricName, Number], Field(max_length=16, default_factory=dict)]


class HeartbeatAnswer(Message):
    """What it hears."""

    cancelled: tuple[LeaseId, ...]
    """of the leases it named: those that are no longer its own"""
    newest_version: int
    """-1 before v0 is published"""
    oldest_version: int
    """oldest version that a lease granted now may be computed with; -1 before v0"""
    head: str | None
    """newest signed head (`SignedHead.to_bytes` as text)"""
    server_time_ms: Number
    next_s: Number
    standing: Standing
    accepted: Number = 0
    """submissions of its owner that were accepted"""
    earned: Number = 0
    """micro-credits that its owner was paid for them, free or not"""
    finished: bool
    reasons: tuple[str, ...]
    """why the last work was refused, what is waited for: sentences for the log"""
