"""The ledger: every decision of a run, in one order, with its credit and the state that follows from it.

    decide(draft) -> events, postings and projections of one decision -> one transaction -> answer

Invariants:
- a decision is there whole or not at all: its events, their postings and what they do to the projections;
- what was answered is on disk, and survives kill -9 and power loss;
- events are numbered without a gap, each holds the hash of the one before, times never go back;
- the first event is the genesis: run and coordinator. A ledger is opened only with the same two;
- every 256 events, and when asked, a head is signed in the same transaction; a size is signed once.

Decisions run one after the other in the writer's thread. They read and write through `draft.connection`, must not wait
for anything else, and may be given up by their caller: then they happen all the same, or not at all.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, Engine

from shoal.errors import ConfigError
from shoal.keys import Key
from shoal.runname import check_run
from shoal.swarm.balances import BALANCES
from shoal.swarm.clock import read_clock
from shoal.swarm.db import EVENT, HEAD, MERKLE_NODE, POSTING, open_engine, read_snapshot, show_url
from shoal.swarm.event import GENESIS_PREV, Event, EventError, Kind, Statement, encode_body, seal_event
from shoal.swarm.head import Head, HeadError, SignedHead, sign_head
from shoal.swarm.lock import WriterLock
from shoal.swarm.merkle import Frontier, Node, hash_leaf, load_frontier, prove_consistency, prove_inclusion
from shoal.swarm.migrate import upgrade_schema
from shoal.swarm.postings import Posting, sort_postings
from shoal.swarm.projection import Projection, apply_event
from shoal.swarm.rows import TILE_LEVEL, NodeReader, RowError, count_events, read_event, read_newest_head
from shoal.swarm.sql import insert_into
from shoal.swarm.writer import LINGER_S, GroupWriter

HEAD_EVERY = 256
LOCK_WAIT_S = 2.0

T = TypeVar("T")


_INSERT_EVENT, _INSERT_POSTING = insert_into(EVENT), insert_into(POSTING)
_INSERT_HEAD, _INSERT_NODE = insert_into(HEAD), insert_into(MERKLE_NODE)
_EVENT_FIELDS = [column.name for column in EVENT.columns]


class _Tail(NamedTuple):
    """The end of the chain."""

    frontier: Frontier
    last_hash: bytes
    time_ms: int
    head: SignedHead | None


@dataclass(slots=True)
class _Pending:
    """Rows of a group that are written in one go before its commit."""

    events: list[Event]
    nodes: list[Node]
    heads: list[SignedHead]

    def count_rows(self) -> tuple[int, int, int]:
        return len(self.events), len(self.nodes), len(self.heads)

    def cut_rows(self, counts: tuple[int, int, int]) -> None:
        num_events, num_nodes, num_heads = counts
        del self.events[num_events:], self.nodes[num_nodes:], self.heads[num_heads:]


class Draft:
    """A decision in the making; valid only while its function runs."""

    def __init__(self, book: "_LedgerBook") -> None:
        self._book = book
        self.connection = book.connection
        """inside the decision's transaction. Projections are as after the last event appended here; the tables `event`
        and `posting` are as before the group."""
        self.time_ms = book.read_time()
        """when the decision is made, and the time of all its events: who takes it again gets the same"""

    @property
    def size(self) -> int:
        """The number of events so far, those of this decision included."""
        return self._book.tail.frontier.size

    def append(self, kind: Kind, *, subject: str = "", body: dict[str, Any], postings: Iterable[Posting] = ()) -> Event:
        """Append an event of the coordinator's own."""
        key, data, sorted_postings = self._book.key, encode_body(body), sort_postings(postings)
        return self._book.add_event(self.time_ms, kind, key.public, subject, data, b"", sorted_postings)

    def record(self, statement: Statement, *, postings: Iterable[Posting] = ()) -> Event:
        """Append what somebody else stated and signed."""
        if statement.run != self._book.run:
            raise EventError(f"a statement for run {statement.run}, not for {self._book.run}")
        stated = statement.kind, statement.actor, statement.subject, statement.body, statement.signature
        return self._book.add_event(self.time_ms, *stated, sort_postings(postings))


