"""Verification: everything that a ledger claims, recomputed from its rows.

Checked in one snapshot: the form of each event, its number, its place in the hash chain, its hash, its time and its
actor's signature; its postings and their sum; the Merkle tree, its stored nodes and each signed head; for the ledger of
a run, each decision, replayed by the rules (see `replay`); balances and all other projections, rebuilt from the events
in an empty database and compared row by row.

A ledger holds if nothing is wrong with it and the coordinator signed all of it: a valid head, stored or passed as
`held`, covers its last event. Anyone can append events that follow the rules, and the coordinator's own events carry no
signature but that of a head. `coordinator` and `descriptor` say whose ledger it has to be; without them the genesis
does, and the reader compares the key in the report.

A ledger whose end was cut off after an earlier head is a valid shorter ledger: only a later head reveals that. `held`
is such a head, from a node's `HeadKeeper`.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, text
from sqlalchemy.dialects import sqlite

from shoal.audit.replay import AuditError, replay_run
from shoal.coordinator.state import PROJECTIONS
from shoal.errors import ConfigError
from shoal.ledger.db import BALANCES, EVENT, POSTING, Projection, is_sqlite, read_snapshot
from shoal.ledger.event import GENESIS_PREV, Event, EventError, EventKind
from shoal.ledger.head import HeadError, SignedHead
from shoal.ledger.merkle import Frontier, hash_leaf
from shoal.ledger.reader import MAX_SEQ, TILE_LEVEL, RowError, read_events, read_heads, read_nodes
from shoal.ledger.schema import ProjectionError, check_schema, replay_events
from shoal.protocol.descriptor import Descriptor
from shoal.util.units import check_run

MAX_FINDINGS = 100
"""An error in one event makes all later ones wrong too; the first findings show where it starts."""

_BLOCK = 1024
_SHOWN_EVERY_S = 2.0
_RANKS = {type(None): 0, int: 1, float: 1, str: 2, bytes: 3}
"""How SQLite orders values of different types."""
logger = logging.getLogger(__name__)
_LATE_POSTING = text("SELECT min(seq) FROM posting WHERE seq >= :size")


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One failed check."""

    check: str
    """coordinator, descriptor, rows, form, chain, signature, tree, head, rules, projection"""
    text: str


