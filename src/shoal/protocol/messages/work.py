"""Leases, submissions, batches and versions."""

from typing import Annotated

from pydantic import Field

from shoal.protocol.messages.base import (
    MAX_ROLLOUTS,
    Digest,
    GroupSeedTexts,
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
    """A node requests work."""

    request_key: RequestKey
    version: Number
    """version that it will use: fixed before it knows the tasks"""
    wait_s: WaitSeconds = 0


class Lease(Message):
    """Permission to produce groups first .. first + count - 1 of a step; body of a document (tag LEASE)."""

    run: str
    lease: LeaseId
    node: Digest
    step: Number
    first: Number
    count: Number
    group_size: Number
    max_tokens: Number
    seeds: GroupSeedTexts
    """of each group: task and rollouts follow from them (`beacon.read_seeds`). The step's beacon gives the same"""
    fence: Number
    version: Number
    """the version that generates the rollouts; work of any other is refused"""
    granted_ms: Number
    deadline_ms: Number
    price: Number
    """micro-credits per validated token"""


class LeaseAnswer(Message):
    """A lease with its document, or the reason why none is granted now."""

    lease: Lease | None
    document: str = ""
    code: ShortText = ""
    """finished, stopped, no_version, no_need, busy, queue_full, too_many, resting, share, version, work, trial, room"""
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
    """A node's submission, signed before anything is uploaded."""

    lease: LeaseId
    fence: Number
    blob: Digest
    """SHA-256 of the file"""
    size: Number
    version: Number
    """version that generated the rollouts"""
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
    """where the file may be uploaded instead of to the coordinator, without a signature; then request the receipt"""


class Receipt(Message):
    """The complete file has arrived; body of a document (tag RECEIPT)."""

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


class CutRequest(Message):
    """A trainer requests the batch of a step."""

    wait_s: WaitSeconds = 0


class BatchEntry(Message):
    """One group of a batch."""

    index: Number
    submission: SubmissionId
    place: Number
    """index of the group in the submission, from 0"""
    version: Number
    blob: Digest


class Batch(Message):
    """What a step trains on, in order of group index."""

    run: str
    step: Number
    hash: Digest
    """SHA-256 of the canonical JSON of the entries"""
    groups: tuple[BatchEntry, ...]


class BatchAnswer(Message):
    """A batch with its document {run, step, hash, groups: number, time_ms} (tag BATCH), or why it is not ready."""

    batch: Batch | None
    document: str = ""
    reason: LongText = ""
    retry_after_s: Number = 0


class VersionStatement(Message):
    """The trainer published a version."""

    version: Number
    root: Digest
    """hash over the weights"""
    manifest: Digest
    """hash of the signed manifest used to fetch them"""
    batch: str = Field(pattern=r"^([0-9a-f]{64})?$")
    """hash of the batch it was trained on; empty for v0"""


class SignedVersion(Message):
    """A version and the trainer's signature (kind version.publish, subject: v and the number)."""

    version: VersionStatement
    signature: SignatureText


class VersionAnswer(Message):
    """The version is in the ledger."""

    version: Number
    open_steps: tuple[Number, ...]
    finished: bool
