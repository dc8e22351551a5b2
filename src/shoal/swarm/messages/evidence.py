"""What the accused may see: by what a submission was judged."""

from typing import Annotated

from pydantic import Field

from shoal.swarm.messages.base import MAX_ROLLOUTS, Digest, Message, Number, SubmissionState
from shoal.swarm.messages.judging import Job, SignedVerdict

MAX_SITTINGS = 64


class Sitting(Message):
    """One verdict, by its place in the ledger, and what its validator was asked otherwise than others."""

    round: Number
    validator: Digest
    seq: Number
    """number of the verdict's event"""
    check_ppm: Number
    duplicates: Annotated[tuple[Number, ...], Field(max_length=MAX_ROLLOUTS)]


class Evidence(Message):
    """By what a submission was judged; body of a document (tag EVIDENCE)."""

    run: str
    state: SubmissionState
    job: Job
    """of the first sitting"""
    weights: Digest
    """root of the job's version"""
    sittings: Annotated[tuple[Sitting, ...], Field(min_length=1, max_length=MAX_SITTINGS)]
    """in order of rounds"""

    def list_jobs(self) -> list[Job]:
        """The job of each sitting."""
        return [
            self.job.model_copy(
                update={"round": own.round, "check_ppm": own.check_ppm, "duplicates": own.duplicates, "deadline_ms": 0}
            )
            for own in self.sittings
        ]


class EvidenceAnswer(Message):
    """Evidence, the verdicts as their validators signed them, and the document to keep or to show to others."""

    evidence: Evidence
    verdicts: Annotated[tuple[SignedVerdict, ...], Field(max_length=MAX_SITTINGS)]
    """of each sitting"""
    document: str
