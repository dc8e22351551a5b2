"""What everybody may ask a coordinator, without a key: status, papers, the ledger and its proofs.

Nothing that comes back is trusted here: signatures, proofs and hashes are for the caller to check. Methods raise
`RefusedError`, `UnreachableError` and `KeepError`, and nothing else that the other side could cause.
"""

from functools import partial
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from shoal.errors import ConfigError
from shoal.swarm.api.answers import BundleAnswer, ChallengeAnswer, Explanation, HeadAnswer, Leaders, ProofAnswer
from shoal.swarm.api.pages import PageAnswer, ParamsAnswer
from shoal.swarm.asking import Asker, UnreachableError
from shoal.swarm.bundle import Bundle
from shoal.swarm.carrier import MAX_ANSWER_BYTES
from shoal.swarm.event import Event, EventError
from shoal.swarm.head import HeadError, SignedHead, decode_proof
from shoal.swarm.keepsakes import KeepError
from shoal.swarm.link import Answer, Link, Place
from shoal.swarm.messages import Status
from shoal.swarm.papers import MAX_CALIBRATION_BYTES, MAX_TASKS_BYTES
from shoal.swarm.params import RunParams, parse_params

MAX_PAGE_BYTES = 1 << 22

Model = TypeVar("Model", bound=BaseModel)


class OpenClient:
    """What everybody may ask, without a key."""

    def __init__(self, place: Place, *, link: Link | None = None, asker: Asker | None = None) -> None:
        self._link = link or Link(place)
        self._asker = asker or Asker()

    async def read_status(self) -> Status:
        """The run at a glance."""
        return await self._get("/v1/status", Status)

    async def read_leaders(self) -> Leaders:
        """Owners by accepted tokens."""
        return await self._get("/v1/leaders", Leaders)

    async def explain(self, submission: str) -> Explanation:
        """All that is known of a submission, in words."""
        return await self._get(f"/v1/submissions/{submission}/explanation", Explanation)

    async def read_descriptor(self) -> bytes:
        """The run's descriptor, signed; not checked here."""
        return (await self._get_answer("/v1/descriptor")).body

    async def read_challenge(self, node: str) -> str:
        """The work to do before joining."""
        return (await self._get(f"/v1/challenges/{node}", ChallengeAnswer)).challenge

    async def read_head(self) -> SignedHead | None:
        """The newest signed head; its signature is not looked at."""
        text = (await self._get("/v1/head", HeadAnswer)).head
        return None if text is None else parse_head(text)

    async def read_proof(self, old: int, new: int) -> tuple[bytes, ...]:
        """What shall prove that the ledger of `new` events begins with that of `old`."""
        return decode_proof(list((await self._get(f"/v1/proofs/{old}/{new}", ProofAnswer)).proof))

    async def read_event(self, seq: int) -> bytes:
        """An event with its proof (`Bundle.from_bytes`)."""
        return (await self._get(f"/v1/events/{seq}", BundleAnswer)).bundle.encode()

    async def read_page(self, first: int) -> list[Event]:
        """Events from number `first` on, at least one, in order; nothing else about them is checked."""
        answer = await self._get(f"/v1/ledger/{first}", PageAnswer, MAX_PAGE_BYTES)
        try:
            events = [Bundle.from_bytes(text.encode()).event for text in answer.events]
        except EventError as error:
            raise UnreachableError(f"the server sent events that are none: {error}") from None
        if not events or [event.seq for event in events] != list(range(first, first + len(events))):
            raise UnreachableError("the server sent other events than it was asked for")
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
        """The run's parameters as they are now."""
        answer = await self._get("/v1/params", ParamsAnswer)
        try:
            return parse_params(answer.params)
        except ConfigError as error:
            raise UnreachableError("the server sent no parameters of a run of this version") from error

    async def bring(self, target: str, message: BaseModel, model: type[Model]) -> Model:
        """Bring a statement that carries its own signature: an appeal, a revocation, a command."""
        body = message.model_dump_json().encode()
        headers = [("Content-Length", str(len(body))), ("Content-Type", "application/json")]
        attempt = partial(self._link.ask, "POST", target, headers, body, MAX_ANSWER_BYTES)
        return parse_answer(model, await self._asker.persist(attempt))

    def close(self) -> None:
        """Close what is idle."""
        self._link.close()

    async def _get(self, target: str, model: type[Model], max_bytes: int = MAX_ANSWER_BYTES) -> Model:
        return parse_answer(model, await self._get_answer(target, max_bytes))

    async def _get_answer(self, target: str, max_bytes: int = MAX_ANSWER_BYTES) -> Answer:
        return await self._asker.persist(partial(self._link.ask, "GET", target, [], b"", max_bytes))


def parse_answer(model: type[Model], answer: Answer) -> Model:
    """The message that an answer holds; `UnreachableError` if it holds none."""
    try:
        return model.model_validate_json(answer.body)
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors(include_input=False)[0]["loc"])[:80]
        raise UnreachableError(f"the answer is not one of a coordinator of this version (at {place})") from None


def parse_head(text: str) -> SignedHead:
    """A head that was shown; its signature is not looked at."""
    try:
        return SignedHead.from_bytes(text.encode())
    except HeadError as error:
        raise KeepError(f"the coordinator showed no head: {error}") from None
