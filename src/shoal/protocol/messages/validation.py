"""Jobs, verdicts, appeals, and the evidence that the accused owner may see."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.protocol.messages.base import (
    MAX_ROLLOUTS,
    Decimal,
    Digest,
    GroupSeedTexts,
    Message,
    Number,
    ShortText,
    SignatureText,
    SubmissionId,
    SubmissionState,
    Verdict,
    WaitSeconds,
)
from shoal.protocol.messages.work import Manifest

MAX_CHUNKS = 1 << 24
MAX_CPU_MS = 3_600_000
Millionths = Annotated[int, Field(ge=-(10**12), le=10**12)]


MAX_JOBS = 8
"""submissions that a validator may hold at once"""


class ClaimRequest(Message):
    """A validator requests submissions to judge."""

    wait_s: WaitSeconds = 0
    most: Annotated[int, Field(ge=1, le=MAX_JOBS)] = 1
    """how many at once; all are of one version, and there are fewer if other validators could judge them meanwhile"""


class Job(Message):
    """A submission to judge. Its owner is not included."""

    submission: SubmissionId
    round: Number
    """1 for the first opinion"""
    step: Number
    first: Number
    count: Number
    group_size: Number
    max_tokens: Number
    seeds: GroupSeedTexts
    """of each group, see `Lease`"""
    version: Number
    manifest: Manifest
    """its signature was checked when it was committed"""
    check_ppm: Number
    """share of rollouts whose proof is to be checked, in millionths"""
    check_seed: Digest
    """selects the rollouts; unpredictable before the manifest was committed"""
    bounded: bool
    """whether its file must be read with little more CPU time than honest files need: its owner has no record"""
    duplicates: tuple[Number, ...]
    """positions of rollouts whose tokens also occur in an earlier submission"""
    deadline_ms: Number


class ClaimAnswer(Message):
    """Jobs; empty if no submission waits for a verdict now."""

    jobs: Annotated[tuple[Job, ...], Field(max_length=MAX_JOBS)] = ()
    retry_after_s: Number = 0

    @property
    def job(self) -> Job | None:
        """The first job, for callers that requested one."""
        return self.jobs[0] if self.jobs else None


class Finding(Message):
    """One check of a submission: the measured value and the limit."""

    check: ShortText
    statistic: Decimal
    threshold: Decimal
    passed: bool
    where: ShortText = ""


class GroupNumbers(Message):
    """Statistics of a group's rollouts, for comparison with those of others."""

    tokens: Number
    reward: Millionths
    """mean"""
    entropy: Millionths
    """mean negative log-prob of the tokens, as stated"""


class GroupFinding(Message):
    """Whether a group counts for its batch: it has a learning signal, or the recipe does not filter."""

    index: Number
    signal: bool
    numbers: GroupNumbers | None = None
    """none if they were not measured; the group then says nothing about its owner"""


class DriftCount(Message):
    """Number of checked chunks whose stated log-probs differ from replayed ones by more than a calibration level."""

    level: Annotated[int, Field(ge=0, lt=4)]
    chance: Annotated[int, Field(ge=1, le=1_000_000)]
    """upper bound of the chance that an honest chunk exceeds the level; in millionths"""
    chunks: Annotated[int, Field(ge=0, le=MAX_CHUNKS)]
    above: Annotated[int, Field(ge=0, le=MAX_CHUNKS)]

    @model_validator(mode="after")
    def _is_part(self) -> "DriftCount":
        if self.above > self.chunks:
            raise ValueError("more chunks above a level than chunks")
        return self


MAX_ODDS = 10**15
NUM_ODDS = 3
"""shares of cheated rollouts for which odds are stated"""


class RivalOdds(Message):
    """Odds that the checked rollouts were made with other weights than stated (toploc/rivals.py)."""

    rival: Literal["int8", "int8_groups", "previous"]
    odds: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_ODDS)], ...], Field(min_length=NUM_ODDS, max_length=NUM_ODDS)
    ]
    """for each share of cheated rollouts, in millionths, rounded down"""


class VerdictStatement(Message):
    """What a validator found."""

    submission: SubmissionId
    round: Number
    verdict: Verdict
    findings: Annotated[tuple[Finding, ...], Field(max_length=64)] = ()
    tokens: Number = 0
    """validated tokens: the basis of pay"""
    groups: Annotated[tuple[GroupFinding, ...], Field(max_length=MAX_ROLLOUTS)] = ()
    """all groups of the submission, if it is accepted"""
    drift: Annotated[tuple[DriftCount, ...], Field(max_length=8)] = ()
    """of full chunks and of short ones, at each level"""
    odds: Annotated[tuple[RivalOdds, ...], Field(max_length=3)] = ()
    """of accepted work, by rival; none in float32"""
    cpu_ms: Annotated[int, Field(ge=0, le=MAX_CPU_MS)] = 0
    """CPU time that it took; charged to the owner of work that is rejected"""


class SignedVerdict(Message):
    """A verdict and the validator's signature (kind val.verdict, subject: the submission)."""

    verdict: VerdictStatement
    signature: SignatureText


class VerdictRecord(Message):
    """Result of a verdict; body of a document (tag VERDICT)."""

    run: str
    submission: SubmissionId
    validator: Digest
    round: Number
    verdict: Verdict
    state: SubmissionState
    """state of the submission after it; `received` while another opinion is pending"""
    paid: Number
    """micro-credits to the submission's owner"""
    time_ms: Number


class VerdictAnswer(Message):
    """A verdict record to keep."""

    record: VerdictRecord
    document: str


class AppealStatement(Message):
    """An owner requests a second look at a rejection."""

    submission: SubmissionId


class SignedAppeal(Message):
    """An appeal and the owner's signature (kind appeal, subject: the submission); available to banned owners too."""

    appeal: AppealStatement
    owner: Digest
    signature: SignatureText


class AppealAnswer(Message):
    """The appeal is in the queue."""

    submission: SubmissionId
    state: str
    """open, upheld, reversed"""
    fee: Number


def describe_appeal(state: str) -> str:
    """What became of an appeal, for its owner: the states name what happened to the rejection."""
    became = {"open": "is open", "upheld": "was denied; the rejection stands", "reversed": "was granted"}
    return f"the appeal {became[state]}"


MAX_SITTINGS = 64


class VerdictContext(Message):
    """One verdict, by its place in the ledger, and how its validator's job differed from that of others."""

    round: Number
    validator: Digest
    seq: Number
    """number of the verdict's event"""
    check_ppm: Number
    duplicates: Annotated[tuple[Number, ...], Field(max_length=MAX_ROLLOUTS)]


class Evidence(Message):
    """The basis on which a submission was judged; body of a document (tag EVIDENCE)."""

    run: str
    state: SubmissionState
    job: Job
    """of the first round"""
    weights: Digest
    """root of the job's version"""
    sittings: Annotated[tuple[VerdictContext, ...], Field(min_length=1, max_length=MAX_SITTINGS)]
    """in order of rounds"""

    def list_jobs(self) -> list[Job]:
        """The job of each round."""
        return [
            self.job.model_copy(
                update={"round": own.round, "check_ppm": own.check_ppm, "duplicates": own.duplicates, "deadline_ms": 0}
            )
            for own in self.sittings
        ]


class EvidenceAnswer(Message):
    """Evidence, the verdicts as signed by their validators, and the document to keep or show to others."""

    evidence: Evidence
    verdicts: Annotated[tuple[SignedVerdict, ...], Field(max_length=MAX_SITTINGS)]
    """one per round"""
    document: str
