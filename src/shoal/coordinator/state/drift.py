"""Statistics of each owner's accepted groups, compared with everyone's of the same version; and the watch list.

    owner: (nothing known) -> evidence grows at each cut -> watched -> its next accepted submissions -> evidence from 0

A group's numbers are stored at its acceptance and weighed at the cut of its step, in order of index. So the order of
arrival, which would favour short rollouts, does not matter. A group counts for the owner that leased it first, whoever
delivered it: otherwise a slow owner, whose long groups are eventually done by others, would be represented by its short
ones. Drift counts for the owner that generated the group. Work of watched owners is neither bet on nor put into a bag.

Invariant: stored numbers belong to open steps; bags belong to versions that may still be used.
"""

import json
import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from sqlalchemy import Connection, Index

from shoal.coordinator.rules.drift import RANKED, DriftEvidence, DriftLevel, PopulationSamples, read_draws, read_wealth
from shoal.coordinator.state.run import read_run
from shoal.ledger import db
from shoal.ledger.event import Event
from shoal.protocol.events import BatchCut, SubmissionOutcome, WatchEnd, WatchStart, parse_event, read_body
from shoal.protocol.messages import MAX_ROLLOUTS, SubmissionState
from shoal.protocol.params import oldest_version

BAG = db.define_table("history_bag", {"version": int} | {stream.value: bytes for stream in RANKED}, key="version")


class NumbersRow(NamedTuple):
    """An accepted group whose step is not cut."""

    step: int
    position: int
    submission: str
    owner: str
    """owner that leased it first"""
    author: str
    """owner that delivered it"""
    version: int
    numbers: str
    """as JSON: one for each ranked stream, or none"""
    drift: str
    """drift of the submission, as JSON, stored with its first group; empty for the others"""


NUMBERS = db.define_table("group_numbers", NumbersRow, key=("step", "position"))


class HistoryRow(NamedTuple):
    """An owner's evidence, and whether it is watched."""

    owner: str
    num_groups: int
    """submissions that were bet on since the evidence began"""
    num_submissions: int
    wealth: str
    peak: int
    """in millionths"""
    leader: str
    watch_seq: int
    """event since which it is watched; 0 if it is not"""
    remaining: int
    """accepted submissions until the watch ends"""
    because: str
    """as a sentence"""


HISTORY = db.define_table("history", HistoryRow, key="owner")
Index("history_watch", HISTORY.c.watch_seq, HISTORY.c.peak)


_SELECT_BAG = db.Sql(f"SELECT {db.list_columns(BAG)} FROM history_bag WHERE version = :version")
_FIRST_HOLDER = db.Sql("SELECT owner FROM lease WHERE step = :step AND first = :first AND fence = 1")
_DROP_SUBMISSION = db.Sql(
    "DELETE FROM group_numbers WHERE step = :step AND position >= :first AND position < :last "
    "AND submission = :submission"
)
_DROP_BAGS = db.Sql("DELETE FROM history_bag WHERE version < :oldest")
_RELEASE = db.Sql("UPDATE history SET watch_seq = 0, because = '' WHERE owner = :owner AND watch_seq > 0")
_COUNT_CLEAN = db.Sql(
    "UPDATE history SET remaining = remaining - 1 WHERE owner = :owner AND watch_seq > 0 AND watch_seq < :seq "
    "AND remaining > 0"
)


def find_history(connection: Connection, owner: str) -> HistoryRow | None:
    return db.find_row(connection, HistoryRow, owner=owner)


def is_watched(connection: Connection, owner: str) -> bool:
    """Whether an owner's work is currently checked in full."""
    return bool(db.fetch_number(connection, "SELECT watch_seq FROM history WHERE owner = :owner", owner=owner))


def list_odd(connection: Connection, line: int, most: int) -> list[HistoryRow]:
    """Owners whose evidence has reached a threshold and that are not watched, strongest evidence first."""
    condition = "WHERE watch_seq = 0 AND peak >= :line ORDER BY peak DESC, owner LIMIT :most"
    return db.list_rows(connection, HistoryRow, condition, line=line, most=most)


def list_watched(connection: Connection, most: int) -> list[HistoryRow]:
    """Watched owners, newest first."""
    return db.list_rows(connection, HistoryRow, "WHERE watch_seq > 0 ORDER BY watch_seq DESC LIMIT :most", most=most)


def count_watched(connection: Connection) -> int:
    return db.fetch_number(connection, "SELECT count(*) FROM history WHERE watch_seq > 0")


