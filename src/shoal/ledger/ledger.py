"""The ledger: every decision of a run, in one order, with its credit and the state that follows from it.

    decide(transaction) -> events, postings and projections of one decision -> one transaction -> answer

Invariants:
- a decision is stored completely or not at all: its events, their postings and their effect on the projections;
- what was answered is on disk, and survives kill -9 and power loss;
- events are numbered without gaps, each contains the hash of the previous one, and times never decrease;
- the first event is the genesis: run and coordinator. A ledger can be opened only with the same two;
- every 256 events, and on request, a head is signed in the same transaction; each size is signed at most once.

Decisions run one after the other in the writer's thread. They read and write through `transaction.connection` and must
not wait for anything else. If a caller gives up, its decision still happens completely or not at all.

Crash points: numbered points where a test may end the process, to check what a crash there leaves behind.

    WORK.1  requested, nothing decided        write.1  decided and written, not committed
    WORK.2  decided, nothing written          write.2  committed, not answered
    WORK.3  on disk, not answered             blob.N   steps of storing a file, drop.N of removing one

where WORK is one of `WORKS`. Nothing can be set from outside the process, and without a hook a point costs one
comparison.

Group commit: one thread owns the writing connection, and many callers wait for it.

    submit -> queue -> collected with up to 63 others -> savepoint each -> one COMMIT -> answered

- a caller gets its result only after the commit that contains its work;
- a decision that raises is rolled back alone, and its caller gets the exception; the rest of the group is unaffected;
- a commit that fails stops the writer: the state of the database is unknown, so every waiting and every later caller
  gets `WriterStoppedError`, and the process restarts from what is on disk.

A single caller is not delayed: the writer waits for more decisions only if the previous group had several.
"""

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.ledger import db
from shoal.ledger.db import BALANCES, Projection, apply_event
from shoal.ledger.event import (
    GENESIS_PREV,
    Event,
    EventError,
    EventKind,
    Posting,
    Statement,
    encode_body,
    seal_event,
    sort_postings,
)
from shoal.ledger.head import Head, HeadError, SignedHead, sign_head
from shoal.ledger.merkle import Frontier, Subtree, hash_leaf, load_frontier, prove_consistency, prove_inclusion
from shoal.ledger.reader import TILE_LEVEL, NodeReader, RowError, count_events, read_event, read_newest_head
from shoal.ledger.schema import prepare_schema
from shoal.util.clock import read_clock
from shoal.util.units import check_run

WORKS = ("lease", "commit", "upload", "receipt", "claim", "verdict", "cut", "publish", "redeem")
POINTS = frozenset(
    [f"{work}.{number}" for work in WORKS for number in (1, 2, 3)]
    + ["write.1", "write.2", "blob.1", "blob.2", "blob.3", "blob.4", "drop.1", "drop.2", "drop.3"]
)

_hook: Callable[[str], None] | None = None


def set_hook(hook: Callable[[str], None] | None) -> None:
    """Report every crash point to `hook`; None for no reports."""
    global _hook  # noqa: PLW0603 - one process, one hook
    _hook = hook


def reach(name: str, number: int) -> None:
    """Mark a crash point; does nothing if `name` is empty."""
    if _hook is not None and name:
        point = f"{name}.{number}"
        assert point in POINTS, f"{point}: unknown crash point"
        _hook(point)


MAX_GROUP = 64
LINGER_S = 0.005
MAX_WAITING = 4096
"""Longest queue of decisions; more are refused, because they would only wait longer."""


class WriterStoppedError(Exception):
    """The ledger was closed, or a commit failed, so it accepts no decisions. Unanswered work may be stored or not."""


class WriterBusyError(Exception):
    """The decision did not run: the queue is full, or another process holds the database. Try again later."""


@dataclass(slots=True)
class _PendingWrite:
    decide: Callable[[], Any]
    future: "Future[Any]"
    result: Any = None
    error: Exception | None = None


