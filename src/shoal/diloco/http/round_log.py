"""The reducer's ledger: one event per round, in a hash chain with a signed head, stored as lines of a file.

The events, their hashes, the Merkle tree over them and the heads are those of the swarm's ledger (`ledger.event`,
`ledger.merkle`, `ledger.head`). Only the kinds are specific to DiLoCo, and a file of lines is enough for one event per
round.

Invariants:
- an event is on disk before its effect is visible in a response; an incomplete last line is cut off at the next start;
- opening checks every hash and link, and that the last signed head covers a prefix of the chain;
- the events of a round's updates come before the event of the round, each with the document its peer signed, so that
  nobody has to trust the reducer about them.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.ledger.event import GENESIS_PREV, MAX_BODY_BYTES, Event, EventError, encode_body, seal_event
from shoal.ledger.head import Head, HeadError, SignedHead, sign_head
from shoal.ledger.merkle import Frontier, hash_leaf
from shoal.util.canonical import CanonicalError, decode_canonical, encode_canonical
from shoal.util.clock import read_clock
from shoal.util.files import append_lines, repair_jsonl, write_atomic

GENESIS, UP, UPDATE, ROUND, REBUILT = "genesis", "reducer.up", "round.update", "round.close", "reducer.rebuilt"
KINDS = frozenset({GENESIS, UP, UPDATE, ROUND, REBUILT})
_MAX_LINE_BYTES = 4 * MAX_BODY_BYTES


class RoundLogError(ValueError):
    """The file is not a valid ledger of this reducer."""


class RoundLog:
    """A ledger that one reducer writes."""

    def __init__(self, folder: Path, run: str, key: Key, *, clock_ms: Callable[[], int] = read_clock) -> None:
        self._path, self._head_path = folder / "rounds.jsonl", folder / "head.json"
        self._run, self._key, self._clock_ms = run, key, clock_ms
        folder.mkdir(parents=True, exist_ok=True)
        repair_jsonl(self._path)
        self._frontier = Frontier()
        self._last: Event | None = None
        try:
            for event in read_log(self._path, run, key.public, self._head_path):
                self._note_event(event)
        except RoundLogError as error:
            raise ConfigError(f"{self._path}: {error}") from None
        if self._last is None:
            self.append(GENESIS, run, {"run": run, "coordinator": key.public})

    def append(self, kind: str, subject: str, body: dict[str, Any]) -> None:
        """Record an event and sign the ledger with it; it is on disk when this returns. Blocking."""
        self.append_all([(kind, subject, body)])

    def append_all(self, entries: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
        """Record several events in order, with one wait for the disk. Blocking."""
        made: list[Event] = []
        for kind, subject, body in entries:
            assert kind in KINDS
            made.append(self._make_event(made[-1] if made else self._last, kind, subject, body))
        append_lines(self._path, [_dump_event(event).decode() for event in made])
        for event in made:
            self._note_event(event)
        write_atomic(self._head_path, self.sign_head().to_bytes(), sync=False)  # the events themselves are synced

    def list_subjects(self, kind: str) -> set[str]:
        """The subjects of all events of a kind; reads the file."""
        events = read_log(self._path, self._run, self._key.public)
        return {event.subject for event in events if event.kind == kind}

    def _note_event(self, event: Event) -> None:
        self._frontier, _ = self._frontier.grow_leaf(hash_leaf(event.hash))
        self._last = event

    def _make_event(self, last: Event | None, kind: str, subject: str, body: dict[str, Any]) -> Event:
        time_ms = max(self._clock_ms(), 0 if last is None else last.time_ms)
        prev, seq = (GENESIS_PREV, 0) if last is None else (last.hash, last.seq + 1)
        return seal_event(Event(seq, time_ms, kind, self._key.public, subject, encode_body(body), b"", prev, b""))

    def sign_head(self) -> SignedHead:
        """Sign the current head of the ledger."""
        assert self._last is not None, "a log must begin with its genesis event"
        size, root = self._frontier.size, self._frontier.compute_root().hex()
        return sign_head(self._key, Head(self._run, size, root, self._last.hash.hex(), self._last.time_ms))


def read_log(path: Path, run: str, reducer: str, head_path: Path | None = None) -> Iterator[Event]:
    """Yield the events in order, each checked before it is returned; the signed head is checked after the last.

    `RoundLogError` names the first event that this reducer did not sign as it is. Only one line is in memory at a time,
    however long the run was.
    """
    if not path.exists():
        return
    head = _open_head(head_path, run, reducer) if head_path is not None and head_path.exists() else None
    frontier, root = Frontier(), ""
    prev: Event | None = None
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b"")):
            event = _parse_event(line.removesuffix(b"\n"), number)
            _check_link(event, prev, run, reducer)
            frontier, _ = frontier.grow_leaf(hash_leaf(event.hash))
            if head is not None and head.size == frontier.size:
                root = frontier.compute_root().hex()
            yield event
            prev = event
    if head is not None and root != head.root:
        raise RoundLogError(f"the first {head.size} events do not match the signed head")


def _check_link(event: Event, prev: Event | None, run: str, reducer: str) -> None:
    if event.prev_hash != (GENESIS_PREV if prev is None else prev.hash) or event.compute_hash() != event.hash:
        raise RoundLogError(f"event {event.seq}: wrong hash, or does not follow the previous event")
    if event.actor != reducer or (prev is not None and event.time_ms < prev.time_ms):
        raise RoundLogError(f"event {event.seq}: from a different reducer, or older than the previous event")
    if prev is None and (event.kind != GENESIS or event.content != {"run": run, "coordinator": reducer}):
        raise RoundLogError("ledger of a different run or reducer")


def _open_head(path: Path, run: str, reducer: str) -> Head:
    try:
        signed = SignedHead.from_bytes(path.read_bytes())
        signed.check_signed(run, reducer)
    except HeadError as error:
        raise RoundLogError(f"invalid head: {error}") from None
    return signed.head


def _dump_event(event: Event) -> bytes:
    value = {
        "actor": event.actor,
        "body": json.loads(event.body),
        "hash": event.hash.hex(),
        "kind": event.kind,
        "prev_hash": event.prev_hash.hex(),
        "seq": event.seq,
        "subject": event.subject,
        "time_ms": event.time_ms,
    }
    return encode_canonical(value)


def _parse_event(line: bytes, number: int) -> Event:
    try:
        value = decode_canonical(line, max_bytes=_MAX_LINE_BYTES)
        match value:
            case {
                "actor": str(actor),
                "body": dict(body),
                "hash": str(digest),
                "kind": str(kind),
                "prev_hash": str(prev),
                "seq": int(seq),
                "subject": str(subject),
                "time_ms": int(time_ms),
            } if len(value) == 8 and kind in KINDS and seq == number and time_ms >= 0:
                event = Event(seq, time_ms, kind, actor, subject, encode_body(body), b"", bytes.fromhex(prev), b"")
                return replace(event, hash=bytes.fromhex(digest))
    except (CanonicalError, EventError, ValueError) as error:
        raise RoundLogError(f"event {number}: {error}") from None
    raise RoundLogError(f"event {number}: malformed")
