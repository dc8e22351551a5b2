"""Reads a ledger: events with their postings, heads, and the nodes of the Merkle tree.

Rows are read as the driver returns them, and their types and order are checked, because anyone who edits a SQLite file
can put any value anywhere, and a row as often as they like. `RowError` names the row.

Only subtrees of 256 leaves and more are stored; smaller ones are hashed from the events' hashes on demand. That is one
row per 128 events, and at most two reads of 256 hashes for a proof.
"""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, text

from shoal.ledger.db import Sql, fetch_rows
from shoal.ledger.event import Event, Posting
from shoal.ledger.head import Head, SignedHead
from shoal.ledger.merkle import Subtree, hash_children, hash_leaf

TILE_LEVEL = 8
MAX_SEQ = (1 << 63) - 1
_TILE = 1 << TILE_LEVEL
_BLOCK = 1024

_EVENT_COLUMNS = "seq, time_ms, kind, actor, subject, body, signature, prev_hash, hash"
_EVENT_TYPES = (int, int, str, str, str, bytes, bytes, bytes, bytes)
_RANGE = "WHERE seq >= :start AND seq < :stop ORDER BY seq"
_EVENTS = Sql(f"SELECT {_EVENT_COLUMNS} FROM event {_RANGE} LIMIT {_BLOCK}")
_ABOUT = Sql("SELECT seq FROM event WHERE subject = :subject AND kind = :kind ORDER BY seq")
_POSTINGS = Sql(f"SELECT seq, line, account, amount FROM posting {_RANGE}, line")
_HASHES = text(f"SELECT seq, hash FROM event {_RANGE}")
_NODE = text("SELECT hash FROM merkle_node WHERE level = :level AND position = :position")
_NODES = text("SELECT level, position, hash FROM merkle_node ORDER BY level, position")
_HEADS = "SELECT size, time_ms, root, last_hash, signature FROM head ORDER BY size"


class RowError(ValueError):
    """A row that shoal cannot have written, or a missing row."""


def count_events(connection: Connection) -> int:
    """The number of events, assuming that none is missing."""
    last = connection.execute(text("SELECT max(seq) FROM event")).scalar()
    return 0 if last is None else int(last) + 1


def read_event(connection: Connection, seq: int) -> Event | None:
    """One event, or None if no event has this number."""
    return next(read_events(connection, seq, seq + 1), None)


def find_event(connection: Connection, digest: bytes) -> Event | None:
    """The event with this hash."""
    seq = connection.execute(text("SELECT seq FROM event WHERE hash = :hash"), {"hash": digest}).scalar()
    return None if seq is None else read_event(connection, seq)


def list_events(connection: Connection, subject: str, kind: str) -> list[Event]:
    """The events of one kind about a subject, in order."""
    numbers = fetch_rows(connection, _ABOUT, int, subject=subject, kind=kind)
    return [event for seq in numbers if (event := read_event(connection, seq)) is not None]


def read_events(connection: Connection, start: int, stop: int) -> Iterator[Event]:
    """The events from `start` up to but excluding `stop`, in order, with bounded memory."""
    while rows := _EVENTS.run(connection, {"start": start, "stop": stop}).fetchall():
        events = [_check_types("event", row, _EVENT_TYPES) for row in rows]
        last = events[-1][0]
        postings = _read_postings(connection, {"start": start, "stop": last + 1})
        for values in events:
            lines = tuple(postings.pop(values[0], ()))
            yield Event(*(*values, lines))
        if postings:
            raise RowError(f"posting: rows for event {min(postings)}, which does not exist")
        start = last + 1


def read_heads(connection: Connection, run: str) -> Iterator[SignedHead]:
    """All signed heads, smallest ledger first."""
    last = 0
    for row in connection.execute(text(_HEADS)):
        signed = _build_head(row, run)
        if signed.head.size <= last:
            raise RowError(f"head: size {signed.head.size} after size {last}")
        last = signed.head.size
        yield signed


def read_newest_head(connection: Connection, run: str) -> SignedHead | None:
    """The signed head of the largest ledger."""
    row = connection.execute(text(f"{_HEADS} DESC LIMIT 1")).first()
    return None if row is None else _build_head(row, run)


def read_nodes(connection: Connection) -> Iterator[Subtree]:
    """All stored nodes of the tree."""
    last = (-1, -1)
    for row in connection.execute(_NODES):
        node = Subtree(*_check_types("merkle_node", row, (int, int, bytes)))
        if (node.level, node.position) <= last:
            raise RowError(f"merkle_node: level {node.level}, position {node.position} twice or out of order")
        last = node.level, node.position
        yield node


class NodeReader:
    """The complete subtrees of a ledger's tree; called as a `NodeSource`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._tiles: dict[int, list[bytes]] = {}

    def __call__(self, level: int, position: int) -> bytes:
        if level >= TILE_LEVEL:
            return self._read_node(level, position)
        first = position << level
        hashes = self._read_tile(first >> TILE_LEVEL)[first % _TILE : first % _TILE + (1 << level)]
        if len(hashes) != 1 << level:
            raise RowError(f"event: number {first + len(hashes)} is missing")
        while len(hashes) > 1:
            hashes = [hash_children(left, right) for left, right in zip(hashes[::2], hashes[1::2], strict=True)]
        return hashes[0]

    def _read_node(self, level: int, position: int) -> bytes:
        row = self._connection.execute(_NODE, {"level": level, "position": position}).first()
        if row is None:
            raise RowError(f"merkle_node: no row at level {level}, position {position}")
        digest: bytes = _check_types("merkle_node", row, (bytes,))[0]
        return digest

    def _read_tile(self, number: int) -> list[bytes]:
        """Leaf hashes of up to 256 events, up to the first gap."""
        if number not in self._tiles:
            start = number << TILE_LEVEL
            rows = self._connection.execute(_HASHES, {"start": start, "stop": start + _TILE}).all()
            pairs = [_check_types("event", row, (int, bytes)) for row in rows]
            self._tiles[number] = [hash_leaf(digest) for at, (seq, digest) in enumerate(pairs) if seq == start + at]
        return self._tiles[number]


def _read_postings(connection: Connection, bounds: dict[str, int]) -> dict[int, list[Posting]]:
    postings: dict[int, list[Posting]] = {}
    for row in _POSTINGS.run(connection, bounds).fetchall():
        seq, line, account, amount = _check_types("posting", row, (int, int, str, int))
        lines = postings.setdefault(seq, [])
        if line != len(lines):
            raise RowError(f"posting: line {line} of event {seq} found, expected line {len(lines)}")
        lines.append(Posting(account, amount))
    return postings


def _build_head(row: Any, run: str) -> SignedHead:
    size, time_ms, root, last_hash, signature = _check_types("head", row, (int, int, bytes, bytes, bytes))
    return SignedHead(Head(run, size, root.hex(), last_hash.hex(), time_ms), signature)


def _check_types(table: str, row: Any, types: tuple[type, ...]) -> tuple[Any, ...]:
    values = tuple(row)
    if any(type(value) is not kind for value, kind in zip(values, types, strict=True)):
        raise RowError(f"{table}: a row with values of the wrong type, starting with {str(values[0])[:80]!r}")
    return values