class _LedgerBook:
    """The chain's end in memory, moved forward with each event and back with each failed decision."""

    def __init__(
        self, connection: Connection, run: str, key: Key, projections: Sequence[Projection], clock: Callable[[], int]
    ) -> None:
        self.connection, self.run, self.key = connection, run, key
        self._projections, self._clock = projections, clock
        self.tail = _load_tail(connection, run, key.public)
        self.ahead_ms = max(0, self.tail.time_ms - clock()) if self.tail.time_ms else 0
        self.published = self.tail
        self._pending = _Pending([], [], [])

    def begin_group(self) -> None:
        self._pending = _Pending([], [], [])

    def mark_state(self) -> tuple[_Tail, tuple[int, int, int]]:
        return self.tail, self._pending.count_rows()

    def restore_state(self, mark: tuple[_Tail, tuple[int, int, int]]) -> None:
        self.tail, counts = mark
        self._pending.cut_rows(counts)

    def flush_group(self) -> None:
        signed = 0 if self.tail.head is None else self.tail.head.head.size
        if self.tail.frontier.size - signed >= HEAD_EVERY:
            self.add_head()
        _insert_rows(self.connection, self._pending)

    def publish_group(self) -> None:
        self.published = self.tail

    def read_time(self) -> int:
        """The clock's time, moved on if it was behind the last event at the start: times never go back, nor stand."""
        return max(self._clock() + self.ahead_ms, self.tail.time_ms)

    def add_event(
        self,
        time_ms: int,
        kind: Kind,
        actor: str,
        subject: str,
        body: bytes,
        signature: bytes,
        postings: tuple[Posting, ...],
    ) -> Event:
        tail = self.tail
        draft = Event(
            tail.frontier.size, time_ms, kind.value, actor, subject, body, signature, tail.last_hash, b"", postings
        )
        draft.check_frame()
        event = seal_event(draft)
        apply_event(self._projections, event, self.connection)
        frontier, nodes = tail.frontier.grow_leaf(hash_leaf(event.hash))
        self._pending.events.append(event)
        self._pending.nodes += [node for node in nodes if node.level >= TILE_LEVEL]
        self.tail = _Tail(frontier, event.hash, time_ms, tail.head)
        return event

    def add_head(self) -> SignedHead:
        """Sign the chain as it is, unless that was done already."""
        tail, time_ms = self.tail, self.read_time()
        if tail.head is not None and tail.head.head.size == tail.frontier.size:
            return tail.head
        root = tail.frontier.compute_root().hex()
        head = sign_head(self.key, Head(self.run, tail.frontier.size, root, tail.last_hash.hex(), time_ms))
        self._pending.heads.append(head)
        self.tail = tail._replace(head=head, time_ms=time_ms)
        return head


class Ledger:
    """A run's ledger, open for writing. One per run, in one process."""

    def __init__(self, engine: Engine, connection: Connection, lock: WriterLock, book: _LedgerBook, linger_s: float):
        self._engine, self._connection, self._lock, self._book = engine, connection, lock, book
        self._writer = GroupWriter(connection, book, linger_s=linger_s)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        run: str,
        key: Key,
        genesis: dict[str, Any] | None = None,
        projections: Sequence[Projection] = (),
        clock: Callable[[], int] = read_clock,
        linger_s: float = LINGER_S,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> "Ledger":
        """Open a ledger, or begin one: then `genesis` is what its first event says beside run and coordinator.

        Balances are always kept; `projections` are the tables to keep beside them.
        """
        check_run(run)
        engine = open_engine(url)
        connection = engine.connect()
        lock = None
        try:
            lock = WriterLock(connection, lock_wait_s)
            upgrade_schema(engine)
            book = _LedgerBook(connection, run, key, (BALANCES, *projections), clock)
        except BaseException:
            connection.close()
            engine.dispose()
            if lock is not None:
                lock.release()
            raise
        ledger = cls(engine, connection, lock, book, linger_s)
        try:
            if ledger.size == 0:
                ledger.submit(partial(_write_genesis, run=run, key=key, extra=genesis or {})).result()
        except BaseException:
            ledger.close()
            raise
        return ledger

    @property
    def ahead_ms(self) -> int:
        """How much later the ledger's time is than its clock; above 0 if the clock was once wrong, or is."""
        return self._book.ahead_ms

    @property
    def size(self) -> int:
        """The number of events on disk."""
        return self._book.published.frontier.size

    @property
    def head(self) -> SignedHead | None:
        """The newest signed head on disk."""
        return self._book.published.head

    async def transact(self, decide: Callable[[Draft], T]) -> T:
        """Run a decision and return what it returned, once it is on disk; raise what it raised, and it left nothing."""
        return await asyncio.wrap_future(self.submit(decide))

    def submit(self, decide: Callable[[Draft], T]) -> "Future[T]":
        """As `transact`, for callers without an event loop."""
        return self._writer.submit(partial(_run_decision, self._book, decide))

    async def sign_head(self) -> SignedHead:
        """The signed head of the ledger as it is."""
        return await asyncio.wrap_future(self._writer.submit(self._book.add_head))

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A snapshot to read from, in any thread."""
        with read_snapshot(self._engine) as connection:
            yield connection

    def prove_event(self, seq: int, size: int) -> list[bytes]:
        """The proof that event `seq` is in the ledger of `size` events."""
        if not 0 <= seq < size <= self.size:
            raise EventError(f"no event {seq} in a ledger of {size} events, or none of that size yet")
        with self.read() as connection:
            return prove_inclusion(NodeReader(connection), seq, size)

    def prove_extension(self, old_size: int, new_size: int) -> list[bytes]:
        """The proof that the ledger of `new_size` events begins with that of `old_size`."""
        if not 0 <= old_size <= new_size <= self.size:
            raise EventError(f"no ledger of {new_size} events, or none of {old_size} before it")
        with self.read() as connection:
            return prove_consistency(NodeReader(connection), old_size, new_size)

    def stop(self, reason: str) -> None:
        """Take no more decisions, for a reason that all who ask are told."""
        self._writer.stop(reason)

    def close(self) -> None:
        """Finish what was submitted and let another writer start."""
        self._writer.close()
        self._connection.close()
        self._engine.dispose()
        self._lock.release()


def _run_decision(book: _LedgerBook, decide: Callable[[Draft], T]) -> T:
    result = decide(Draft(book))
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("a decision is a plain function: it runs in the writer's thread and waits for nothing")
    return result


def _write_genesis(draft: Draft, *, run: str, key: Key, extra: dict[str, Any]) -> None:
    draft.append(Kind.GENESIS, subject=run, body={**extra, "coordinator": key.public, "run": run})


def _load_tail(connection: Connection, run: str, coordinator: str) -> _Tail:
    """The end of the chain, after a look at whether it is this run's and whole."""
    name = show_url(connection.engine)
    with connection.begin():
        size = count_events(connection)
        if size == 0:
            return _Tail(Frontier(), GENESIS_PREV, 0, None)
        try:
            _check_genesis(connection, run, coordinator, name)
            return _check_tail(connection, size, run, coordinator)
        except (RowError, HeadError) as error:
            raise ConfigError(f"{name}: the ledger was damaged ({error}); `shoal ledger verify` says where") from None


