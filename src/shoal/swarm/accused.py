"""An owner's side of what it may see about its own submissions, once they are decided.

Invariant: what is returned was signed for this run: the evidence by the coordinator, each verdict by its validator. A
coordinator cannot show other verdicts than were given, nor deny later what it showed.
"""

from pathlib import Path

from pydantic import ValidationError

from shoal.errors import ConfigError
from shoal.files import write_output
from shoal.keys import Key
from shoal.swarm.asking import Asker
from shoal.swarm.carrier import MAX_ANSWER_BYTES
from shoal.swarm.client_auth import RequestSigner
from shoal.swarm.intake import Intake
from shoal.swarm.keepsakes import KeepError
from shoal.swarm.link import Answer, Link, Place
from shoal.swarm.messages import EvidenceAnswer, open_message
from shoal.swarm.open_client import OpenClient, parse_answer
from shoal.swarm.refusal import AuthError
from shoal.swarm.tags import DocumentError, Tag, open_document


class AccusedClient(OpenClient):
    """What an owner may ask under its own key, or under that of one of its nodes."""

    def __init__(
        self,
        place: Place,
        key: Key,
        *,
        run: str,
        coordinator: str,
        link: Link | None = None,
        asker: Asker | None = None,
    ) -> None:
        super().__init__(place, link=link, asker=asker)
        self._run, self._coordinator = run, coordinator
        self._signer = RequestSigner(key, run, coordinator)

    async def read_evidence(self, submission: str) -> EvidenceAnswer:
        """By what a submission was judged."""
        target = f"/v1/submissions/{submission}/evidence"

        async def attempt() -> Answer:
            return await self._link.ask("GET", target, self._signer.sign_request("GET", target), b"", MAX_ANSWER_BYTES)

        answer = parse_answer(EvidenceAnswer, await self._asker.persist(attempt, self._signer))
        check_evidence(answer, submission, run=self._run, coordinator=self._coordinator)
        return answer

    async def fetch_file(self, submission: str, blob: str, size: int, path: Path) -> None:
        """The file of a submission into a new file, which is there only if it has the right bytes."""
        target = f"/v1/submissions/{submission}/file"
        with Intake(path, blob, size) as intake:

            async def attempt() -> Answer:
                intake.restart()
                signed = self._signer.sign_request("GET", target)
                answer = await self._link.fetch(target, signed, intake, MAX_ANSWER_BYTES)
                if answer.status == 200 and not intake.is_whole:
                    raise KeepError("the coordinator sent other bytes than those of the submission")
                return answer

            await self._asker.persist(attempt, self._signer)
            intake.keep()


def check_evidence(answer: EvidenceAnswer, submission: str, *, run: str, coordinator: str) -> None:
    """Refuse evidence that is about something else, or that is not signed by those who say it; KeepError."""
    evidence = answer.evidence
    try:
        body = open_document(coordinator, Tag.EVIDENCE, answer.document.encode())
    except DocumentError as error:
        raise KeepError(f"the evidence is not signed by the run's coordinator: {error}") from None
    if body != evidence.model_dump(mode="json") or (evidence.run, evidence.job.submission) != (run, submission):
        raise KeepError("the evidence is about something else than the coordinator signed, or than was asked for")
    if len(answer.verdicts) != len(evidence.sittings):
        raise KeepError("the evidence has not one verdict for each sitting")
    for sitting, signed in zip(evidence.sittings, answer.verdicts, strict=True):
        said = signed.verdict
        if (said.submission, said.round) != (submission, sitting.round):
            raise KeepError("the evidence has the verdict of another sitting")
        try:
            open_message(run, sitting.validator, said, signed.signature)
        except AuthError as error:
            raise KeepError(f"the verdict of round {said.round} is not its validator's: {error.text}") from None


def save_evidence(path: Path, answer: EvidenceAnswer) -> None:
    """Keep evidence in a file, for others."""
    write_output(path, answer.model_dump_json(indent=1).encode() + b"\n")


def load_evidence(path: Path, submission: str, *, run: str, coordinator: str) -> EvidenceAnswer:
    """Evidence that an owner kept; ConfigError if it is none of this run's coordinator."""
    try:
        with path.open("rb") as file:
            answer = EvidenceAnswer.model_validate_json(file.read(MAX_ANSWER_BYTES))
        check_evidence(answer, submission, run=run, coordinator=coordinator)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError:
        raise ConfigError(f"{path}: no evidence as `shoal verify --save` writes it") from None
    except KeepError as error:
        raise ConfigError(f"{path}: {error}") from None
    return answer
