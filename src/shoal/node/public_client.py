"""Coordinator requests that need no key: status, files of the run, the ledger and its proofs.

`SignedClient` adds signed requests; the clients of nodes and owners are built on it.

Invariants:
- once the coordinator's key is known (`trust`), every answer must be signed by it for the very request it answers
  (`identity/signatures.py`), refusals included; anything else counts as no answer. Only files whose hash is known in
  advance are exempt;
- before that, answers are not trusted: callers check signatures, proofs and hashes.

Methods raise `RefusedError`, `UnreachableError` and `InvalidDocumentError`, and nothing else that the other side could
cause.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from shoal.errors import ConfigError, UnreachableError
from shoal.identity.keys import Key
from shoal.identity.signer import RequestSigner
from shoal.ledger.event import Event, EventError
from shoal.ledger.head import HeadError, InclusionProof, SignedHead
from shoal.net.client import Download, Endpoint, HttpClient, HttpClientError, HttpResponse
from shoal.net.retry import RetryingClient
from shoal.node.receipts import InvalidDocumentError
from shoal.protocol.messages import (
    ChallengeAnswer,
    Explanation,
    HeadAnswer,
    InclusionAnswer,
    KeyAnswer,
    Leaders,
    OwnerAccount,
    PageAnswer,
    ParamsAnswer,
    ProofAnswer,
    Status,
)
from shoal.protocol.params import MAX_CALIBRATION_BYTES, MAX_TASKS_BYTES, RunParams, parse_params

MAX_ANSWER_BYTES = 1 << 20
MAX_PAGE_BYTES = 1 << 22

Model = TypeVar("Model", bound=BaseModel)


class PublicClient:
    """Requests that need no key."""

    def __init__(self, place: Endpoint, *, link: HttpClient | None = None, asker: RetryingClient | None = None) -> None:
        self.url = str(place)
        self._link = link or HttpClient(place)
        self._asker = asker or RetryingClient()
        self._signer: RequestSigner | None = None

    def trust(self, run: str, coordinator: str) -> None:
        """From now on accept only what this coordinator signs; requests get a signature that it can bind answers to."""
        if self._signer is None:
            self._signer = RequestSigner(Key.generate(), run, coordinator)

    async def read_status(self) -> Status:
        """A summary of the run."""
        return await self._get("/v1/status", Status)

    async def read_leaders(self) -> Leaders:
        """Owners by accepted tokens."""
        return await self._get("/v1/leaders", Leaders)

    async def read_account(self, owner: str) -> OwnerAccount:
        """The record and the credit of one owner."""
        return await self._get(f"/v1/owners/{owner}", OwnerAccount)

    async def find_key(self, prefix: str) -> KeyAnswer:
        """Owners by the beginning of a key, their own or a node's; at least 8 digits."""
        return await self._get(f"/v1/keys/{prefix}", KeyAnswer)

    async def explain(self, submission: str) -> Explanation:
        """Everything known about a submission, as text."""
        return await self._get(f"/v1/submissions/{submission}/explanation", Explanation)

    async def read_descriptor(self) -> bytes:
        """The run's signed descriptor; not checked here."""
        return (await self._get_answer("/v1/descriptor")).body

    async def read_challenge(self, node: str) -> str:
        """The proof-of-work challenge for joining."""
        return (await self._get(f"/v1/challenges/{node}", ChallengeAnswer)).challenge

    async def read_head(self) -> SignedHead | None:
        """The newest signed head; its signature is not checked here."""
        text = (await self._get("/v1/head", HeadAnswer)).head
        return None if text is None else parse_head(text)

    async def read_proof(self, old: int, new: int) -> tuple[bytes, ...]:
        """The proof that the ledger of `new` events begins with that of `old`; not checked here."""
        return tuple(map(bytes.fromhex, (await self._get(f"/v1/proofs/{old}/{new}", ProofAnswer)).proof))

    async def read_event(self, seq: int) -> bytes:
        """An event with its proof (`InclusionProof.from_bytes`)."""
        return (await self._get(f"/v1/events/{seq}", InclusionAnswer)).bundle.encode()

    async def read_page(self, first: int) -> list[Event]:
        """Events from number `first` on, at least one, in order; nothing else about them is checked."""
        answer = await self._get(f"/v1/ledger/{first}", PageAnswer, MAX_PAGE_BYTES)
        try:
            events = [InclusionProof.from_bytes(text.encode()).event for text in answer.events]
        except EventError as error:
            raise UnreachableError(f"the server sent malformed events: {error}") from None
        if not events or [event.seq for event in events] != list(range(first, first + len(events))):
            raise UnreachableError("the server sent other events than requested")
        return events

    async def read_recipe(self) -> bytes:
        """The bytes of the run's recipe; not checked here."""
        return (await self._get_answer("/v1/recipe")).body

    async def read_calibration(self) -> bytes:
        """The bytes of the run's calibration; not checked here."""
        return (await self._get_answer("/v1/calibration", MAX_CALIBRATION_BYTES)).body

    async def read_tasks(self, size: int) -> bytes:
        """The bytes of the run's task set, `size` at most; not checked here."""
        return (await self._get_answer("/v1/tasks", min(size, MAX_TASKS_BYTES))).body

    async def read_params(self) -> RunParams:
        """The run's current parameters."""
        answer = await self._get("/v1/params", ParamsAnswer)
        try:
            return parse_params(answer.params)
        except ConfigError as error:
            raise UnreachableError("the server sent run parameters that this version of shoal cannot read") from error

    async def bring(self, target: str, message: BaseModel, model: type[Model]) -> Model:
        """Post a statement that carries its own signature: an appeal, a revocation, a command."""
        assert self._signer is not None, "whoever signs a statement for a run knows its coordinator"
        return parse_answer(model, await self._exchange("POST", target, message.model_dump_json().encode()))

    def close(self) -> None:
        """Close idle connections."""
        self._link.close()

    async def _get(self, target: str, model: type[Model], max_bytes: int = MAX_ANSWER_BYTES) -> Model:
        return parse_answer(model, await self._get_answer(target, max_bytes))

    async def _get_answer(self, target: str, max_bytes: int = MAX_ANSWER_BYTES) -> HttpResponse:
        return await self._exchange("GET", target, max_bytes=max_bytes)

    async def _exchange(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        extra: Sequence[tuple[str, str]] = (),
        *,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> HttpResponse:
        """Send a request until it is answered; with a known coordinator both request and answer are signed."""
        signer = self._signer

        async def attempt() -> HttpResponse:
            headers = [] if signer is None else [*signer.sign_request(method, target, body), *extra]
            answer = await self._link.ask(method, target, headers, body, max_bytes)
            return answer if signer is None else signer.check_answer(method, target, headers, answer)

        return await self._asker.call_with_retry(attempt, signer)


class SignedClient(PublicClient):
    """Requests under a key, and those that need none. Each attempt is signed again."""

    def __init__(
        self,
        place: Endpoint,
        key: Key,
        *,
        run: str,
        coordinator: str,
        link: HttpClient | None = None,
        asker: RetryingClient | None = None,
    ) -> None:
        super().__init__(place, link=link, asker=asker)
        self._key, self._run, self._coordinator = key, run, coordinator
        self._signer: RequestSigner = RequestSigner(key, run, coordinator)

    async def _call(
        self,
        method: str,
        target: str,
        model: type[Model],
        message: BaseModel | None = None,
        extra: Sequence[tuple[str, str]] = (),
        *,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> Model:
        """Send a message and parse the answer as `model`."""
        self._check_server()
        body = b"" if message is None else message.model_dump_json().encode()
        return parse_answer(model, await self._exchange(method, target, body, extra, max_bytes=max_bytes))

    async def _fetch_file(self, target: str, download: Download) -> None:
        """Read a file from the coordinator; `download` is complete afterwards."""

        async def attempt() -> HttpResponse:
            download.restart()
            headers = self._signer.sign_request("GET", target)
            answer = await self._link.fetch(target, headers, download, MAX_ANSWER_BYTES)
            if answer.status != 200:
                return self._signer.check_answer("GET", target, headers, answer)
            if not download.is_whole:
                raise HttpClientError(f"{target}: other bytes than those of the submission")
            return replace(answer, is_signed=True)  # by the hash, which came in a signed answer

        await self._asker.call_with_retry(attempt, self._signer)

    def _check_server(self) -> None:
        """Called before each request; raises if this server must not be used any more."""


def parse_answer(model: type[Model], answer: HttpResponse) -> Model:
    """Parse the message in an answer; `UnreachableError` if it is invalid."""
    try:
        return model.model_validate_json(answer.body)
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors(include_input=False)[0]["loc"])[:80]
        raise UnreachableError(f"not an answer of a coordinator of this version (at {place})") from None


def parse_head(text: str) -> SignedHead:
    """Parse a head; its signature is not checked."""
    try:
        return SignedHead.from_bytes(text.encode())
    except HeadError as error:
        raise InvalidDocumentError(f"invalid ledger head from the coordinator: {error}") from None
