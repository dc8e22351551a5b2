"""One event of the ledger: its place in the hash chain, what its author signed, and the credit that it moves.

    hash = SHA-256("shoal-event-1\\n" | prev hash | seq | time | #kind | #actor | #subject
                   | SHA-256(body) | SHA-256(signature) | SHA-256(postings))

with seq and time as 8 bytes, big-endian, and # a length of 4 bytes before the text. The body is canonical JSON.

Invariants:
- the hash covers every field of an event and each of its postings, and the hashes of all later events cover it;
- an event whose actor is not the coordinator carries the actor's signature of its statement: run, kind, subject, body.
  Signed heads cover the coordinator's own events;
- a `Statement` exists only with a valid signature;
- a statement means the same whenever it is recorded, so its body contains what makes it unique (a lease, a fence, a
  nonce);
- credit uses double entry, in integer micro-credits: the postings of an event sum to zero, name each account once, and
  are sorted by account, so they have one encoding;
- an account has one spelling: a fixed word, or a word and the owner's public key;
- `mint` only pays and `burn` only receives: credit is created by one and destroyed by the other;
- no account except `mint` is ever below zero (`db.BALANCES` checks this, because it depends on the history).

Changing breaks: every ledger.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from hashlib import sha256
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BeforeValidator, ConfigDict, PlainSerializer

from shoal.identity.keys import SIGNATURE_BYTES, Key, verify_signature
from shoal.util.canonical import MAX_INTEGER, CanonicalError, decode_canonical, encode_canonical
from shoal.util.units import check_run

MICRO = 1_000_000
"""Micro-credits in one credit."""
MINT, BURN, TREASURY, REDEEMED = "mint", "burn", "treasury", "redeemed"
MAX_POSTINGS = 1024

_ACCOUNT = re.compile(r"mint|burn|treasury|redeemed|(?:pending|avail|stake|unbond|redeeming):[0-9a-f]{64}")


def show_credit(amount: int) -> str:
    """An amount of micro-credits in credits: `0.5 credits`."""
    return f"{amount / MICRO:.6f}".rstrip("0").rstrip(".") + " credits"


class PostingError(ValueError):
    """Postings that do not balance, or that would make an account negative."""


class Posting(NamedTuple):
    """The amount that one account gains by an event, or loses if it is negative."""

    account: str
    amount: int


def name_account(kind: str, owner: str) -> str:
    """The account of an owner; `kind` is pending, avail, stake, unbond or redeeming."""
    return check_account(f"{kind}:{owner}")


def check_account(text: str) -> str:
    """Return the name of an account if it is valid; otherwise raise PostingError."""
    if _ACCOUNT.fullmatch(text) is None:
        raise PostingError(f"{text[:120]!r}: invalid account name")
    return text


def move_credit(source: str, target: str, amount: int) -> tuple[Posting, ...]:
    """The postings of a payment from one account to another."""
    if amount <= 0:
        raise PostingError(f"invalid payment of {amount}: must be positive")
    return sort_postings([Posting(source, -amount), Posting(target, amount)])


def sort_postings(postings: Iterable[Posting]) -> tuple[Posting, ...]:
    """Check postings and sort them into their one order."""
    ordered = tuple(sorted(postings))
    check_postings(ordered)
    return ordered


def check_postings(postings: Sequence[Posting]) -> None:
    """Reject postings that no event may have."""
    if len(postings) > MAX_POSTINGS:
        raise PostingError(f"{len(postings)} postings in one event (at most {MAX_POSTINGS} allowed)")
    last = ""
    for account, amount in postings:
        check_account(account)
        if account <= last:
            raise PostingError(f"{account}: duplicate account, or postings not sorted by account")
        _check_amount(account, amount)
        last = account
    total = sum(posting.amount for posting in postings)
    if total != 0:
        raise PostingError(f"postings sum to {total}, must sum to zero")


def encode_postings(postings: Sequence[Posting]) -> bytes:
    """The encoding of postings that an event's hash covers."""
    if not postings:
        return b"[]"  # most events have none
    return encode_canonical([[account, amount] for account, amount in postings])


def _check_amount(account: str, amount: int) -> None:
    if amount == 0 or abs(amount) > MAX_INTEGER:
        raise PostingError(f"{account}: invalid amount {amount}: must be non-zero and below 2**63")
    if account == MINT and amount > 0:
        raise PostingError("mint cannot receive credit; destroyed credit goes to burn")
    if account == BURN and amount < 0:
        raise PostingError("burn cannot pay credit")


HASH_BYTES = 32
GENESIS_PREV = bytes(HASH_BYTES)
"""Previous hash of the first event."""
MAX_BODY_BYTES = 1 << 16

