"""Batches and versions."""

from pydantic import Field

from shoal.swarm.messages.base import Digest, LongText, Message, Number, SignatureText, SubmissionId, WaitSeconds


class CutRequest(Message):
    """A trainer asks for the batch of a step."""

    wait_s: WaitSeconds = 0


class BatchEntry(Message):
    """One group of a batch."""

    index: Number
    submission: SubmissionId
    place: Number
    """which group of the submission, from 0"""
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
    """A batch with its document {run, step, hash, groups: number, time_ms} (tag BATCH), or why there is none yet."""

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
    """hash of the signed manifest by which they are fetched"""
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
