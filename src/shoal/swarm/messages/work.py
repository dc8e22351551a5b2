"""Leases and submissions."""

from typing import Annotated

from pydantic import Field

from shoal.swarm.messages.base import (
    MAX_ROLLOUTS,
    Digest,
    LeaseId,
    LongText,
    Message,
    Number,
    RequestKey,
    ShortText,
    SignatureText,
    SubmissionId,
    SubmissionState,
    WaitSeconds,
)


class LeaseRequest(Message):
    """A node asks for work."""

    request_key: RequestKey
    wait_s: WaitSeconds = 0


class Lease(Message):
    """The permission to produce groups first .. first + count - 1 of a step; body of a document (tag LEASE)."""

    run: str
    lease: LeaseId
    node: Digest
    step: Number
    first: Number
    count: Number
    group_size: Number
    max_tokens: Number
    beacon: Digest
    """tasks and seeds follow from it: `beacon.derive_group`"""
    fence: Number
    newest_version: Number
    """at the time of the grant"""
    oldest_version: Number
    """the work is refused if computed with an older one"""
    granted_ms: Number
    deadline_ms: Number
    price: Number
    """micro-credits per validated token"""


class LeaseAnswer(Message):
    """A lease with its document, or the reason why there is none now."""

    lease: Lease | None
    document: str = ""
    code: ShortText = ""
    """finished, stopped, no_version, no_need, busy, queue_full, too_many, limited"""
    reason: LongText = ""
    retry_after_s: Number = 0


class ReturnAnswer(Message):
    """How a lease ended."""

    lease: LeaseId
    state: str


class RolloutEntry(Message):
    """One rollout of a submission."""

    hash: Digest
    """`hash_tokens` of its completion"""
    tokens: Number


class Manifest(Message):
    """What a node hands in, signed before anything is uploaded."""

    lease: LeaseId
    fence: Number
    blob: Digest
    """SHA-256 of the file"""
    size: Number
    version: Number
    """that the rollouts were computed with"""
    rollouts: Annotated[tuple[RolloutEntry, ...], Field(min_length=1, max_length=MAX_ROLLOUTS)]
    """in order of group, then sample"""


class SignedManifest(Message):
    """A manifest and the node's signature (kind sub.commit, subject: the lease)."""

    manifest: Manifest
    signature: SignatureText


class CommitAnswer(Message):
    """The manifest is in the ledger; upload the file before the deadline."""

    submission: SubmissionId
    state: SubmissionState
    size: Number
    deadline_ms: Number
    upload_url: str = ""
    """where the file may be put instead of here, without a signature of ours; then ask for the receipt"""


class Receipt(Message):
    """The file has arrived whole; body of a document (tag RECEIPT)."""

    run: str
    submission: SubmissionId
    lease: LeaseId
    node: Digest
    blob: Digest
    size: Number
    received_ms: Number


class ReceiptAnswer(Message):
    """A receipt to keep."""

    receipt: Receipt
    document: str
