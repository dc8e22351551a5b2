"""Messages between peers and a reducer: canonical JSON, signed if they must outlive their connection.

Invariants:
- every field has a bound, an unknown field is an error, and all lengths of payloads follow from the plan;
- an update names its round, its peer, its weight and the SHA-256 of its payload under the peer's signature. An outcome
  names the round, the peers in it, its payload and the state after it under the reducer's signature;
- an outcome as bytes is a length of 4 bytes, the signed document, and the payload.

Changing breaks: communication between releases, and outcomes on disk.

Payloads arrive in chunks, in any order and over several connections, into a buffer of known length.

Invariants:
- the receiver knows the length by itself; what a sender claims only decides whether it may send at all;
- a chunk is written only after its own digest, which its sender signed, was verified;
- nothing is returned before the digest of the whole was verified.
"""

import hashlib
import struct
from dataclasses import asdict
from typing import Annotated, Literal, TypeVar

from pydantic import Field, StringConstraints, ValidationError

from shoal.diloco.codecs import find_codec
from shoal.diloco.outer import DilocoPlan, Rules
from shoal.diloco.round import MAX_STEPS, MAX_TOKENS, RoundKey, RoundOutcome, Update
from shoal.identity.documents import DocumentError, Tag, open_claimed, sign_document
from shoal.identity.keys import Key
from shoal.protocol.messages import Digest, Message, Number, ShortText
from shoal.util.canonical import encode_canonical
from shoal.util.units import RUN

CHUNK_BYTES = 1 << 20
"""bytes of a payload per request. Changing breaks: uploads between releases."""
MAX_PEERS = 128
MAX_FRAGMENTS = 256
MAX_LANES = 4096
MAX_SEED = (1 << 53) - 1
MAX_ELEMENTS = 1 << 36
MAX_DOCUMENT_BYTES = 1 << 18
_LENGTH = struct.Struct("<I")

RunName = Annotated[str, StringConstraints(pattern=rf"^{RUN.pattern}$")]
Fragment = Annotated[int, Field(ge=0, lt=MAX_FRAGMENTS)]
Rounds = Annotated[tuple[Number, ...], Field(max_length=MAX_FRAGMENTS)]
"""completed rounds of every fragment"""
Lane = tuple[Annotated[int, Field(ge=0, lt=MAX_LANES)], Number]
M = TypeVar("M", bound=Message)


class MessageError(ValueError):
    """The bytes are not a message of this kind, or were not signed by the expected key."""


class ReducerInfo(Message):
    """The description of a run that a reducer gives to anyone."""

    run: RunName
    sizes: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_ELEMENTS)], ...], Field(max_length=MAX_FRAGMENTS)]
    num_lanes: Annotated[int, Field(ge=0, le=MAX_LANES)]
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)]
    """seed of the data order"""
    rules: Annotated[str, StringConstraints(max_length=4096)]
    """JSON of `Rules`; as text, because it contains fractions"""


class RoundMessage(Message):
    """A message about a round."""

    run: RunName
    round: Number
    fragment: Fragment
    base: Digest

    @property
    def key(self) -> RoundKey:
        """The round."""
        return RoundKey(self.run, self.round, self.fragment, self.base)


class UpdateOffer(RoundMessage):
    """An update without its payload."""

    tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    steps: Annotated[int, Field(ge=0, le=MAX_STEPS)]
    codec: ShortText
    size: Number
    """bytes of the payload"""
    digest: Digest
    """SHA-256 of the payload"""
    lanes: Annotated[tuple[Lane, ...], Field(max_length=MAX_LANES)] = ()
    compute_ms: Number = 0


class WantedChunks(Message):
    """What the reducer still needs of an update (open, delivered), or of a state that it lost (waiting, wanted)."""

    status: Literal["open", "delivered", "waiting", "wanted"]
    missing: tuple[tuple[Number, Number], ...] = ()
    """missing chunks, as half-open ranges"""


class OutcomeHead(RoundMessage):
    """An outcome without its payload."""

    peers: Annotated[tuple[Digest, ...], Field(min_length=1, max_length=MAX_PEERS)]
    size: Number
    digest: Digest
    state: Digest
    step: Number
    members: Annotated[tuple[Digest, ...], Field(max_length=2 * MAX_PEERS)]
    lanes: Annotated[tuple[Number, ...], Field(max_length=MAX_LANES)]
    steps: Annotated[tuple[Number, ...], Field(max_length=MAX_PEERS)]
    number: Number = 0


class HeldState(Message):
    """The state that a peer holds, offered to a reducer that lost its own."""

    hash: Digest
    size: Number
    digest: Digest
    """SHA-256 of its bytes"""
    rounds: Rounds


class StateHead(HeldState):
    """The state that a reducer holds, without its arrays."""

    run: RunName


class WatchAnswer(Message):
    """The progress of the run."""

    rounds: Rounds


class JoinAnswer(WatchAnswer):
    """The response to a peer that joined."""

    is_member: bool
    """whether it reads data from now on; otherwise from the next round on"""


def make_card(plan: DilocoPlan) -> ReducerInfo:
    """Describe a plan."""
    rules = plan.rules.model_dump_json()
    return ReducerInfo(run=plan.run, sizes=plan.sizes, num_lanes=plan.num_lanes, seed=plan.seed, rules=rules)


def read_card(card: ReducerInfo) -> DilocoPlan:
    """The plan in a description."""
    try:
        rules = Rules.model_validate_json(card.rules)
    except ValidationError:
        raise MessageError("unknown rules from the reducer; it may run a different release") from None
    return DilocoPlan(card.run, card.sizes, rules, card.num_lanes, card.seed)


