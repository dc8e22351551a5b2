"""What each owner's accepted groups were like, held against everybody's of the same version; who is watched for it.

    owner: (nothing known) -> evidence grows at each cut -> watched -> its next accepted submissions -> evidence from 0

Numbers wait from a group's acceptance to the cut of its step, and are then weighed in order of index. So it does not
matter in which order they came, which would be short ones first. A group counts for the owner that leased it first,
whoever delivered it: else a slow owner, whose long groups are done by somebody else in the end, would be known by its
short ones. Drift is that of who wrote. What is watched is neither bet on nor put into a bag.

Invariant: rows that wait are those of open steps; bags are those of versions that may still be used.
"""

import json
import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from sqlalchemy import Column, Connection, Index, LargeBinary, Table, Text

from shoal.swarm.db import INT64, define_table, spell_insert
from shoal.swarm.event import Event
from shoal.swarm.messages import MAX_ROLLOUTS, SubmissionState
from shoal.swarm.rules.age import oldest_version
from shoal.swarm.rules.history import RANKED, Bag, DriftLevel, Evidence, read_draws, read_wealth
from shoal.swarm.sql import Sql, fetch_number, fetch_row, fetch_rows, insert_into, list_columns
from shoal.swarm.state.run import read_run

NUMBERS = define_table(
    "group_numbers",
    Column("step", INT64, primary_key=True, autoincrement=False),
    Column("position", INT64, primary_key=True, autoincrement=False),
    Column("submission", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("author", Text, nullable=False),
    Column("version", INT64, nullable=False),
    Column("numbers", Text, nullable=False),
    Column("drift", Text, nullable=False),
)
BAG = define_table(
    "history_bag",
    Column("version", INT64, primary_key=True, autoincrement=False),
    *(Column(stream.value, LargeBinary, nullable=False) for stream in RANKED),
)
HISTORY = define_table(
    "history",
    Column("owner", Text, primary_key=True),
    Column("num_groups", INT64, nullable=False),
    Column("num_submissions", INT64, nullable=False),
    Column("wealth", Text, nullable=False),
    Column("peak", INT64, nullable=False),
    Column("leader", Text, nullable=False),
    Column("watch_seq", INT64, nullable=False),
    Column("remaining", INT64, nullable=False),
    Column("because", Text, nullable=False),
)
Index("history_watch", HISTORY.c.watch_seq, HISTORY.c.peak)


class NumbersRow(NamedTuple):
    """An accepted group whose step is not cut."""

    step: int
    position: int
    submission: str
    owner: str
    """that leased it first"""
    author: str
    """owner that delivered it"""
    version: int
    numbers: str
    """as JSON: one for each ranked stream, or none"""
    drift: str
    """of the submission, as JSON, with its first group; empty with the others"""


class HistoryRow(NamedTuple):
    """An owner's evidence, and whether it is watched."""

    owner: str
    num_groups: int
    """that were bet on since the evidence began"""
    num_submissions: int
    wealth: str
    peak: int
    """in millionths"""
    leader: str
    watch_seq: int
    """event since which it is watched; 0 if it is not"""
    remaining: int
    """accepted submissions after which it is watched no more"""
    because: str
    """in words"""


def _replace_in(table: Table) -> Sql:
    """The statement that writes a whole row, whether there was one or not."""
    (key,) = [column.name for column in table.primary_key]
    changes = ", ".join(f"{column.name} = excluded.{column.name}" for column in table.columns if column.name != key)
    return Sql(f"{spell_insert(table)} ON CONFLICT ({key}) DO UPDATE SET {changes}")


_HISTORIES = f"SELECT {list_columns(HISTORY)} FROM history"
_SELECT_HISTORY = Sql(f"{_HISTORIES} WHERE owner = :owner")
_SELECT_ODD = Sql(f"{_HISTORIES} WHERE watch_seq = 0 AND peak >= :line ORDER BY peak DESC, owner LIMIT :most")
_SELECT_WATCHED = Sql(f"{_HISTORIES} WHERE watch_seq > 0 ORDER BY watch_seq DESC LIMIT :most")
_COUNT_WATCHED = Sql("SELECT count(*) FROM history WHERE watch_seq > 0")
_IS_WATCHED = Sql("SELECT watch_seq FROM history WHERE owner = :owner")
_SELECT_NUMBERS = Sql(f"SELECT {list_columns(NUMBERS)} FROM group_numbers WHERE step = :step ORDER BY position")
_SELECT_BAG = Sql(f"SELECT {list_columns(BAG)} FROM history_bag WHERE version = :version")
_FIRST_HOLDER = Sql("SELECT owner FROM lease WHERE step = :step AND first = :first AND fence = 1")
_INSERT_NUMBERS, _SET_HISTORY, _SET_BAG = insert_into(NUMBERS), _replace_in(HISTORY), _replace_in(BAG)
_DROP_STEP = Sql("DELETE FROM group_numbers WHERE step = :step")
_DROP_SUBMISSION = Sql(
    "DELETE FROM group_numbers WHERE step = :step AND position >= :first AND position < :last "
    "AND submission = :submission"
)
_DROP_BAGS = Sql("DELETE FROM history_bag WHERE version < :oldest")
_WATCH = Sql(
    "UPDATE history SET watch_seq = :seq, remaining = :remaining, because = :because, num_groups = 0, "
    "num_submissions = 0, wealth = :wealth, peak = 0, leader = '' WHERE owner = :owner AND watch_seq = 0"
)
_RELEASE = Sql("UPDATE history SET watch_seq = 0, because = '' WHERE owner = :owner AND watch_seq > 0")
_COUNT_CLEAN = Sql(
    "UPDATE history SET remaining = remaining - 1 WHERE owner = :owner AND watch_seq > 0 AND watch_seq < :seq "
    "AND remaining > 0"
)


def find_history(connection: Connection, owner: str) -> HistoryRow | None:
    return fetch_row(connection, _SELECT_HISTORY, HistoryRow, owner=owner)


def is_watched(connection: Connection, owner: str) -> bool:
    """Whether an owner's work gets the longest look for now."""
    return bool(fetch_number(connection, _IS_WATCHED, owner=owner))


def list_odd(connection: Connection, line: int, most: int) -> list[HistoryRow]:
    """Owners whose evidence has reached a line and that are not watched, the clearest first."""
    return fetch_rows(connection, _SELECT_ODD, HistoryRow, line=line, most=most)


def list_watched(connection: Connection, most: int) -> list[HistoryRow]:
    """Owners that are watched, the newest ones first."""
    return fetch_rows(connection, _SELECT_WATCHED, HistoryRow, most=most)


def count_watched(connection: Connection) -> int:
    return fetch_number(connection, _COUNT_WATCHED)


def note_numbers(event: Event, connection: Connection) -> None:
    """sub.outcome"""
    content = event.content
    if not content["fills"]:
        return
    if content["state"] != SubmissionState.ACCEPTED:
        place = {"step": content["step"], "first": content["first"], "last": content["first"] + MAX_ROLLOUTS}
        _DROP_SUBMISSION.run(connection, {**place, "submission": event.subject})
        return
    _COUNT_CLEAN.run(connection, {"owner": content["owner"], "seq": int(event.subject[1:])})
    if content["numbers"] or content["drift"]:
        _add_numbers(event, connection)


def weigh_step(event: Event, connection: Connection) -> None:
    """batch.cut"""
    step = event.content["step"]
    rows = fetch_rows(connection, _SELECT_NUMBERS, NumbersRow, step=step)
    _DROP_STEP.run(connection, {"step": step})
    scales = _Scales(connection)
    for row in rows:
        scales.weigh(row, event.hash)
    scales.save(oldest_version(step + 1, read_run(connection).params.async_level))


def set_watch(event: Event, connection: Connection) -> None:
    """node.watch"""
    content = event.content
    if content["state"] == "over":
        changed = _RELEASE.run(connection, {"owner": event.subject}).rowcount
    else:
        values = {"remaining": content["submissions"], "because": content["because"], "wealth": Evidence().to_text()}
        changed = _WATCH.run(connection, {"owner": event.subject, "seq": event.seq, **values}).rowcount
    if changed != 1:
        raise ValueError("a watch of an owner that is watched already, or not at all")


class _Scales:
    """Evidence and bags that one step's groups touch: each read once and written once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._bags: dict[int, Bag] = {}
        self._found: dict[str, tuple[HistoryRow | None, Evidence]] = {}
        self._changed: set[str] = set()

    def weigh(self, row: NumbersRow, digest: bytes) -> None:
        """Hold one group against those before it; `digest` breaks ties."""
        if row.drift and not self._is_watched(row.author):
            levels = [DriftLevel(*level) for level in json.loads(row.drift)]
            self._change(row.author).weigh_drift(levels)
        if row.numbers and not self._is_watched(row.owner):
            mark = sha256(digest + row.position.to_bytes(8, "big")).digest()
            parts = self._find_bag(row.version).place(json.loads(row.numbers), read_draws(mark))
            if parts is not None:
                self._change(row.owner).weigh_group(parts)

    def save(self, oldest: int) -> None:
        """Write what changed, and forget bags of versions that nobody may use any more."""
        for owner in sorted(self._changed):
            _SET_HISTORY.run(self._connection, _describe_history(owner, self._find(owner)[1])._asdict())
        for version, bag in sorted(self._bags.items()):
            packed = zip(RANKED, map(_pack_values, bag.values), strict=True)
            _SET_BAG.run(self._connection, {"version": version, **{name.value: own for name, own in packed}})
        _DROP_BAGS.run(self._connection, {"oldest": oldest})

    def _is_watched(self, owner: str) -> bool:
        row = self._find(owner)[0]
        return row is not None and row.watch_seq > 0

    def _change(self, owner: str) -> Evidence:
        self._changed.add(owner)
        return self._find(owner)[1]

    def _find(self, owner: str) -> tuple[HistoryRow | None, Evidence]:
        if owner not in self._found:
            row = find_history(self._connection, owner)
            self._found[owner] = row, Evidence() if row is None else _read_evidence(row)
        return self._found[owner]

    def _find_bag(self, version: int) -> Bag:
        if version not in self._bags:
            found = fetch_row(self._connection, _SELECT_BAG, _make_tuple, version=version)
            self._bags[version] = Bag() if found is None else Bag([_unpack_values(data) for data in found[1:]])
        return self._bags[version]


def _add_numbers(event: Event, connection: Connection) -> None:
    content = event.content
    holder = fetch_row(connection, _FIRST_HOLDER, str, step=content["step"], first=content["first"])
    if holder is None:
        raise ValueError("accepted, but never leased")
    shared = {name: content[name] for name in ("step", "version")} | {"submission": event.subject}
    shared |= {"owner": holder, "author": content["owner"]}
    numbers = content["numbers"] or [[]] * len(content["signals"])
    rows = [
        {
            **shared,
            "position": content["first"] + place,
            "numbers": _spell(own),
            "drift": _spell([] if place else content["drift"]),
        }
        for place, own in enumerate(numbers)
    ]
    _INSERT_NUMBERS.run_many(connection, rows)


def _spell(values: Sequence[Any]) -> str:
    return json.dumps(values, separators=(",", ":")) if values else ""


def _describe_history(owner: str, evidence: Evidence) -> HistoryRow:
    counts = evidence.groups, evidence.submissions
    return HistoryRow(owner, *counts, evidence.to_text(), evidence.peak, evidence.leader, 0, 0, "")


def _read_evidence(row: HistoryRow) -> Evidence:
    return Evidence(row.num_groups, row.num_submissions, read_wealth(row.wealth), row.peak, row.leader)


def _pack_values(values: Sequence[int]) -> bytes:
    return struct.pack(f">{len(values)}q", *values)


def _unpack_values(data: bytes) -> list[int]:
    return list(struct.unpack(f">{len(data) // 8}q", data))


def _make_tuple(*values: Any) -> tuple[Any, ...]:
    return values