_EVENT_TAG = b"shoal-event-1\n"
_STATEMENT_TAG = b"shoal-statement-1\n"
_HEX = re.compile(r"(?:[0-9a-f]{2})*")
_PUBLIC = re.compile(r"[0-9a-f]{64}")
_SUBJECT = re.compile(r"(?:[a-z0-9][a-z0-9:/._-]{0,127})?")


class EventError(ValueError):
    """An event or statement that the ledger rejects."""


def _read_hex(text: Any) -> bytes:
    if not isinstance(text, str) or _HEX.fullmatch(text) is None:
        raise ValueError("not lowercase hex")
    return bytes.fromhex(text)


HexBytes = Annotated[bytes, BeforeValidator(_read_hex), PlainSerializer(bytes.hex)]
"""bytes that are written in JSON as lowercase hex, so they have one encoding"""
STRICT = ConfigDict(extra="forbid", strict=True)


class EventKind(StrEnum):
    """The kinds of events."""

    GENESIS = "genesis"
    PARAMS = "params"
    ADMIN = "admin"
    COORDINATOR_UP = "coordinator.up"
    COORDINATOR_DOWN = "coordinator.down"
    NODE_JOIN = "node.join"
    NODE_DELEGATE = "node.delegate"
    NODE_REVOKE = "node.revoke"
    NODE_STANDING = "node.standing"
    NODE_WATCH = "node.watch"
    NODE_LEAVE = "node.leave"
    STEP_OPEN = "step.open"
    LEASE_GRANT = "lease.grant"
    LEASE_EXTEND = "lease.extend"
    LEASE_END = "lease.end"
    SUB_COMMIT = "sub.commit"
    SUB_RECEIPT = "sub.receipt"
    SUB_OUTCOME = "sub.outcome"
    VAL_CLAIM = "val.claim"
    VAL_VERDICT = "val.verdict"
    VAL_LAPSE = "val.lapse"
    VAL_DOUBT = "val.doubt"
    VAL_GRADE = "val.grade"
    BATCH_CUT = "batch.cut"
    VERSION_PUBLISH = "version.publish"
    BLOB_DROP = "blob.drop"
    CREDIT_POST = "credit.post"
    STAKE_REQUEST = "stake.request"
    STAKE_UNBOND = "stake.unbond"
    SLASH = "slash"
    BAN = "ban"
    UNBAN = "unban"
    APPEAL = "appeal"
    CANARY_SEAL = "canary.seal"
    CANARY_REVEAL = "canary.reveal"
    CANARY_GRADE = "canary.grade"
    REDEEM_REQUEST = "redeem.request"
    REDEEM_DONE = "redeem.done"
    REDEEM_FAILED = "redeem.failed"


CREDIT_KINDS = frozenset(
    {
        EventKind.VAL_VERDICT,
        EventKind.SUB_OUTCOME,
        EventKind.CREDIT_POST,
        EventKind.STAKE_UNBOND,
        EventKind.SLASH,
        EventKind.BAN,
        EventKind.APPEAL,
        EventKind.CANARY_REVEAL,
        EventKind.REDEEM_REQUEST,
        EventKind.REDEEM_DONE,
        EventKind.REDEEM_FAILED,
    }
)
"""Kinds of event that may move credit."""

Parsed = TypeVar("Parsed")
_KINDS = frozenset(kind.value for kind in EventKind)


@dataclass(frozen=True, slots=True)
class Statement:
    """What an actor signed, to be recorded as an event; the constructor checks the signature."""

    run: str
    actor: str
    kind: EventKind
    subject: str
    body: bytes
    """canonical JSON of an object"""
    signature: bytes

    def __post_init__(self) -> None:
        check_run(self.run)
        check_fields(self.kind, self.actor, self.subject)
        decode_body(self.body)
        message = _frame_parts(self.run, self.actor, self.kind, self.subject, self.body)
        if not verify_signature(self.actor, message, self.signature):
            raise EventError("invalid signature: the actor did not sign this run, kind, subject and body")


