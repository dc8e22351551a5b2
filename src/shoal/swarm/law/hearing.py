"""A decision that is taken again: a turn whose every event must be the one that the ledger has next.

What the coordinator alone knew is read from the ledger and checked: the beacons and their secret against the chain of
the genesis. Signatures were checked before, with the chain of hashes; here they are compared with who had to sign.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.swarm.beacon import BeaconChain, check_beacon, draw_second
from shoal.swarm.event import Event, Kind, Statement, decode_body, encode_body
from shoal.swarm.law.docket import Docket, LawError, name_event
from shoal.swarm.ledger import Draft
from shoal.swarm.messages import Message
from shoal.swarm.messages.signing import Signable, frame_message
from shoal.swarm.params import MILLION
from shoal.swarm.postings import Posting, sort_postings
from shoal.swarm.state.judges import list_draws
from shoal.swarm.state.run import RunReader, read_run
from shoal.swarm.state.steps import find_step
from shoal.swarm.tags import Tag
from shoal.swarm.turn import Turn


class Wanted(NamedTuple):
    """An event as the rules make it."""

    kind: str
    actor: str
    subject: str
    body: bytes
    signature: bytes
    postings: tuple[Posting, ...]


class KnownStatement(Statement):
    """A statement whose signature was checked when the ledger was scanned."""

    def __post_init__(self) -> None:
        """Nothing is left to check."""


class Echo(Draft):
    """A draft that takes what the ledger has next, and nothing else."""

    def __init__(self, docket: Docket, coordinator: str, reader: RunReader) -> None:
        assert docket.next is not None, "a decision begins with an event"
        self._docket, self._coordinator, self._reader = docket, coordinator, reader
        self.connection, self.time_ms = docket.connection, docket.next.time_ms

    @property
    def size(self) -> int:
        return self._docket.size

    def append(self, kind: Kind, *, subject: str = "", body: dict[str, Any], postings: Iterable[Posting] = ()) -> Event:
        body = self._take_deadline(body) if kind == Kind.LEASE_GRANT else body
        return self._compare(Wanted(kind, self._coordinator, subject, encode_body(body), b"", sort_postings(postings)))

    def record(self, statement: Statement, *, postings: Iterable[Posting] = ()) -> Event:
        stated = statement.kind, statement.actor, statement.subject, statement.body, statement.signature
        return self._compare(Wanted(*stated, sort_postings(postings)))

    def _take_deadline(self, body: dict[str, Any]) -> dict[str, Any]:
        """How long leases took is measured in memory, a few decisions behind: any time that a lease may get is one."""
        event, params = self._docket.next, self._reader.read(self.connection).params
        told = None if event is None else event.content.get("deadline_ms")
        if not isinstance(told, int):
            return body
        least, most = self.time_ms + 1000 * params.lease_min_s, self.time_ms + 1000 * params.lease_max_s
        return {**body, "deadline_ms": told if least <= told <= most else body["deadline_ms"]}

    def _compare(self, wanted: Wanted) -> Event:
        event = self._docket.next
        if event is None:
            name = name_event(wanted.kind, wanted.subject)
            raise LawError(f"after event {self._docket.size - 1}: the ledger ends where {name} must follow")
        told = (event.kind, event.actor, event.subject, event.body, event.signature, event.postings)
        if told != wanted or event.time_ms != self.time_ms:
            raise LawError(f"event {event.seq}: {name_event(event.kind, event.subject)}{_say_why(event, wanted)}")
        return self._docket.take()


class ReadChain(BeaconChain):
    """The beacons as the ledger reveals them, each checked against the one before."""

    def __init__(self, docket: Docket) -> None:
        self._docket = docket
        self._known: bytes | None = None
        """the secret, once the ledger has it"""

    def reveal_step(self, step: int) -> str:
        """The beacon that the ledger has for a step."""
        return self._check_next("beacon", step)

    def reveal_secret(self) -> str:
        """The secret that ends the chain; with it every draw that was made in secret can be made again."""
        secret = self._check_next("secret", read_run(self._docket.connection).params.steps + 1)
        if self._docket.next is not None:
            self._known = bytes.fromhex(secret)
            self._check_draws(self._known)
        return secret

    def draw_second(self, submission: str, blob: str) -> int:
        """As the ledger says, until its secret is out: one is spared only if the outcome says that it was drawn so."""
        if self._known is not None:
            return draw_second(self._known, submission, blob)
        event = self._docket.next
        is_spared = event is not None and event.kind == Kind.SUB_OUTCOME and event.content.get("spared")
        return MILLION if is_spared else 0

    def _check_draws(self, secret: bytes) -> None:
        for row in list_draws(self._docket.connection):
            is_asked = draw_second(secret, row.submission, row.blob) < row.share
            if is_asked is not bool(row.because):
                told, drawn = ("asked for", "spared") if row.because else ("spared", "asked for")
                raise LawError(
                    f"event {self._docket.size}: by the secret a second opinion on {row.submission} is {drawn}, and it "
                    f"was {told}"
                )

    def _check_next(self, field: str, step: int) -> str:
        event, connection = self._docket.next, self._docket.connection
        told = "" if event is None else str(event.content.get(field, ""))
        before = find_step(connection, step - 1)
        earlier = read_run(connection).beacon if before is None else before.beacon
        if event is not None and not check_beacon(told, earlier):
            name = name_event(event.kind, event.subject)
            raise LawError(f"event {event.seq}: {name}: its {field} is not the next of the genesis's chain")
        return told


@dataclass(slots=True)
class Hearing(Turn):
    """A turn that nobody waits for: what would be signed for somebody to keep is not."""

    last_ms: int = 0
    """time of the event before"""

    def open_message(self, actor: str, message: Signable, signature: str) -> Statement:
        """The statement that somebody must have signed; whether that is the ledger's next is compared later."""
        kind, subject = frame_message(message)
        body = encode_body(message.model_dump(mode="json"))
        return KnownStatement(self.run, actor, kind, subject, body, bytes.fromhex(signature))

    def sign(self, tag: Tag, message: Message) -> str:
        """No document."""
        return ""


def _say_why(event: Event, wanted: Wanted) -> str:
    """What an event has otherwise than it must."""
    if (event.kind, event.subject) != (wanted.kind, wanted.subject):
        return f", where by the rules {name_event(wanted.kind, wanted.subject)} must follow"
    if (event.actor, event.signature) != (wanted.actor, wanted.signature):
        return f": by {event.actor[:16]}, and not signed by {wanted.actor[:16]} as it must be"
    if event.body != wanted.body:
        return f": {'; '.join(_list_changes(decode_body(event.body), decode_body(wanted.body)))}"
    if event.postings != wanted.postings:
        return f": moves {_show_postings(event.postings)}, by the rules {_show_postings(wanted.postings)}"
    return ": belongs to the decision before it and has another time"


def _list_changes(told: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    for name in sorted(told.keys() | wanted.keys()):
        if name not in wanted:
            yield f"{name!a:.80} does not belong there"
        elif name not in told:
            yield f"{name} is missing"
        elif encode_body({"": told[name]}) != encode_body({"": wanted[name]}):
            yield f"{name} is {told[name]!a:.80}, by the rules {wanted[name]!a:.80}"


def _show_postings(postings: tuple[Posting, ...]) -> str:
    shown = [f"{posting.amount:+d} {posting.account[:24]}" for posting in postings[:8]]
    return ", ".join(shown) or "no credit"
