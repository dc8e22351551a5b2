"""The proof that an event is in a ledger, as one file that can be checked without the ledger.

    {"event":{...},"format":1,"head":{"head":{...},"signature":"..."},"path":["<64 hex>",...]}

Who has it, and the coordinator's public key, knows that the coordinator signed a ledger with exactly this event in it.
"""

import re
from dataclasses import dataclass
from typing import Any

from shoal.canonical import CanonicalError, decode_canonical, encode_canonical
from shoal.swarm.event import MAX_BODY_BYTES, Event, EventError
from shoal.swarm.head import HeadError, SignedHead, decode_proof
from shoal.swarm.merkle import hash_leaf, verify_inclusion
from shoal.swarm.postings import MAX_POSTINGS, Posting

FORMAT = 1
MAX_BUNDLE_BYTES = 4 * MAX_BODY_BYTES + 128 * MAX_POSTINGS

_BYTES = re.compile(r"(?:[0-9a-f]{2}){0,64}")


@dataclass(frozen=True, slots=True)
class Bundle:
    """An event, a signed head, and the path from one to the other."""

    event: Event
    head: SignedHead
    path: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        value = {
            "event": _dump_event(self.event),
            "format": FORMAT,
            "head": self.head.to_value(),
            "path": [item.hex() for item in self.path],
        }
        return encode_canonical(value)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Bundle":
        """The bundle that these bytes spell; whether it proves anything is for `check_proof`."""
        try:
            value = decode_canonical(data, max_bytes=MAX_BUNDLE_BYTES)
        except CanonicalError as error:
            raise EventError(f"not a proof: {error}") from None
        match value:
            case {"event": dict(event), "format": 1, "head": head, "path": path} if len(value) == 4:
                try:
                    return cls(_parse_event(event), SignedHead.from_value(head), decode_proof(path))
                except HeadError as error:
                    raise EventError(f"not a proof: {error}") from None
        raise EventError("not the form of a proof")

    def check_proof(self, run: str, coordinator: str) -> None:
        """Refuse a bundle that does not prove its event to be in the ledger that this coordinator signed."""
        self.event.check_form()
        if self.event.compute_hash() != self.event.hash:
            raise EventError("an event that does not have the hash of its content")
        try:
            self.head.check_signed(run, coordinator)
        except HeadError as error:
            raise EventError(str(error)) from None
        head, leaf = self.head.head, hash_leaf(self.event.hash)
        if not verify_inclusion(leaf, self.event.seq, head.size, self.path, bytes.fromhex(head.root)):
            raise EventError(f"a path that does not lead from event {self.event.seq} to the signed head")
        self.event.check_signed(run, coordinator)


def _dump_event(event: Event) -> dict[str, Any]:
    return {
        "actor": event.actor,
        "body": event.body.decode(),
        "hash": event.hash.hex(),
        "kind": event.kind,
        "postings": [[posting.account, posting.amount] for posting in event.postings],
        "prev_hash": event.prev_hash.hex(),
        "seq": event.seq,
        "signature": event.signature.hex(),
        "subject": event.subject,
        "time_ms": event.time_ms,
    }


def _parse_event(value: dict[str, Any]) -> Event:
    match value:
        case {
            "actor": str(actor),
            "body": str(body),
            "hash": str(digest),
            "kind": str(kind),
            "postings": list(postings),
            "prev_hash": str(prev_hash),
            "seq": int(seq),
            "signature": str(signature),
            "subject": str(subject),
            "time_ms": int(time_ms),
        } if len(value) == 10:
            lines = tuple(_parse_posting(item) for item in postings)
            link = _parse_hex(signature), _parse_hex(prev_hash), _parse_hex(digest), lines
            return Event(seq, time_ms, kind, actor, subject, body.encode(), *link)
    raise EventError("not the fields of an event")


def _parse_posting(value: Any) -> Posting:
    match value:
        case [str(account), int(amount)]:
            return Posting(account, amount)
    raise EventError("not the form of a posting")


def _parse_hex(text: str) -> bytes:
    if _BYTES.fullmatch(text) is None:
        raise EventError("a hash or signature that is not hex")
    return bytes.fromhex(text)
