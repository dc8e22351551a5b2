"""Jobs, verdicts and appeals."""

from typing import Annotated

from pydantic import Field

from shoal.swarm.messages.base import (
    MAX_ROLLOUTS,
    Decimal,
    Digest,
    Message,
    Number,
    ShortText,
    SignatureText,
    SubmissionId,
    SubmissionState,
    Verdict,
    WaitSeconds,
)
from shoal.swarm.messages.work import Manifest


class ClaimRequest(Message):
    """A validator asks for a submission to judge."""

    wait_s: WaitSeconds = 0


class Job(Message):
    """A submission to judge. It does not say whose it is."""

    submission: SubmissionId
    round: Number
    """1 for the first opinion"""
    step: Number
    first: Number
    count: Number
    group_size: Number
    max_tokens: Number
    beacon: Digest
    version: Number
    manifest: Manifest
    """its signature was checked when it was committed"""
    check_ppm: Number
    """share of rollouts whose proof is to be checked, in millionths"""
    check_seed: Digest
    """which ones: known to nobody before the manifest was committed"""
    duplicates: tuple[Number, ...]
    """positions of rollouts whose tokens another submission had before, elsewhere"""
    deadline_ms: Number


class ClaimAnswer(Message):
    """A job, or none now."""

    job: Job | None
    retry_after_s: Number = 0


class Finding(Message):
    """One check of a submission: what was measured and what is allowed."""

    check: ShortText
    statistic: Decimal
    threshold: Decimal
    passed: bool
    where: ShortText = ""


class GroupFinding(Message):
    """Whether a group carries a learning signal: rewards that differ."""

    index: Number
    signal: bool


class VerdictStatement(Message):
    """What a validator found."""

    submission: SubmissionId
    round: Number
    verdict: Verdict
    findings: Annotated[tuple[Finding, ...], Field(max_length=64)] = ()
    tokens: Number = 0
    """validated tokens: what is paid for"""
    groups: Annotated[tuple[GroupFinding, ...], Field(max_length=MAX_ROLLOUTS)] = ()
    """all groups of the submission, if it is accepted"""


class SignedVerdict(Message):
    """A verdict and the validator's signature (kind val.verdict, subject: the submission)."""

    verdict: VerdictStatement
    signature: SignatureText


class VerdictRecord(Message):
    """What became of a verdict; body of a document (tag VERDICT)."""

    run: str
    submission: SubmissionId
    validator: Digest
    round: Number
    verdict: Verdict
    state: SubmissionState
    """of the submission afterwards; `received` while another opinion is awaited"""
    paid: Number
    """micro-credits to the submission's owner"""
    time_ms: Number


class VerdictAnswer(Message):
    """A record to keep."""

    record: VerdictRecord
    document: str


class AppealStatement(Message):
    """An owner asks for a second look at a rejection."""

    submission: SubmissionId


class SignedAppeal(Message):
    """An appeal and the owner's signature (kind appeal, subject: the submission); open to banned owners too."""

    appeal: AppealStatement
    owner: Digest
    signature: SignatureText


class AppealAnswer(Message):
    """The appeal is in the queue."""

    submission: SubmissionId
    state: str
    """open, upheld, reversed"""
    fee: Number