def make_offer(update: Update) -> UpdateOffer:
    """The offer that announces an update before its payload is sent."""
    return UpdateOffer(
        **asdict(update.key),
        tokens=update.tokens,
        steps=update.steps,
        codec=update.codec,
        size=len(update.payload),
        digest=hashlib.sha256(update.payload).hexdigest(),
        lanes=update.lanes,
        compute_ms=update.compute_ms,
    )


def read_update(offer: UpdateOffer, peer: str, payload: bytes) -> Update:
    """The update of an offer whose payload has arrived."""
    fields = offer.tokens, offer.steps, payload, offer.codec, offer.lanes, offer.compute_ms
    return Update(offer.key, peer, *fields)


def sign_message(key: Key, tag: Tag, message: Message) -> bytes:
    """Sign a message as a document."""
    return sign_document(key, tag, message.model_dump(mode="json"))


def open_message(public: str | None, tag: Tag, data: bytes, model: type[M]) -> tuple[str, M]:
    """Signer and message of a document; `MessageError` if `public` is given and did not sign it."""
    try:
        signer, body = open_claimed(tag, data, max_bytes=MAX_DOCUMENT_BYTES)
    except DocumentError as error:
        raise MessageError(str(error)) from None
    if public not in (None, signer):
        raise MessageError("signed by a different key")
    return signer, read_message(encode_canonical(body), model)


def read_message(data: bytes, model: type[M]) -> M:
    """Parse the message in a body."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        names = ".".join(str(part) for part in error.errors(include_input=False)[0]["loc"])[:80]
        raise MessageError(f"not a message of this kind, at {names or 'its top'}") from None


def encode_outcome(key: Key, outcome: RoundOutcome) -> bytes:
    """Encode an outcome as the reducer stores and sends it."""
    head = OutcomeHead(
        **asdict(outcome.key),
        peers=outcome.peers,
        size=len(outcome.payload),
        digest=hashlib.sha256(outcome.payload).hexdigest(),
        state=outcome.state,
        step=outcome.step,
        members=outcome.members,
        lanes=outcome.lanes,
        steps=outcome.steps,
        number=outcome.number,
    )
    document = sign_message(key, Tag.OUTCOME, head)
    return b"".join((_LENGTH.pack(len(document)), document, outcome.payload))


def split_outcome(data: bytes, reducer: str, plan: DilocoPlan) -> tuple[OutcomeHead, int]:
    """The head of an outcome that this reducer signed, and where its payload begins. Does not check the payload."""
    if len(data) < _LENGTH.size:
        raise MessageError("outcome shorter than its length field")
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    if length > MAX_DOCUMENT_BYTES or len(data) < start:
        raise MessageError("outcome shorter than its head")
    _, head = open_message(reducer, Tag.OUTCOME, data[_LENGTH.size : start], OutcomeHead)
    if head.run != plan.run or head.fragment >= len(plan.sizes) or head.size != count_payload(plan, head.fragment):
        raise MessageError("outcome of a different run or size")
    return head, start


def join_outcome(head: OutcomeHead, payload: bytes) -> RoundOutcome:
    """Combine a head and its payload; `MessageError` if they do not belong together."""
    if len(payload) != head.size or hashlib.sha256(payload).hexdigest() != head.digest:
        raise MessageError("the payload does not match the outcome's digest")
    positions = head.step, head.members, head.lanes, head.steps, head.number
    return RoundOutcome(head.key, head.peers, payload, head.state, *positions)


def count_payload(plan: DilocoPlan, fragment: int) -> int:
    """Payload size of an update or outcome of a fragment in bytes."""
    return find_codec(plan.rules.codec).count_bytes(plan.sizes[fragment])


def count_chunks(size: int) -> int:
    """Number of chunks for so many bytes."""
    return -(-size // CHUNK_BYTES)


class Payload:
    """A payload that arrives in chunks."""

    def __init__(self, size: int, digest: str) -> None:
        self.size, self.digest = size, digest
        self._data = bytearray(size)
        self._missing = set(range(count_chunks(size)))

    @property
    def is_whole(self) -> bool:
        """Whether all chunks have arrived."""
        return not self._missing

    def measure_chunk(self, index: int) -> int:
        """The length that a chunk must have; 0 if there is no such chunk."""
        return max(0, min(CHUNK_BYTES, self.size - index * CHUNK_BYTES))

    def put_chunk(self, index: int, data: bytes) -> None:
        """Store a chunk whose digest was checked."""
        assert len(data) == self.measure_chunk(index) > 0, "the length must be checked before the chunk is read"
        self._data[index * CHUNK_BYTES : index * CHUNK_BYTES + len(data)] = data
        self._missing.discard(index)

    def list_missing(self) -> tuple[tuple[int, int], ...]:
        """Ranges of missing chunks: first, and one after the last."""
        runs: list[tuple[int, int]] = []
        for index in sorted(self._missing):
            if runs and runs[-1][1] == index:
                runs[-1] = (runs[-1][0], index + 1)
            else:
                runs.append((index, index + 1))
        return tuple(runs)

    def open(self) -> bytes | None:
        """The whole payload, or None if it does not match its digest: then all of it counts as missing again."""
        assert self.is_whole, "the payload is incomplete"
        data = bytes(self._data)  # its sender may rewrite a chunk while this one is hashed
        if hashlib.sha256(data).hexdigest() == self.digest:
            return data
        self._missing = set(range(count_chunks(self.size)))
        return None
