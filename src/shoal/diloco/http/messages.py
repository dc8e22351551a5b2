"""What peers and a reducer say to each other: canonical JSON, signed where it must outlive its connection.

Invariants:
- every field has a bound, an unknown field is an error, and all lengths of payloads follow from the plan;
- an update names its round, its maker, its weight and the SHA-256 of its payload under the maker's signature; an
  outcome names the round, whose updates are in it, its payload and the state after it under the reducer's;
- an outcome as bytes is a length of 4 bytes, the signed document, and the payload.

Changing breaks: the talk between releases, and outcomes on disk.
"""

import hashlib
import struct
from typing import Annotated, Literal, TypeVar

from pydantic import Field, StringConstraints, ValidationError

from shoal.canonical import encode_canonical
from shoal.diloco.codecs import find_codec
from shoal.diloco.plan import Plan, Rules
from shoal.diloco.round import MAX_STEPS, MAX_TOKENS, Outcome, RoundKey, Update
from shoal.keys import Key
from shoal.runname import RUN
from shoal.swarm.messages.base import Digest, Message, Number, ShortText
from shoal.swarm.tags import DocumentError, Tag, open_claimed, open_document, sign_document

CHUNK_BYTES = 1 << 20
"""of a payload that goes in one request. Changing breaks: uploads between releases."""
MAX_PEERS = 128
MAX_FRAGMENTS = 256
MAX_LANES = 4096
MAX_SEED = (1 << 53) - 1
MAX_ELEMENTS = 1 << 36
MAX_DOCUMENT_BYTES = 1 << 18
_LENGTH = struct.Struct("<I")

RunName = Annotated[str, StringConstraints(pattern=rf"^{RUN.pattern}$")]
Fragment = Annotated[int, Field(ge=0, lt=MAX_FRAGMENTS)]
Lane = tuple[Annotated[int, Field(ge=0, lt=MAX_LANES)], Number]
M = TypeVar("M", bound=Message)


class TalkError(ValueError):
    """Bytes that are no message of this kind, or not signed by whom they must be."""


class Card(Message):
    """What a reducer says of its run to whoever asks."""

    run: RunName
    sizes: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_ELEMENTS)], ...], Field(max_length=MAX_FRAGMENTS)]
    num_lanes: Annotated[int, Field(ge=0, le=MAX_LANES)]
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)]
    """of the data's order"""
    rules: Annotated[str, StringConstraints(max_length=4096)]
    """JSON of `Rules`; as text, for it holds fractions"""


class Offer(Message):
    """An update, but for its payload."""

    run: RunName
    round: Number
    fragment: Fragment
    base: Digest
    tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    steps: Annotated[int, Field(ge=0, le=MAX_STEPS)]
    codec: ShortText
    size: Number
    """bytes of the payload"""
    digest: Digest
    """SHA-256 of the payload"""
    lanes: Annotated[tuple[Lane, ...], Field(max_length=MAX_LANES)] = ()
    compute_ms: Number = 0

    @property
    def key(self) -> RoundKey:
        """The round that it is for."""
        return RoundKey(self.run, self.round, self.fragment, self.base)


class OfferAnswer(Message):
    """What the reducer still wants of an update."""

    status: Literal["open", "delivered"]
    missing: tuple[tuple[Number, Number], ...] = ()
    """chunks from the first number up to and without the second"""


class OutcomeHead(Message):
    """An outcome, but for its payload."""

    run: RunName
    round: Number
    fragment: Fragment
    base: Digest
    peers: Annotated[tuple[Digest, ...], Field(min_length=1, max_length=MAX_PEERS)]
    size: Number
    digest: Digest
    state: Digest
    step: Number
    members: Annotated[tuple[Digest, ...], Field(max_length=2 * MAX_PEERS)]
    lanes: Annotated[tuple[Number, ...], Field(max_length=MAX_LANES)]
    steps: Annotated[tuple[Number, ...], Field(max_length=MAX_PEERS)]
    number: Number = 0


class StateHead(Message):
    """An outer state, but for its arrays."""

    run: RunName
    hash: Digest
    size: Number
    digest: Digest
    """SHA-256 of its bytes"""
    rounds: Annotated[tuple[Number, ...], Field(max_length=MAX_FRAGMENTS)]


class Holding(Message):
    """The state that a peer holds, offered to a reducer that lost its own."""

    hash: Digest
    size: Number
    digest: Digest
    rounds: Annotated[tuple[Number, ...], Field(max_length=MAX_FRAGMENTS)]


class HoldingAnswer(Message):
    """Whether the reducer wants it, and which chunks."""

    status: Literal["waiting", "wanted", "done"]
    missing: tuple[tuple[Number, Number], ...] = ()


