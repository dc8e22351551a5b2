"""One event of the ledger, its place in the hash chain, and what its author signed.

    hash = SHA-256("shoal-event-1\\n" | prev hash | seq | time | #kind | #actor | #subject
                   | SHA-256(body) | SHA-256(signature) | SHA-256(postings))

with seq and time as 8 bytes, big-endian, and # a length of 4 bytes before the text. The body is canonical JSON.

Invariants:
- every field of an event and every one of its postings is under its hash, and that under the hashes of all that follow;
- an event whose actor is not the coordinator carries the actor's signature of its statement: run, kind, subject, body.
  The coordinator's own events are under its signed heads;
- a `Statement` exists only with a signature that holds;
- a statement means the same whenever it is recorded, so its body names what makes it unique
  (a lease, a fence, a nonce).

Changing breaks: every ledger.
"""

import json
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from hashlib import sha256
from typing import Any

from shoal.canonical import MAX_INTEGER, CanonicalError, decode_canonical, encode_canonical
from shoal.keys import SIGNATURE_BYTES, Key, verify_signature
from shoal.runname import check_run
from shoal.swarm.postings import Posting, PostingError, check_postings, encode_postings

HASH_BYTES = 32
GENESIS_PREV = bytes(HASH_BYTES)
"""What stands before the first event."""
MAX_BODY_BYTES = 1 << 16

_EVENT_TAG = b"shoal-event-1\n"
_STATEMENT_TAG = b"shoal-statement-1\n"
_PUBLIC = re.compile(r"[0-9a-f]{64}")
_SUBJECT = re.compile(r"(?:[a-z0-9][a-z0-9:/._-]{0,127})?")


class EventError(ValueError):
    """An event or statement that the ledger does not take."""


class Kind(StrEnum):
    """What an event says."""

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
        Kind.VAL_VERDICT,
        Kind.SUB_OUTCOME,
        Kind.CREDIT_POST,
        Kind.STAKE_UNBOND,
        Kind.SLASH,
        Kind.BAN,
        Kind.APPEAL,
        Kind.CANARY_REVEAL,
        Kind.REDEEM_REQUEST,
        Kind.REDEEM_DONE,
        Kind.REDEEM_FAILED,
    }
)
"""Kinds of event that may move credit."""

_KINDS = frozenset(kind.value for kind in Kind)


@dataclass(frozen=True, slots=True)
class Statement:
    """What an actor signed, to be recorded as an event; made only if the signature holds."""

    run: str
    actor: str
    kind: Kind
    subject: str
    body: bytes
    """canonical JSON, an object"""
    signature: bytes

    def __post_init__(self) -> None:
        check_run(self.run)
        check_fields(self.kind, self.actor, self.subject)
        decode_body(self.body)
        if not verify_signature(self.actor, _frame_statement(self), self.signature):
            raise EventError("a statement that its actor did not sign for this run, kind, subject and body")


@dataclass(frozen=True)
class Event:
    """One event, with what makes it a link of the chain."""

    seq: int
    """0, 1, 2, ..."""
    time_ms: int
    """milliseconds since 1970 by the coordinator's clock; never less than the event before"""
    kind: str
    actor: str
    """public key of who decided or stated it"""
    subject: str
    """what it is about: a node, a lease, a submission; may be empty"""
    body: bytes
    signature: bytes
    """the actor's, of its statement; empty for the coordinator's own events"""
    prev_hash: bytes
    hash: bytes
    postings: tuple[Posting, ...] = ()

    @cached_property
    def content(self) -> dict[str, Any]:
        """The body as a value. Shared by all who read this event: do not change it."""
        content: dict[str, Any] = json.loads(self.body)
        return content

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
        """Refuse an event that its actor did not sign and the coordinator did not make."""
        if self.actor == coordinator and not self.signature:
            return
        Statement(run, self.actor, Kind(self.kind), self.subject, self.body, self.signature)

    def check_form(self) -> None:
        """Refuse fields that no event may have; nothing is said about its place in the chain."""
        decode_body(self.body)
        self.check_frame()

    def check_frame(self) -> None:
        """The same, where the body is known to be canonical."""
        check_fields(self.kind, self.actor, self.subject)
        if not 0 <= self.seq <= MAX_INTEGER or not 0 <= self.time_ms <= MAX_INTEGER:
            raise EventError("a number or time outside of 0 .. 2**63 - 1")
        if len(self.signature) not in (0, SIGNATURE_BYTES) or len(self.prev_hash) != HASH_BYTES:
            raise EventError("a signature or hash of another length")
        if self.postings and self.kind not in CREDIT_KINDS:
            raise EventError(f"{self.kind}: a kind of event that moves no credit")
        try:
            check_postings(self.postings)
        except PostingError as error:
            raise EventError(str(error)) from None


def seal_event(draft: Event) -> Event:
    """The event with its hash in place."""
    return replace(draft, hash=draft.compute_hash())


def sign_statement(key: Key, run: str, kind: Kind, subject: str, body: dict[str, Any]) -> Statement:
    """State something, as the owner of a key, for the ledger of a run."""
    data = encode_body(body)
    message = _frame_parts(run, key.public, kind, subject, data)
    return Statement(run, key.public, kind, subject, data, key.sign(message))


def encode_body(content: dict[str, Any]) -> bytes:
    """The one spelling of an event's body."""
    try:
        body = encode_canonical(content)
    except CanonicalError as error:
        raise EventError(f"a body that has no canonical form: {error}") from None
    if not isinstance(content, dict) or len(body) > MAX_BODY_BYTES:
        raise EventError(f"a body that is not an object, or longer than {MAX_BODY_BYTES} bytes")
    return body


def decode_body(body: bytes) -> dict[str, Any]:
    """The object that an event's body spells."""
    try:
        value = decode_canonical(body, max_bytes=MAX_BODY_BYTES)
    except CanonicalError as error:
        raise EventError(f"a body that is not canonical: {error}") from None
    if not isinstance(value, dict):
        raise EventError("a body that is not an object")
    return value


def check_fields(kind: str, actor: str, subject: str) -> None:
    """Refuse a kind, an actor or a subject that no event may have."""
    if kind not in _KINDS:
        raise EventError(f"{kind[:80]!r}: not a kind of event")
    if _PUBLIC.fullmatch(actor) is None:
        raise EventError(f"{actor[:80]!r}: an actor is a public key, 64 of the characters 0-9 and a-f")
    if _SUBJECT.fullmatch(subject) is None:
        raise EventError(f"{subject[:130]!r}: a subject is at most 128 of the characters a-z 0-9 : / . _ -")


def _frame_statement(statement: Statement) -> bytes:
    return _frame_parts(statement.run, statement.actor, statement.kind, statement.subject, statement.body)


def _frame_parts(run: str, actor: str, kind: str, subject: str, body: bytes) -> bytes:
    texts = b"".join(_frame_text(text) for text in (run, actor, kind, subject))
    return _STATEMENT_TAG + texts + sha256(body).digest()


def _frame_text(text: str) -> bytes:
    raw = text.encode()
    return len(raw).to_bytes(4, "big") + raw
