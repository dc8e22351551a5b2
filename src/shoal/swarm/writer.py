"""Group commit: one thread that owns the writing connection, and many callers that wait for it.

    submit -> queue -> collected with up to 63 others -> savepoint each -> one COMMIT -> answered

Invariants:
- a caller is answered with a result only after the commit that holds its work;
- a decision that raises is rolled back alone, and its caller gets what it raised; the others of its group are not
  touched;
- a commit that fails stops the writer: nobody can say what the database holds, so every caller that waits and every
  later one gets `WriterStoppedError`, and the process starts again from what is on disk.

A lone caller is not held up: the writer waits for company only if the last group had some.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from shoal.swarm.faults import reach

MAX_GROUP = 64
LINGER_S = 0.005
MAX_WAITING = 4096
"""Decisions that may wait; more are refused, for they would only wait longer."""


class WriterStoppedError(Exception):
    """The ledger takes no more: it was closed, or a commit failed. Whether unanswered work was kept is not known."""


class WriterBusyError(Exception):
    """The decision was not run: too many wait already, or somebody else holds the database. Try again later."""


class Book(Protocol):
    """What the writer writes: state in memory that goes forward and back with the transaction."""

    def begin_group(self) -> None:
        """The transaction has begun."""

    def mark_state(self) -> Any:
        """The state to go back to if the next decision raises."""

    def restore_state(self, mark: Any) -> None:
        """Go back."""

    def flush_group(self) -> None:
        """Write what was put off until the end of the group."""

    def publish_group(self) -> None:
        """The transaction is on disk."""


@dataclass(slots=True)
class _Job:
    decide: Callable[[], Any]
    future: "Future[Any]"
    result: Any = None
    error: Exception | None = None


class GroupWriter:
    """The thread that runs decisions and commits them."""

    def __init__(self, connection: Connection, book: Book, *, linger_s: float = LINGER_S) -> None:
        self._connection, self._book, self._linger_s = connection, book, linger_s
        # Savepoints go past SQLAlchemy, whose own cost 40 times as much as those of the database.
        self._raw: Any = connection.connection.driver_connection
        self._failures = (SQLAlchemyError, connection.dialect.loaded_dbapi.Error)
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._stopped: str | None = None
        self._crowded = False
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    def submit(self, decide: Callable[[], Any]) -> "Future[Any]":
        """Queue a decision. Cancelling the future before its turn means that it is never run."""
        job = _Job(decide, Future())
        with self._gate:  # after the last job there is only the mark of the end, so no caller waits for ever
            if self._stopped is not None:
                raise WriterStoppedError(self._stopped)
            if self._queue.qsize() >= MAX_WAITING:
                raise WriterBusyError(f"{MAX_WAITING} decisions wait for the ledger already")
            self._queue.put(job)
        return job.future

    def stop(self, reason: str) -> None:
        """Take no more decisions; those that were submitted are done."""
        self._stop(reason)

    def close(self) -> None:
        """Finish what was submitted, and end the thread."""
        self._stop("the ledger was closed")
        self._thread.join()

    def _stop(self, reason: str) -> None:
        with self._gate:
            if self._stopped is None:
                self._stopped = reason
                self._queue.put(None)

    def _run(self) -> None:
        group: list[_Job] = []
        try:
            while group := self._collect_group():
                self._commit_group(group)
        except self._failures as error:
            # The one place where the database's failure is caught: it becomes the answer of all who wait.
            self._stop(f"the database failed ({_first_line(error)})")
        finally:
            self._stop("the writer ended by a bug; its traceback says which")
            self._fail_rest(group)

    def _collect_group(self) -> list[_Job]:
        """The next jobs; none if this is the end."""
        first = self._queue.get()
        group: list[_Job] = []
        deadline = time.monotonic() + (self._linger_s if self._crowded else 0)
        job = first
        while job is not None:
            if job.future.set_running_or_notify_cancel():
                group.append(job)
            if len(group) == MAX_GROUP:
                break
            try:
                job = self._next_job(deadline, wait=not group)
            except queue.Empty:
                break
        else:
            self._queue.put(None)  # seen again after this group
        self._crowded = len(group) > 1
        return group

    def _next_job(self, deadline: float, *, wait: bool) -> _Job | None:
        """The next in the queue; `wait` as long as it takes, for a group of nobody is no group."""
        if wait:
            return self._queue.get()
        return self._queue.get(timeout=max(0.0, deadline - time.monotonic()))

    def _commit_group(self, group: list[_Job]) -> None:
        try:
            transaction = self._connection.begin()
        except OperationalError as error:  # nothing was begun, so nothing is in doubt
            _fail_jobs(group, WriterBusyError(f"the database cannot be written now ({_first_line(error)})"))
            return
        with transaction:
            self._book.begin_group()
            for job in group:
                self._run_job(job)
            self._book.flush_group()
            reach("write", 1)
        reach("write", 2)
        self._book.publish_group()
        for job in group:
            if job.error is None:
                job.future.set_result(job.result)
            else:
                job.future.set_exception(job.error)
        group.clear()

    def _run_job(self, job: _Job) -> None:
        mark = self._book.mark_state()
        self._raw.execute("SAVEPOINT decision")
        try:
            job.result = job.decide()
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the caller, who gets it
            self._raw.execute("ROLLBACK TO SAVEPOINT decision")
            self._book.restore_state(mark)
            job.error = error
        self._raw.execute("RELEASE SAVEPOINT decision")

    def _fail_rest(self, group: list[_Job]) -> None:
        """Answer all who still wait."""
        error = WriterStoppedError(self._stopped)
        _fail_jobs(group, error)
        while True:
            try:
                job_or_end = self._queue.get_nowait()
            except queue.Empty:
                return
            if job_or_end is not None and job_or_end.future.set_running_or_notify_cancel():
                job_or_end.future.set_exception(error)


def _fail_jobs(group: list[_Job], error: Exception) -> None:
    for job in group:
        job.future.set_exception(error)
    group.clear()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