class JoinAnswer(Message):
    """What a peer hears that was taken in."""

    rounds: Annotated[tuple[Number, ...], Field(max_length=MAX_FRAGMENTS)]
    is_member: bool
    """whether it reads data from now on, or from the next round on"""


class WatchAnswer(Message):
    """Rounds that every fragment has behind it."""

    rounds: Annotated[tuple[Number, ...], Field(max_length=MAX_FRAGMENTS)]


def make_card(plan: Plan) -> Card:
    """A plan as it is shown."""
    rules = plan.rules.model_dump_json()
    return Card(run=plan.run, sizes=plan.sizes, num_lanes=plan.num_lanes, seed=plan.seed, rules=rules)


def read_card(card: Card) -> Plan:
    """The plan that a card shows."""
    try:
        rules = Rules.model_validate_json(card.rules)
    except ValidationError:
        raise TalkError("the reducer's rules are none that this release knows") from None
    return Plan(card.run, card.sizes, rules, card.num_lanes, card.seed)


def make_offer(update: Update) -> Offer:
    """What is said of an update before its payload goes."""
    key = update.key
    return Offer(
        run=key.run,
        round=key.round,
        fragment=key.fragment,
        base=key.base,
        tokens=update.tokens,
        steps=update.steps,
        codec=update.codec,
        size=len(update.payload),
        digest=hashlib.sha256(update.payload).hexdigest(),
        lanes=update.lanes,
        compute_ms=update.compute_ms,
    )


def read_update(offer: Offer, peer: str, payload: bytes) -> Update:
    """The update of an offer whose payload is here."""
    said = offer.tokens, offer.steps, payload, offer.codec, offer.lanes, offer.compute_ms
    return Update(offer.key, peer, *said)


def sign_message(key: Key, tag: Tag, message: Message) -> bytes:
    """A message as a document under a key."""
    return sign_document(key, tag, message.model_dump(mode="json"))


def open_message(public: str | None, tag: Tag, data: bytes, model: type[M]) -> tuple[str, M]:
    """Signer and message of a document; `TalkError` if it is another's than `public`, where that is given."""
    try:
        if public is None:
            signer, body = open_claimed(tag, data, max_bytes=MAX_DOCUMENT_BYTES)
        else:
            signer, body = public, open_document(public, tag, data, max_bytes=MAX_DOCUMENT_BYTES)
    except DocumentError as error:
        raise TalkError(str(error)) from None
    return signer, read_message(encode_canonical(body), model)


def read_message(data: bytes, model: type[M]) -> M:
    """The message in a body."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        names = ".".join(str(part) for part in error.errors(include_input=False)[0]["loc"])[:80]
        raise TalkError(f"not a message of this kind, at {names or 'its top'}") from None


def encode_outcome(key: Key, outcome: Outcome) -> bytes:
    """An outcome as the reducer keeps and sends it."""
    named = outcome.key
    head = OutcomeHead(
        run=named.run,
        round=named.round,
        fragment=named.fragment,
        base=named.base,
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


def split_outcome(data: bytes, reducer: str, plan: Plan) -> tuple[OutcomeHead, int]:
    """The head of an outcome that this reducer signed, and where its payload begins; of the payload nothing is said."""
    if len(data) < _LENGTH.size:
        raise TalkError("an outcome shorter than its length field")
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    if length > MAX_DOCUMENT_BYTES or len(data) < start:
        raise TalkError("an outcome shorter than its head")
    _, head = open_message(reducer, Tag.OUTCOME, data[_LENGTH.size : start], OutcomeHead)
    if head.run != plan.run or head.fragment >= len(plan.sizes) or head.size != count_payload(plan, head.fragment):
        raise TalkError("an outcome of another run or size")
    return head, start


def join_outcome(head: OutcomeHead, payload: bytes) -> Outcome:
    """The outcome of a head and its payload; `TalkError` if they do not belong together."""
    if len(payload) != head.size or hashlib.sha256(payload).hexdigest() != head.digest:
        raise TalkError("the payload is not the one that the outcome names")
    named = RoundKey(head.run, head.round, head.fragment, head.base)
    positions = head.step, head.members, head.lanes, head.steps, head.number
    return Outcome(named, head.peers, payload, head.state, *positions)


def count_payload(plan: Plan, fragment: int) -> int:
    """Bytes of an update or outcome of a fragment."""
    return find_codec(plan.rules.codec).count_bytes(plan.sizes[fragment])


def count_chunks(size: int) -> int:
    """Chunks of so many bytes."""
    return -(-size // CHUNK_BYTES)
