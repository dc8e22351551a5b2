"""Jobs, verdicts and appeals."""

from typing import Annotated

from pydantic import Field, model_validator

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

MAX_CHUNKS = 1 << 24
Millionths = Annotated[int, Field(ge=-(10**12), le=10**12)]


MAX_JOBS = 8
"""submissions that a validator may have claimed at once"""


class ClaimRequest(Message):
    """A validator asks for submissions to judge."""

    wait_s: WaitSeconds = 0
    most: Annotated[int, Field(ge=1, le=MAX_JOBS)] = 1
    """how many at once; they are of one version, and fewer if others could judge them meanwhile"""


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
    """Jobs, or none now."""

    jobs: Annotated[tuple[Job, ...], Field(max_length=MAX_JOBS)] = ()
    retry_after_s: Number = 0

    @property
    def job(self) -> Job | None:
        """The first of them, which is all that who asked for one may get."""
        return self.jobs[0] if self.jobs else None


class Finding(Message):
    """One check of a submission: what was measured and what is allowed."""

    check: ShortText
    statistic: Decimal
    threshold: Decimal
    passed: bool
    where: ShortText = ""


class GroupNumbers(Message):
    """What a group's rollouts are like, to be held against those of others."""

    tokens: Number
    reward: Millionths
    """mean"""
    entropy: Millionths
    """mean negative log-prob of the tokens, as stated"""


class GroupFinding(Message):
    """Whether a group counts for its batch: it has a learning signal, or the recipe filters none out."""

    index: Number
    signal: bool
    numbers: GroupNumbers | None = None
    """none if they were not measured; then the group says nothing about its owner"""


class DriftCount(Message):
    """How many checked chunks have stated log-probs further from the replayed ones than a level of the calibration."""

    level: Annotated[int, Field(ge=0, lt=4)]
    chance: Annotated[int, Field(ge=1, le=1_000_000)]
    """of an honest chunk to be so far off, at most; in millionths"""
    chunks: Annotated[int, Field(ge=0, le=MAX_CHUNKS)]
    above: Annotated[int, Field(ge=0, le=MAX_CHUNKS)]

    @model_validator(mode="after")
    def _is_part(self) -> "DriftCount":
        if self.above > self.chunks:
            raise ValueError("more chunks above a level than chunks")
        return self


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
    drift: Annotated[tuple[DriftCount, ...], Field(max_length=8)] = ()
    """of full chunks and of short ones, at each level"""


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