@dataclass(slots=True)
class AuditReport:
    """The findings of a verification, and what it covered."""

    run: str = ""
    coordinator: str = ""
    num_events: int = 0
    num_postings: int = 0
    num_heads: int = 0
    num_tables: int = 0
    num_signed: int = 0
    """how many of the events the largest valid head covers"""
    root: str = ""
    findings: list[AuditFinding] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong, and a head signed by the coordinator covers the last event."""
        return not self.findings and self.num_signed == self.num_events

    @property
    def problem(self) -> str:
        """Why the ledger does not hold, in one sentence; empty if it does."""
        if self.findings:
            return "; ".join(f"{finding.check}: {finding.text}" for finding in self.findings[:3])
        if self.holds:
            return ""
        first, last = self.num_signed, self.num_events - 1
        events = f"event {last}" if first == last else f"events {first} to {last}"
        return (
            f"no head signed by the coordinator covers {events}, which anyone may have written; a coordinator signs "
            "a head every minute while it runs and when it stops"
        )

    def add(self, check: str, text: str) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(AuditFinding(check, text))


def verify_ledger(
    engine: Engine,
    *,
    projections: Sequence[Projection] = (),
    held: SignedHead | None = None,
    coordinator: str | None = None,
    descriptor: Descriptor | None = None,
) -> AuditReport:
    """Check a ledger; ConfigError if the database has none, or `held` is a head of another ledger.

    `projections`: those the ledger keeps besides balances.

    `coordinator` is the public key that must have signed it, `descriptor` that of the run it must belong to.
    """
    report = AuditReport()
    with read_snapshot(engine, lenient=True) as connection:
        check_schema(connection, [BALANCES, *projections])
        try:
            _Scan(connection, report, held, coordinator, descriptor).run()
        except RowError as error:
            report.add("rows", str(error))
        if not report.findings:  # projections of invalid events prove nothing
            _check_projections(connection, report, [BALANCES, *projections])
    return report


class _Scan:
    """One pass over the events that also checks the hash chain, the Merkle tree and the heads."""

    def __init__(
        self,
        connection: Connection,
        report: AuditReport,
        held: SignedHead | None,
        coordinator: str | None,
        descriptor: Descriptor | None,
    ) -> None:
        self._connection, self._report, self._held = connection, report, held
        self._coordinator, self._descriptor = coordinator, descriptor
        self._frontier = Frontier()
        self._last_hash, self._last_time = GENESIS_PREV, 0
        self._nodes: dict[tuple[int, int], bytes] = {}
        self._heads: Iterator[SignedHead] = iter(())
        self._next_head: SignedHead | None = None

    def run(self) -> None:
        for event in _log_progress("hash and signature", read_events(self._connection, -MAX_SEQ, MAX_SEQ)):
            if self._report.num_events == 0 and not self._take_genesis(event):
                return
            self._check_event(event)
            self._grow_tree(event)
            self._check_heads()
            if len(self._report.findings) >= MAX_FINDINGS:
                return
        self._report.root = self._frontier.compute_root().hex()
        self._check_end()

    def _take_genesis(self, event: Event) -> bool:
        """Read run and coordinator from the genesis; without them nothing else can be checked."""
        report = self._report
        try:
            event.check_form()
            run, coordinator = check_run(str(event.content["run"])), event.content["coordinator"]
        except (ValueError, KeyError) as error:
            report.add("form", f"event {event.seq}: not a genesis ({error})")
            return False
        if event.kind != EventKind.GENESIS or coordinator != event.actor or event.subject != run:
            report.add("form", f"event {event.seq}: a genesis that contradicts itself")
            return False
        report.run, report.coordinator = run, coordinator
        if not self._check_origin(event):
            return False
        self._check_held()
        self._heads = read_heads(self._connection, run)
        self._next_head = next(self._heads, None)
        return True

    def _check_origin(self, genesis: Event) -> bool:
        """Compare the genesis with what the caller expects; the rest of a different ledger is not read."""
        report, descriptor = self._report, self._descriptor
        if self._coordinator not in (None, report.coordinator):
            report.add("coordinator", f"signed by {report.coordinator}, expected {self._coordinator}")
        if descriptor is not None:
            stated: dict[str, Any] = {
                "run": report.run,
                "coordinator": report.coordinator,
                "genesis": genesis.hash.hex(),
            }
            stated |= {"operator": genesis.content.get("operator"), "tasks": genesis.content.get("recipe")}
            for name, value in stated.items():
                if (wanted := getattr(descriptor, name)) not in ("", value):
                    text = f"the genesis has {name} {value!s:.80}, the run's descriptor {wanted}"
                    report.add("descriptor", text)
        return not report.findings

    def _check_held(self) -> None:
        """Refuse a `held` head of a different ledger: it proves nothing about this one."""
        report, held = self._report, self._held
        if held is None:
            return
        if held.head.run != report.run:
            raise ConfigError(f"--head: it belongs to run {held.head.run}, this ledger to run {report.run}")
        try:
            held.check_signed(report.run, report.coordinator)
        except HeadError:
            text = f"--head: not signed by {report.coordinator}, the coordinator of this ledger"
            raise ConfigError(text) from None

    def _check_event(self, event: Event) -> None:
        report, place = self._report, f"event {event.seq}"
        if event.seq != report.num_events:
            report.add("chain", f"{place}: found where event {report.num_events} was expected")
        if event.prev_hash != self._last_hash:
            report.add("chain", f"{place}: does not contain the hash of the previous event")
        if event.time_ms < self._last_time:
            report.add("chain", f"{place}: earlier than the previous event")
        try:
            event.check_form()
            if event.compute_hash() != event.hash:
                report.add("chain", f"{place}: the stored hash does not match the content")
            if event.seq > 0 and event.kind == EventKind.GENESIS:
                report.add("form", f"{place}: a second genesis")
        except EventError as error:
            report.add("form", f"{place}: {error}")
        else:
            self._check_signature(event)
        self._last_time = event.time_ms

    def _check_signature(self, event: Event) -> None:
        try:
            event.check_signed(self._report.run, self._report.coordinator)
        except EventError as error:
            self._report.add("signature", f"event {event.seq}: {error}")

    def _grow_tree(self, event: Event) -> None:
        self._frontier, nodes = self._frontier.grow_leaf(hash_leaf(event.hash))
        self._nodes |= {(node.level, node.position): node.hash for node in nodes if node.level >= TILE_LEVEL}
        self._last_hash = event.hash
        self._report.num_events += 1
        self._report.num_postings += len(event.postings)

    def _check_heads(self) -> None:
        """Check the heads that were signed at this size: the stored one, and the one passed as `held`."""
        size = self._frontier.size
        while self._next_head is not None and self._next_head.head.size <= size:
            self._check_head(self._next_head, "head")
            self._report.num_heads += 1
            self._next_head = next(self._heads, None)
        if self._held is not None and self._held.head.size == size:
            self._check_head(self._held, "held head")

    def _check_head(self, signed: SignedHead, name: str) -> None:
        head, place = signed.head, f"{name} of size {signed.head.size}"
        try:
            signed.check_signed(self._report.run, self._report.coordinator)
        except HeadError as error:
            self._report.add("head", f"{place}: {error}")
            return
        if (head.size, head.root) != (self._frontier.size, self._frontier.compute_root().hex()):
            self._report.add("head", f"{place}: signed over different events")
        elif head.last_hash != self._last_hash.hex():
            self._report.add("head", f"{place}: names a different last event")
        else:
            self._report.num_signed = head.size

    def _check_end(self) -> None:
        report, size = self._report, self._frontier.size
        if size == 0:
            report.add("chain", "no events: a ledger begins with its genesis")
        for signed in (self._next_head, self._held):
            if signed is not None and signed.head.size > size:
                report.add("head", f"a head was signed over {signed.head.size} events, but there are {size}")
        late = self._connection.execute(_LATE_POSTING, {"size": size}).scalar()
        if late is not None:
            report.add("rows", f"posting: rows for event {late}, which does not exist")
        self._check_nodes()

    def _check_nodes(self) -> None:
        for node in read_nodes(self._connection):
            if self._nodes.pop((node.level, node.position), None) != node.hash:
                self._report.add("tree", f"node at level {node.level}, position {node.position}: wrong hash")
        for level, index in self._nodes:
            self._report.add("tree", f"node at level {level}, position {index}: missing")


def _check_projections(connection: Connection, report: AuditReport, projections: Sequence[Projection]) -> None:
    tables = [table for projection in projections for table in projection.tables]
    is_run = all(item in projections for item in PROJECTIONS)
    with open_scratch([*tables, EVENT, POSTING] if is_run else tables) as scratch:
        try:
            events = _log_progress("decision", read_events(connection, 0, MAX_SEQ), report.num_events)
            (replay_run if is_run else replay_events)(events, scratch, projections)
        except AuditError as error:
            report.add("rules", str(error))
            return
        except ProjectionError as error:
            report.add("projection", str(error))
            return
        for table in tables:
            report.num_tables += 1
            for difference in compare_table(connection, scratch, table):
                report.add("projection", difference)
                if len(report.findings) >= MAX_FINDINGS:
                    return


def _log_progress(what: str, events: Iterable[Event], size: int | None = None) -> Iterator[Event]:
    """The same events; says every few seconds how many are done."""
    shown_s, of = time.monotonic(), "" if size is None else f" of {size}"
    for number, event in enumerate(events):
        if time.monotonic() >= shown_s + _SHOWN_EVERY_S:
            shown_s = time.monotonic()
            logger.info(f"checked the {what} of {number}{of} events")
        yield event


@contextmanager
def open_scratch(tables: Sequence[sa.Table]) -> Iterator[Connection]:
    """An empty database with these tables in a temporary file, deleted afterwards."""
    with TemporaryDirectory(prefix="shoal-") as folder:
        engine = sa.create_engine(f"sqlite:///{Path(folder) / 'scratch.db'}")
        try:
            with engine.begin() as connection:
                connection.exec_driver_sql("PRAGMA synchronous = OFF")  # not needed after a crash
                connection.exec_driver_sql("PRAGMA journal_mode = MEMORY")
                for item in tables:
                    for statement in _write_schema(item):
                        connection.exec_driver_sql(statement)
                yield connection
        finally:
            engine.dispose()


@cache
def _write_schema(item: sa.Table) -> list[str]:
    """The statements that create a table and its indexes."""
    ddl: list[sa.schema.ExecutableDDLElement]
    ddl = [sa.schema.CreateTable(item), *(sa.schema.CreateIndex(index) for index in item.indexes)]
    return [str(element.compile(dialect=sqlite.dialect())) for element in ddl]


def compare_table(left: Connection, right: Connection, item: sa.Table) -> Iterator[str]:
    """One sentence for each row of `left` that differs from `right`, the correct table."""
    names = [column.name for column in item.primary_key.columns]
    names += [column.name for column in item.columns if column.name not in names]
    width = len(item.primary_key.columns)
    rows, others = _read_rows(left, item, names), _read_rows(right, item, names)
    row, other = next(rows, None), next(others, None)
    while row is not None or other is not None:
        at, wanted = _rank_key(row, width), _rank_key(other, width)
        if at == wanted:
            if row != other:
                yield f"{item.name} {_show_row(row, width)}: {_list_changes(names, row, other)}"
            row, other = next(rows, None), next(others, None)
        elif wanted is None or (at is not None and at < wanted):
            yield f"{item.name} {_show_row(row, width)}: no event produces this row"
            row = next(rows, None)
        else:
            yield f"{item.name} {_show_row(other, width)}: missing"
            other = next(others, None)


def _read_rows(connection: Connection, item: sa.Table, names: list[str]) -> Iterator[tuple[Any, ...]]:
    """All rows by primary key, as the driver returns them: SQLAlchemy would convert a wrong type to the right one."""
    order = [key.name for key in item.primary_key.columns]
    if not is_sqlite(connection):  # sort by code point, like SQLite
        is_text = {key.name: key.type.python_type is str for key in item.primary_key.columns}
        order = [f'{name} COLLATE "C"' if is_text[name] else name for name in order]
    statement = f"SELECT {', '.join(names)} FROM {item.name} ORDER BY {', '.join(order)}"
    for row in connection.execution_options(yield_per=_BLOCK).exec_driver_sql(statement):
        yield tuple(row)


def _rank_key(row: tuple[Any, ...] | None, width: int) -> list[tuple[int, Any]] | None:
    return None if row is None else [(_RANKS[type(value)], value) for value in row[:width]]


def _show_row(row: tuple[Any, ...] | None, width: int) -> str:
    assert row is not None, "the row that the message is about"
    return ", ".join(ascii(value)[:80] for value in row[:width])


def _list_changes(names: list[str], row: Any, other: Any) -> str:
    pairs = zip(names, row, other, strict=True)
    changed = [f"{name} is {a!r:.80}, not {b!r:.80}" for name, a, b in pairs if (type(a), a) != (type(b), b)]
    return "; ".join(changed)