@dataclass(frozen=True)
class Event:
    """One event, with its place in the hash chain."""

    seq: int
    """0, 1, 2, ..."""
    time_ms: int
    """milliseconds since 1970 by the coordinator's clock; never less than that of the previous event"""
    kind: str
    actor: str
    """public key of the node or person that decided or stated it"""
    subject: str
    """what it is about: a node, a lease, a submission; may be empty"""
    body: bytes
    signature: HexBytes
    """the actor's signature of its statement; empty for the coordinator's own events"""
    prev_hash: HexBytes
    hash: HexBytes
    postings: tuple[Posting, ...] = ()
    __pydantic_config__ = STRICT

    @cached_property
    def content(self) -> dict[str, Any]:
        """The parsed body. All readers of this event share the object: do not modify it."""
        content: dict[str, Any] = json.loads(self.body)
        return content

    def keep_parsed(self, parse: Callable[["Event"], Parsed]) -> Parsed:
        """The body as parsed by `parse`, cached: all handlers of an event need the same result."""
        if "parsed" not in self.__dict__:
            self.__dict__["parsed"] = parse(self)
        parsed: Parsed = self.__dict__["parsed"]
        return parsed

    def compute_hash(self) -> bytes:
        """The hash that this event must have."""
        parts = [
            _EVENT_TAG,
            self.prev_hash,
            self.seq.to_bytes(8, "big"),
            self.time_ms.to_bytes(8, "big"),
            _frame_text(self.kind),
            _frame_text(self.actor),
            _frame_text(self.subject),
            sha256(self.body).digest(),
            sha256(self.signature).digest(),
            sha256(encode_postings(self.postings)).digest(),
        ]
        return sha256(b"".join(parts)).digest()

    def check_signed(self, run: str, coordinator: str) -> None:
        """Reject an event that neither its actor signed nor the coordinator wrote."""
        if self.actor == coordinator and not self.signature:
            return
        Statement(run, self.actor, EventKind(self.kind), self.subject, self.body, self.signature)

    def check_form(self) -> None:
        """Reject invalid fields; does not check the event's place in the chain."""
        decode_body(self.body)
        self.check_frame()

    def check_frame(self) -> None:
        """Like `check_form`, for a body that is known to be canonical."""
        check_fields(self.kind, self.actor, self.subject)
        if not 0 <= self.seq <= MAX_INTEGER or not 0 <= self.time_ms <= MAX_INTEGER:
            raise EventError("event number or time outside 0 .. 2**63 - 1")
        if len(self.signature) not in (0, SIGNATURE_BYTES) or len(self.prev_hash) != HASH_BYTES:
            raise EventError("signature or hash of invalid length")
        if self.postings and self.kind not in CREDIT_KINDS:
            raise EventError(f"{self.kind}: events of this kind cannot have postings")
        try:
            check_postings(self.postings)
        except PostingError as error:
            raise EventError(str(error)) from None


def seal_event(event: Event) -> Event:
    """The event with its hash computed."""
    return replace(event, hash=event.compute_hash())


def sign_statement(key: Key, run: str, kind: EventKind, subject: str, body: dict[str, Any]) -> Statement:
    """Sign a statement for the ledger of a run."""
    data = encode_body(body)
    message = _frame_parts(run, key.public, kind, subject, data)
    return Statement(run, key.public, kind, subject, data, key.sign(message))


def encode_body(content: dict[str, Any]) -> bytes:
    """The canonical encoding of an event's body."""
    try:
        body = encode_canonical(content)
    except CanonicalError as error:
        raise EventError(f"event body has no canonical JSON form: {error}") from None
    if not isinstance(content, dict) or len(body) > MAX_BODY_BYTES:
        raise EventError(f"event body is not an object, or longer than {MAX_BODY_BYTES} bytes")
    return body


def decode_body(body: bytes) -> dict[str, Any]:
    """Decode an event's body; EventError unless it is a canonical JSON object."""
    try:
        value = decode_canonical(body, max_bytes=MAX_BODY_BYTES)
    except CanonicalError as error:
        raise EventError(f"event body is not canonical JSON: {error}") from None
    if not isinstance(value, dict):
        raise EventError("event body is not an object")
    return value


def check_fields(kind: str, actor: str, subject: str) -> None:
    """Reject an invalid kind, actor or subject."""
    if kind not in _KINDS:
        raise EventError(f"{kind[:80]!r}: unknown kind of event")
    if _PUBLIC.fullmatch(actor) is None:
        raise EventError(f"{actor[:80]!r}: invalid actor: must be a public key (64 lowercase hex digits)")
    if _SUBJECT.fullmatch(subject) is None:
        raise EventError(f"{subject[:130]!r}: invalid subject: at most 128 of the characters a-z 0-9 : / . _ -")


def _frame_parts(run: str, actor: str, kind: str, subject: str, body: bytes) -> bytes:
    texts = b"".join(_frame_text(text) for text in (run, actor, kind, subject))
    return _STATEMENT_TAG + texts + sha256(body).digest()


def _frame_text(text: str) -> bytes:
    raw = text.encode()
    return len(raw).to_bytes(4, "big") + raw
