"""The client of an owner: evidence about its own submissions, once they are decided.

Invariant: everything returned is signed for this run: the evidence by the coordinator, each verdict by its validator. A
coordinator can neither show verdicts that were not given nor deny later what it showed.
"""

from pathlib import Path

from pydantic import ValidationError

from shoal.errors import ConfigError
from shoal.identity.documents import DocumentError, Tag, open_document
from shoal.net.api_error import ApiError
from shoal.net.client import Download
from shoal.node.public_client import MAX_ANSWER_BYTES, SignedClient
from shoal.node.receipts import InvalidDocumentError
from shoal.protocol.messages import EvidenceAnswer, open_message
from shoal.util.files import write_output


class OwnerClient(SignedClient):
    """Requests of an owner under its own key, or under that of one of its nodes."""

    async def read_evidence(self, submission: str) -> EvidenceAnswer:
        """The evidence by which a submission was judged."""
        answer = await self._call("GET", f"/v1/submissions/{submission}/evidence", EvidenceAnswer)
        check_evidence(answer, submission, run=self._run, coordinator=self._coordinator)
        return answer

    async def fetch_file(self, submission: str, blob: str, size: int, path: Path) -> None:
        """Download the file of a submission to a new file, which exists only if its bytes are right."""
        with Download(path, blob, size) as download:
            await self._fetch_file(f"/v1/submissions/{submission}/file", download)
            download.keep()


def check_evidence(answer: EvidenceAnswer, submission: str, *, run: str, coordinator: str) -> None:
    """`InvalidDocumentError` for evidence about another submission, or not signed by the keys it names."""
    evidence = answer.evidence
    try:
        body = open_document(coordinator, Tag.EVIDENCE, answer.document.encode())
    except DocumentError as error:
        raise InvalidDocumentError(f"the evidence is not signed by the run's coordinator: {error}") from None
    if body != evidence.model_dump(mode="json") or (evidence.run, evidence.job.submission) != (run, submission):
        raise InvalidDocumentError(
            "the evidence does not match what the coordinator signed, or is for another submission"
        )
    if len(answer.verdicts) != len(evidence.sittings):
        raise InvalidDocumentError("the evidence does not have one verdict per sitting")
    for sitting, signed in zip(evidence.sittings, answer.verdicts, strict=True):
        verdict = signed.verdict
        if (verdict.submission, verdict.round) != (submission, sitting.round):
            raise InvalidDocumentError("the evidence has a verdict of another sitting")
        try:
            open_message(run, sitting.validator, verdict, signed.signature)
        except ApiError as error:
            raise InvalidDocumentError(
                f"the verdict of round {verdict.round} is not signed by its validator: {error.text}"
            ) from None


def save_evidence(path: Path, answer: EvidenceAnswer) -> None:
    """Write evidence to a file."""
    write_output(path, answer.model_dump_json(indent=1).encode() + b"\n")


def load_evidence(path: Path, submission: str, *, run: str, coordinator: str) -> EvidenceAnswer:
    """Read evidence from a file; ConfigError if the run's coordinator did not sign it."""
    try:
        with path.open("rb") as file:
            answer = EvidenceAnswer.model_validate_json(file.read(MAX_ANSWER_BYTES))
        check_evidence(answer, submission, run=run, coordinator=coordinator)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError:
        raise ConfigError(f"{path}: not evidence as written by `shoal verify --save`") from None
    except InvalidDocumentError as error:
        raise ConfigError(f"{path}: {error}") from None
    return answer