def _check_genesis(connection: Connection, run: str, coordinator: str, name: str) -> None:
    genesis = read_event(connection, 0)
    if genesis is None:
        raise RowError("event: none with number 0")
    content = genesis.content
    if (content.get("run"), content.get("coordinator")) != (run, coordinator):
        raise ConfigError(f"{name}: the ledger of another run or coordinator; choose another database or key")


def _check_tail(connection: Connection, size: int, run: str, coordinator: str) -> _Tail:
    last = read_event(connection, size - 1)
    assert last is not None, "the largest number has its row"
    if last.compute_hash() != last.hash:
        raise RowError(f"event: {last.seq} does not have its hash")
    nodes = NodeReader(connection)
    head = read_newest_head(connection, run)
    time_ms = last.time_ms
    if head is not None:
        head.check_signed(run, coordinator)
        signed = head.head
        if signed.size > size or load_frontier(nodes, signed.size).compute_root().hex() != signed.root:
            raise HeadError(f"the events do not give the head that was signed over {signed.size} of them")
        time_ms = max(time_ms, signed.time_ms)
    return _Tail(load_frontier(nodes, size), last.hash, time_ms, head)


def _insert_rows(connection: Connection, pending: _Pending) -> None:
    if pending.events:
        _INSERT_EVENT.run_many(connection, [_event_row(event) for event in pending.events])
    if postings := [row for event in pending.events for row in _posting_rows(event)]:
        _INSERT_POSTING.run_many(connection, postings)
    if pending.nodes:
        nodes = [{"level": node.level, "position": node.position, "hash": node.hash} for node in pending.nodes]
        _INSERT_NODE.run_many(connection, nodes)
    if pending.heads:
        _INSERT_HEAD.run_many(connection, [_head_row(head) for head in pending.heads])


def _event_row(event: Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in _EVENT_FIELDS}


def _posting_rows(event: Event) -> list[dict[str, Any]]:
    return [
        {"seq": event.seq, "line": line, "account": posting.account, "amount": posting.amount}
        for line, posting in enumerate(event.postings)
    ]


def _head_row(signed: SignedHead) -> dict[str, Any]:
    head = signed.head
    return {
        "size": head.size,
        "time_ms": head.time_ms,
        "root": bytes.fromhex(head.root),
        "last_hash": bytes.fromhex(head.last_hash),
        "signature": signed.signature,
    }