class GroupWriter:
    """The thread that runs decisions and commits them."""

    def __init__(self, connection: Connection, state: "_LedgerState", *, linger_s: float = LINGER_S) -> None:
        self._connection, self._state, self._linger_s = connection, state, linger_s
        # Savepoints bypass SQLAlchemy, whose savepoints cost 40 times as much as the database's.
        self._raw: Any = connection.connection.driver_connection
        self._failures = (SQLAlchemyError, connection.dialect.loaded_dbapi.Error)
        self._queue: queue.SimpleQueue[_PendingWrite | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._stopped: str | None = None
        self._crowded = False
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    def submit(self, decide: Callable[[], Any]) -> "Future[Any]":
        """Queue a decision. If its future is cancelled before its turn, it never runs."""
        job = _PendingWrite(decide, Future())
        with self._gate:  # no job can follow the end marker, so no caller waits forever
            if self._stopped is not None:
                raise WriterStoppedError(self._stopped)
            if self._queue.qsize() >= MAX_WAITING:
                raise WriterBusyError(f"{MAX_WAITING} decisions are already waiting for the ledger")
            self._queue.put(job)
        return job.future

    def close(self) -> None:
        """Finish what was submitted, then end the thread."""
        self.stop("the ledger was closed")
        self._thread.join()

    def stop(self, reason: str) -> None:
        """Accept no more decisions; those already submitted still run."""
        with self._gate:
            if self._stopped is None:
                self._stopped = reason
                self._queue.put(None)

    def _run(self) -> None:
        group: list[_PendingWrite] = []
        try:
            while group := self._collect_group():
                self._commit_group(group)
        except self._failures as error:
            # The one place that catches a database failure: all waiting callers get it as their answer.
            self.stop(f"the database failed ({_first_line(error)})")
        finally:
            self.stop("the ledger writer crashed; see its traceback in the log")
            self._fail_rest(group)

    def _collect_group(self) -> list[_PendingWrite]:
        """Collect the next jobs; empty at the end."""
        first = self._queue.get()
        group: list[_PendingWrite] = []
        deadline = time.monotonic() + (self._linger_s if self._crowded else 0)
        job = first
        while job is not None:
            if job.future.set_running_or_notify_cancel():
                group.append(job)
            if len(group) == MAX_GROUP:
                break
            try:  # wait without a timeout for the first job
                job = self._queue.get(timeout=max(0.0, deadline - time.monotonic()) if group else None)
            except queue.Empty:
                break
        else:
            self._queue.put(None)  # read again after this group
        self._crowded = len(group) > 1
        return group

    def _commit_group(self, group: list[_PendingWrite]) -> None:
        try:
            transaction = self._connection.begin()
        except OperationalError as error:  # nothing was begun, so the state is known
            _fail_jobs(group, WriterBusyError(f"the database is not writable now ({_first_line(error)})"))
            return
        with transaction:
            for job in group:
                self._run_job(job)
            self._state.flush_group()
            reach("write", 1)
        reach("write", 2)
        self._state.publish_group()
        for job in group:
            if job.error is None:
                job.future.set_result(job.result)
            else:
                job.future.set_exception(job.error)
        group.clear()

    def _run_job(self, job: _PendingWrite) -> None:
        mark = self._state.mark_state()
        self._raw.execute("SAVEPOINT decision")
        try:
            job.result = job.decide()
        except Exception as error:  # noqa: BLE001 - the caller gets whatever its decision raised
            self._raw.execute("ROLLBACK TO SAVEPOINT decision")
            self._state.restore_state(mark)
            job.error = error
        self._raw.execute("RELEASE SAVEPOINT decision")

    def _fail_rest(self, group: list[_PendingWrite]) -> None:
        """Fail all jobs that are still waiting."""
        error = WriterStoppedError(self._stopped)
        _fail_jobs(group, error)
        while True:
            try:
                job_or_end = self._queue.get_nowait()
            except queue.Empty:
                return
            if job_or_end is not None and job_or_end.future.set_running_or_notify_cancel():
                job_or_end.future.set_exception(error)


def _fail_jobs(group: list[_PendingWrite], error: Exception) -> None:
    for job in group:
        job.future.set_exception(error)
    group.clear()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


HEAD_EVERY = 256
LOCK_WAIT_S = 2.0

T = TypeVar("T")


_EVENT_FIELDS = [column.name for column in db.EVENT.columns]


class _ChainTail(NamedTuple):
    """The end of the hash chain."""

    frontier: Frontier
    last_hash: bytes
    time_ms: int
    head: SignedHead | None


class LedgerTransaction:
    """A decision in progress; valid only while its function runs."""

    def __init__(self, state: "_LedgerState") -> None:
        self._state, self._run, self._coordinator = state, state.run, state.key.public
        self.events: list[Event] = []
        """events of this decision so far"""
        self.connection = state.connection
        """inside the decision's transaction. Projections include the events appended here; the tables `event` and
        `posting` are as they were before the group."""
        self.time_ms = state.read_time()
        """time of the decision and of all its events, so that a replay gets the same"""

    @property
    def size(self) -> int:
        """The number of events so far, including those of this decision."""
        return self._state.tail.frontier.size

    def append(
        self, kind: EventKind, *, subject: str = "", body: dict[str, Any], postings: Iterable[Posting] = ()
    ) -> Event:
        """Append one of the coordinator's own events."""
        return self._add(kind, self._coordinator, subject, encode_body(body), b"", postings)

    def record(self, statement: Statement, *, postings: Iterable[Posting] = ()) -> Event:
        """Append a statement that someone else signed."""
        if statement.run != self._run:
            raise EventError(f"statement for a different run: {statement.run}, expected {self._run}")
        stated = statement.kind, statement.actor, statement.subject, statement.body, statement.signature
        return self._add(*stated, postings)

    def _add(
        self, kind: EventKind, actor: str, subject: str, body: bytes, signature: bytes, postings: Iterable[Posting]
    ) -> Event:
        fields = self.size, self.time_ms, kind.value, actor, subject, body, signature
        self.events.append(self._chain_event(Event(*fields, b"", b"", sort_postings(postings))))
        return self.events[-1]

    def _chain_event(self, draft: Event) -> Event:
        """Append an event that has no hashes yet."""
        return self._state.add_event(draft)


class _LedgerState:
    """The end of the chain in memory; moves forward with each event and back with each failed decision."""

    def __init__(
        self, connection: Connection, run: str, key: Key, projections: Sequence[Projection], clock: Callable[[], int]
    ) -> None:
        self.connection, self.run, self.key = connection, run, key
        self._projections, self._clock = projections, clock
        self.tail = _load_tail(connection, run, key.public)
        self.ahead_ms = max(0, self.tail.time_ms - clock()) if self.tail.time_ms else 0
        self.published = self.tail
        self._events: list[Event] = []
        self._nodes: list[Subtree] = []
        self._heads: list[SignedHead] = []
        """rows of a group, written together before its commit"""

    def mark_state(self) -> tuple[_ChainTail, int, int, int]:
        """The state to restore if the next decision raises."""
        return self.tail, len(self._events), len(self._nodes), len(self._heads)

    def restore_state(self, mark: tuple[_ChainTail, int, int, int]) -> None:
        self.tail, num_events, num_nodes, num_heads = mark
        del self._events[num_events:], self._nodes[num_nodes:], self._heads[num_heads:]

    def flush_group(self) -> None:
        """Write the rows that were deferred to the end of the group."""
        signed = 0 if self.tail.head is None else self.tail.head.head.size
        if self.tail.frontier.size - signed >= HEAD_EVERY:
            self.add_head()
        insert_rows(self.connection, self._events, self._nodes, self._heads)

    def publish_group(self) -> None:
        """Publish the new size and head, now that the transaction is on disk."""
        self.published = self.tail
        self._events, self._nodes, self._heads = [], [], []

    def read_time(self) -> int:
        """The clock's time, plus an offset if it was behind the last event at start: times always increase."""
        return max(self._clock() + self.ahead_ms, self.tail.time_ms)

    def add_event(self, draft: Event) -> Event:
        tail = self.tail
        unsealed = replace(draft, prev_hash=tail.last_hash)
        unsealed.check_frame()
        event = seal_event(unsealed)
        apply_event(self._projections, event, self.connection)
        frontier, nodes = tail.frontier.grow_leaf(hash_leaf(event.hash))
        self._events.append(event)
        self._nodes += [node for node in nodes if node.level >= TILE_LEVEL]
        self.tail = _ChainTail(frontier, event.hash, event.time_ms, tail.head)
        return event

    def add_head(self) -> SignedHead:
        """Sign a head of the current chain, unless this size is already signed."""
        tail, time_ms = self.tail, self.read_time()
        if tail.head is not None and tail.head.head.size == tail.frontier.size:
            return tail.head
        root = tail.frontier.compute_root().hex()
        head = sign_head(self.key, Head(self.run, tail.frontier.size, root, tail.last_hash.hex(), time_ms))
        self._heads.append(head)
        self.tail = tail._replace(head=head, time_ms=time_ms)
        return head


class Ledger:
    """A run's ledger, open for writing by one process."""

    def __init__(
        self, engine: Engine, connection: Connection, lock: db.WriterLock, state: _LedgerState, linger_s: float
    ):
        self._engine, self._connection, self._lock, self._state = engine, connection, lock, state
        self._writer = GroupWriter(connection, state, linger_s=linger_s)

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
        """Open a ledger or create one; `genesis` is the body of its first event besides run and coordinator.

        Balances are always kept; `projections` are additional tables.
        """
        check_run(run)
        engine = db.open_database(url)
        connection = engine.connect()
        lock = None
        try:
            lock = db.WriterLock(connection, lock_wait_s)
            prepare_schema(connection, all_projections := (BALANCES, *projections))
            state = _LedgerState(connection, run, key, all_projections, clock)
        except BaseException:
            connection.close()
            engine.dispose()
            if lock is not None:
                lock.release()
            raise
        ledger = cls(engine, connection, lock, state, linger_s)
        try:
            if ledger.size == 0:
                body = {**(genesis or {}), "coordinator": key.public, "run": run}
                ledger.submit(
                    lambda transaction: transaction.append(EventKind.GENESIS, subject=run, body=body)
                ).result()
        except BaseException:
            ledger.close()
            raise
        return ledger

    @property
    def ahead_ms(self) -> int:
        """How far the ledger's time is ahead of its clock; above 0 if the clock was wrong before, or is now."""
        return self._state.ahead_ms

    @property
    def size(self) -> int:
        """The number of events on disk."""
        return self._state.published.frontier.size

    @property
    def head(self) -> SignedHead | None:
        """The newest signed head on disk."""
        return self._state.published.head

    @property
    def head_text(self) -> str | None:
        """The same as it is sent."""
        return None if self.head is None else _write_head(self.head)

    async def transact(self, decide: Callable[[LedgerTransaction], T]) -> T:
        """Run a decision and return its result once it is on disk; if it raises, nothing is stored."""
        return await asyncio.wrap_future(self.submit(decide))

    def submit(self, decide: Callable[[LedgerTransaction], T]) -> "Future[T]":
        """Like `transact`, for callers without an event loop."""
        return self._writer.submit(partial(_run_decision, self._state, decide))

    async def sign_head(self) -> SignedHead:
        """Sign a head of the current ledger, or return the existing one."""
        return await asyncio.wrap_future(self._writer.submit(self._state.add_head))

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A snapshot to read from, usable in any thread."""
        with db.read_snapshot(self._engine) as connection:
            yield connection

    def prove_event(self, seq: int, size: int) -> list[bytes]:
        """The proof that event `seq` is in the ledger of the first `size` events."""
        if not 0 <= seq < size <= self.size:
            raise EventError(f"no event {seq} in a ledger of {size} events, or the ledger is not that long yet")
        with self.read() as connection:
            return prove_inclusion(NodeReader(connection), seq, size)

    def prove_extension(self, old_size: int, new_size: int) -> list[bytes]:
        """The proof that the ledger of `new_size` events begins with that of `old_size`."""
        if not 0 <= old_size <= new_size <= self.size:
            raise EventError(f"cannot extend {old_size} to {new_size} events: wrong order, or the ledger is shorter")
        with self.read() as connection:
            return prove_consistency(NodeReader(connection), old_size, new_size)

    def stop(self, reason: str) -> None:
        """Accept no more decisions; every later caller gets `reason`."""
        self._writer.stop(reason)

    def close(self) -> None:
        """Finish what was submitted, and let another writer start."""
        self._writer.close()
        self._connection.close()
        self._engine.dispose()
        self._lock.release()


def _run_decision(state: _LedgerState, decide: Callable[[LedgerTransaction], T]) -> T:
    result = decide(LedgerTransaction(state))
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("a decision must be a plain function, not a coroutine: it runs in the writer's thread")
    return result


def _load_tail(connection: Connection, run: str, coordinator: str) -> _ChainTail:
    """Read the end of the chain, and check that it is intact and belongs to this run."""
    name = db.show_url(connection.engine)
    with connection.begin():
        size = count_events(connection)
        if size == 0:
            return _ChainTail(Frontier(), GENESIS_PREV, 0, None)
        try:
            _check_genesis(connection, run, coordinator, name)
            return _check_tail(connection, size, run, coordinator)
        except (RowError, HeadError) as error:
            raise ConfigError(f"{name}: the ledger is corrupt ({error}); see `shoal ledger verify`") from None


def _check_genesis(connection: Connection, run: str, coordinator: str, name: str) -> None:
    genesis = read_event(connection, 0)
    if genesis is None:
        raise RowError("event: number 0 is missing")
    content = genesis.content
    if (content.get("run"), content.get("coordinator")) != (run, coordinator):
        raise ConfigError(f"{name}: ledger of a different run or coordinator; use a different database or key")


def _check_tail(connection: Connection, size: int, run: str, coordinator: str) -> _ChainTail:
    last = read_event(connection, size - 1)
    assert last is not None, "the event with the largest number exists"
    if last.compute_hash() != last.hash:
        raise RowError(f"event: number {last.seq} has a wrong hash")
    nodes = NodeReader(connection)
    head = read_newest_head(connection, run)
    time_ms = last.time_ms
    if head is not None:
        head.check_signed(run, coordinator)
        signed = head.head
        if signed.size > size or load_frontier(nodes, signed.size).compute_root().hex() != signed.root:
            raise HeadError(f"the events do not match the signed head of size {signed.size}")
        time_ms = max(time_ms, signed.time_ms)
    return _ChainTail(load_frontier(nodes, size), last.hash, time_ms, head)


def insert_rows(
    connection: Connection, events: Sequence[Event], nodes: Sequence[Subtree], heads: Sequence[SignedHead]
) -> None:
    """Insert events with their postings, tree nodes and heads."""
    postings = [
        {"seq": event.seq, "line": line, **posting._asdict()}
        for event in events
        for line, posting in enumerate(event.postings)
    ]
    event_rows = ({name: getattr(event, name) for name in _EVENT_FIELDS} for event in events)
    db.insert_rows(connection, db.EVENT, *event_rows)
    db.insert_rows(connection, db.POSTING, *postings)
    db.insert_rows(connection, db.MERKLE_NODE, *(node._asdict() for node in nodes))
    db.insert_rows(connection, db.HEAD, *map(_head_row, heads))


@lru_cache(maxsize=8)  # every heartbeat carries the head, and thousands carry the same one
def _write_head(signed: SignedHead) -> str:
    return signed.to_bytes().decode()


def _head_row(signed: SignedHead) -> dict[str, Any]:
    head = signed.head
    return {
        "size": head.size,
        "time_ms": head.time_ms,
        "root": bytes.fromhex(head.root),
        "last_hash": bytes.fromhex(head.last_hash),
        "signature": signed.signature,
    }