def note_numbers(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    body = read_body(event, SubmissionOutcome)
    if not body.fills:
        return
    if body.state is not SubmissionState.ACCEPTED:
        place = {"step": body.step, "first": body.first, "last": body.first + MAX_ROLLOUTS}
        _DROP_SUBMISSION.run(connection, {**place, "submission": event.subject})
        return
    _COUNT_CLEAN.run(connection, {"owner": body.owner, "seq": int(event.subject[1:])})
    if body.numbers or body.drift:
        _add_numbers(event.subject, body, connection)


def weigh_step(event: Event, connection: Connection) -> None:
    """batch.cut"""
    step = read_body(event, BatchCut).step
    rows = db.list_rows(connection, NumbersRow, "WHERE step = :step ORDER BY position", step=step)
    db.execute(connection, "DELETE FROM group_numbers WHERE step = :step", step=step)
    update = _EvidenceUpdate(connection)
    for row in rows:
        update.weigh(row, event.hash)
    update.save(oldest_version(step + 1, read_run(connection).params.async_level))


def set_watch(event: Event, connection: Connection) -> None:
    """node.watch"""
    changed = 0
    match parse_event(event):
        case WatchEnd():
            changed = _RELEASE.run(connection, {"owner": event.subject}).rowcount
        case WatchStart() as body:
            empty = HistoryRow(event.subject, 0, 0, DriftEvidence().to_text(), 0, "", 0, 0, "")
            row = empty._replace(watch_seq=event.seq, remaining=body.submissions, because=body.because)
            changed = db.update_rows(connection, HISTORY, row._asdict(), owner=event.subject, watch_seq=0)
    if changed != 1:
        raise ValueError("owner is already watched, or is not watched")


class _EvidenceUpdate:
    """Evidence and bags that the groups of one step change: each is read once and written once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._bags: dict[int, PopulationSamples] = {}
        self._found: dict[str, tuple[HistoryRow | None, DriftEvidence]] = {}
        self._changed: set[str] = set()

    def weigh(self, row: NumbersRow, digest: bytes) -> None:
        """Compare one group with those before it; `digest` breaks ties."""
        if row.drift and not self._is_watched(row.author):
            levels = [DriftLevel(*level) for level in json.loads(row.drift)]
            self._change(row.author).weigh_drift(levels)
        if row.numbers and not self._is_watched(row.owner):
            mark = sha256(digest + row.position.to_bytes(8, "big")).digest()
            parts = self._find_bag(row.version).place(json.loads(row.numbers), read_draws(mark))
            if parts is not None:
                self._change(row.owner).weigh_group(parts)

    def save(self, oldest: int) -> None:
        """Write what changed, and delete bags of versions that may no longer be used."""
        for owner in sorted(self._changed):
            won = self._find(owner)[1]
            row = HistoryRow(owner, won.groups, won.submissions, won.to_text(), won.peak, won.leader, 0, 0, "")
            db.replace_rows(self._connection, HISTORY, row._asdict())
        for version, bag in sorted(self._bags.items()):
            packed = zip(RANKED, map(_pack_values, bag.values), strict=True)
            row_of_bag = {"version": version, **{name.value: own for name, own in packed}}
            db.replace_rows(self._connection, BAG, row_of_bag)
        _DROP_BAGS.run(self._connection, {"oldest": oldest})

    def _is_watched(self, owner: str) -> bool:
        row = self._find(owner)[0]
        return row is not None and row.watch_seq > 0

    def _change(self, owner: str) -> DriftEvidence:
        self._changed.add(owner)
        return self._find(owner)[1]

    def _find(self, owner: str) -> tuple[HistoryRow | None, DriftEvidence]:
        if owner not in self._found:
            row = find_history(self._connection, owner)
            won = DriftEvidence()
            if row is not None:
                won = DriftEvidence(row.num_groups, row.num_submissions, read_wealth(row.wealth), row.peak, row.leader)
            self._found[owner] = row, won
        return self._found[owner]

    def _find_bag(self, version: int) -> PopulationSamples:
        if version not in self._bags:
            found = db.fetch_row(self._connection, _SELECT_BAG, _unpack_bag, version=version)
            self._bags[version] = found or PopulationSamples()
        return self._bags[version]


def _add_numbers(submission: str, body: SubmissionOutcome, connection: Connection) -> None:
    holder = db.fetch_row(connection, _FIRST_HOLDER, str, step=body.step, first=body.first)
    if holder is None:
        raise ValueError("accepted groups were never leased")
    shared = {"step": body.step, "version": body.version, "submission": submission}
    shared |= {"owner": holder, "author": body.owner}
    numbers = body.numbers or ((),) * len(body.signals)
    rows = [
        {**shared, "position": body.first + place, "numbers": _spell(own), "drift": _spell(() if place else body.drift)}
        for place, own in enumerate(numbers)
    ]
    db.insert_rows(connection, NUMBERS, *rows)


def _spell(values: Sequence[Any]) -> str:
    return json.dumps(values, separators=(",", ":")) if values else ""


def _pack_values(values: Sequence[int]) -> bytes:
    return struct.pack(f">{len(values)}q", *values)


def _unpack_bag(version: int, *packed: bytes) -> PopulationSamples:
    return PopulationSamples([struct.unpack(f">{len(data) // 8}q", data) for data in packed])
