"""Joining, and heartbeats."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from shoal.protocol.messages.base import (
    MAX_NUMBER,
    Digest,
    LeaseId,
    LongText,
    Message,
    Number,
    ShortText,
    Standing,
    SubmissionId,
    SubmissionState,
)

MAX_TOKENS_PER_S = 10**9
"""largest rate that a node may report"""


class JoinRequest(Message):
    """A node requests to join the run."""

    delegation: Annotated[str, StringConstraints(max_length=2048)]
    """the owner's signed document, as text"""
    software: ShortText = ""


class RevokeRequest(Message):
    """An owner revokes a delegation; the signed document is sufficient, so anyone may submit it."""

    revocation: Annotated[str, StringConstraints(max_length=2048)]


class MemberInfo(Message):
    """A node's own membership data."""

    run: str
    node: Digest
    owner: Digest
    standing: Standing
    scopes: tuple[str, ...]
    width: Number
    """leases it may hold concurrently"""
    heartbeat_s: Number
    server_time_ms: Number


class LeaseProgress(Message):
    """Progress of a lease."""

    lease: LeaseId
    done: Number
    """rollouts finished"""


class NodeWait(Message):
    """What a node is waiting for."""

    name: ShortText
    for_whom: ShortText
    since_ms: Number
    deadline_ms: Number = 0
    reason: LongText = ""
    """the last error, if there was one"""


class Heartbeat(Message):
    """A node's report every few seconds."""

    role: Literal["", "worker", "validator", "trainer", "relay"] = ""
    """free-form software name; has no effect"""
    wait: NodeWait | None = None
    """the longest of its waits"""
    version: Annotated[int, Field(ge=-1, le=MAX_NUMBER)] = -1
    """newest version it has; -1 for none"""
    leases: Annotated[tuple[LeaseProgress, ...], Field(max_length=64)] = ()
    tokens_per_s: Annotated[int, Field(ge=0, le=MAX_TOKENS_PER_S)] = 0
    """what it says it generates (worker) or replays (validator); only shown, never decided on"""


class RejectionNotice(Message):
    """A submission of the node that was rejected."""

    submission: SubmissionId
    state: SubmissionState
    because: str


class HeartbeatAnswer(Message):
    """The coordinator's answer to a heartbeat."""

    cancelled: tuple[LeaseId, ...]
    """those of the named leases that the node no longer holds"""
    newest_version: int
    """-1 before v0 is published"""
    oldest_version: int
    """oldest version allowed for a lease granted now; -1 before v0"""
    head: str | None
    """newest signed head (`SignedHead.to_bytes` as text)"""
    server_time_ms: Number
    next_s: Number
    standing: Standing
    accepted: Number = 0
    """accepted submissions of its owner"""
    earned: Number = 0
    """micro-credits that its owner earned by them, released or not"""
    finished: bool
    rejected: tuple[RejectionNotice, ...] = ()
    """the last rejected submissions of the node, oldest first"""
    reasons: tuple[str, ...]
    """why the last work was refused, what the run waits for: sentences for the log"""
