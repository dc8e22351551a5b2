"""Verification: everything that a ledger claims, recomputed from its rows.

Checked, in one snapshot: the form of each event, its number, its place in the chain, its hash, its time, the signature
of its actor; its postings and their sum; the tree, the stored nodes of it, each signed head; of the ledger of a run
each decision, taken again by the rules (see `law`); balances and all other projections, made again from the events in
an empty database and compared row by row.

A ledger whose end was cut off together with its heads is a valid shorter ledger: only who holds a later head can tell.
`held` is such a head, of a node's keeper. A ledger that was written anew as a whole is another coordinator's: compare
the public key that the report names.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, Engine, text

from shoal.runname import check_run
from shoal.swarm.balances import BALANCES
from shoal.swarm.db import EVENT, POSTING, read_snapshot
from shoal.swarm.event import GENESIS_PREV, Event, EventError, Kind
from shoal.swarm.head import HeadError, SignedHead
from shoal.swarm.law.court import hear_events
from shoal.swarm.law.docket import LawError
from shoal.swarm.merkle import Frontier, hash_leaf
from shoal.swarm.migrate import check_schema
from shoal.swarm.projection import Projection
from shoal.swarm.replay import ReplayError, compare_table, open_scratch, replay_events
from shoal.swarm.rows import MAX_SEQ, TILE_LEVEL, RowError, read_events, read_heads, read_nodes
from shoal.swarm.state import PROJECTIONS

MAX_FINDINGS = 100
"""A ledger that is wrong from some event on is wrong in all that follow; the first ones say where."""

_LATE_POSTING = text("SELECT min(seq) FROM posting WHERE seq >= :size")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it must be."""

    check: str
    """rows, form, chain, signature, tree, head, law, projection"""
    text: str


@dataclass(slots=True)
class Report:
    """What a verification found, and over how much."""

    run: str = ""
    coordinator: str = ""
    num_events: int = 0
    num_postings: int = 0
    num_heads: int = 0
    num_tables: int = 0
    root: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.findings

    def add(self, check: str, text: str) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(check, text))


def verify_ledger(engine: Engine, *, projections: Sequence[Projection] = (), held: SignedHead | None = None) -> Report:
    """Check a ledger; ConfigError if there is none. `projections` are those it is written with, beside balances."""
    report = Report()
    with read_snapshot(engine, lenient=True) as connection:
        check_schema(connection)
        try:
            _Scan(connection, report, held).run()
        except RowError as error:
            report.add("rows", str(error))
        if report.holds:  # what follows from broken events says nothing
            _check_projections(connection, report, [BALANCES, *projections])
    return report


class _Scan:
    """One pass over the events, with the chain, the tree and the heads beside it."""

    def __init__(self, connection: Connection, report: Report, held: SignedHead | None) -> None:
        self._connection, self._report, self._held = connection, report, held
        self._frontier = Frontier()
        self._last_hash, self._last_time = GENESIS_PREV, 0
        self._nodes: dict[tuple[int, int], bytes] = {}
        self._heads: Iterator[SignedHead] = iter(())
        self._next_head: SignedHead | None = None

    def run(self) -> None:
        for event in read_events(self._connection, -MAX_SEQ, MAX_SEQ):
            if self._report.num_events == 0 and not self._take_genesis(event):
                return
            self._check_event(event)
            self._grow_tree(event)
            self._check_heads()
        self._report.root = self._frontier.compute_root().hex()
        self._check_end()

    def _take_genesis(self, event: Event) -> bool:
        """Who this ledger belongs to; without that nothing else can be checked."""
        report = self._report
        try:
            event.check_form()
            run, coordinator = check_run(str(event.content["run"])), event.content["coordinator"]
        except (ValueError, KeyError) as error:
            report.add("form", f"event {event.seq}: not a genesis ({error})")
            return False
        if event.kind != Kind.GENESIS or coordinator != event.actor or event.subject != run:
            report.add("form", f"event {event.seq}: a genesis that contradicts itself")
            return False
        report.run, report.coordinator = run, coordinator
        self._heads = read_heads(self._connection, run)
        self._next_head = next(self._heads, None)
        return True

    def _check_event(self, event: Event) -> None:
        report, place = self._report, f"event {event.seq}"
        if event.seq != report.num_events:
            report.add("chain", f"{place}: where event {report.num_events} belongs")
        if event.prev_hash != self._last_hash:
            report.add("chain", f"{place}: does not hold the hash of the event before it")
        if event.time_ms < self._last_time:
            report.add("chain", f"{place}: earlier than the event before it")
        try:
            event.check_form()
            if event.compute_hash() != event.hash:
                report.add("chain", f"{place}: does not have the hash of its content")
            if event.seq > 0 and event.kind == Kind.GENESIS:
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
        """Compare the heads that were signed at this size: the stored one, and the one that was brought."""
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
            self._report.add("head", f"{place}: signed over other events than these")
        elif head.last_hash != self._last_hash.hex():
            self._report.add("head", f"{place}: names another last event")

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
                self._report.add("tree", f"node at level {node.level}, position {node.position}: not of this tree")
        for level, index in self._nodes:
            self._report.add("tree", f"node at level {level}, position {index}: missing")


def _check_projections(connection: Connection, report: Report, projections: Sequence[Projection]) -> None:
    tables = [table for projection in projections for table in projection.tables]
    is_run = set(PROJECTIONS) <= set(projections)
    with open_scratch([*tables, EVENT, POSTING] if is_run else tables) as scratch:
        try:
            events = read_events(connection, 0, MAX_SEQ)
            (hear_events if is_run else replay_events)(events, scratch, projections)
        except LawError as error:
            report.add("law", str(error))
            return
        except ReplayError as error:
            report.add("projection", str(error))
            return
        for table in tables:
            report.num_tables += 1
            for difference in compare_table(connection, scratch, table):
                report.add("projection", difference)
                if len(report.findings) >= MAX_FINDINGS:
                    return
