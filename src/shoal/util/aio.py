"""Asyncio helpers for a role: calls in threads, tasks that end together, notifications, back-off and signals.

    run_blocking, map_ordered   calls in threads; a cancelled caller resumes only when the thread is done
    run_together                tasks that end together, none left behind
    run_until_set               work that ends with an event
    Notifier, wait_any          wake everyone that waits for the next change
    Backoff                     pauses between attempts
    catch_signals, run_until_cancelled   stopping a process

Invariants:
- the buffers and files that a thread uses are free again when its caller continues, cancelled or not;
- calls that wait for other machines have their own threads (`RECEIVERS`): hashing and writing never queue behind
  them;
- stopping immediately is safe: everything a role writes is complete or absent, and it resumes where it was.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")

MAX_RECEIVERS = 1024
"""Far more than are ever in flight: a transfer that had to wait for a thread would look slow to its server."""
RECEIVERS: Executor = ThreadPoolExecutor(MAX_RECEIVERS, thread_name_prefix="shoal-receive")
"""Threads for transfers, one per shard in flight; created on demand and kept."""
EXIT_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def run_blocking(
    pool: Executor | None, call: Callable[..., T], *args: object, halt: threading.Event | None = None
) -> T:
    """Run a call in a thread of the pool (None: the event loop's own) and return its result.

    `halt` is set when the caller is cancelled, for a long call that checks it.
    """
    job = asyncio.get_running_loop().run_in_executor(pool, call, *args)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        if halt is not None:
            halt.set()
        await outlast(job)
        raise


async def map_ordered(
    pool: Executor, call: Callable[[S], T], items: Iterable[S], num_ahead: int
) -> AsyncGenerator[tuple[S, T], None]:
    """Yield items with their results, in order, while up to `num_ahead` calls run. Close it with `aclosing`."""
    loop = asyncio.get_running_loop()
    jobs: deque[tuple[S, asyncio.Future[T]]] = deque()
    rest = iter(items)
    try:
        while True:
            for item in rest:
                jobs.append((item, loop.run_in_executor(pool, call, item)))
                if len(jobs) >= num_ahead:
                    break
            if not jobs:
                return
            item, job = jobs[0]
            result = await asyncio.shield(job)
            jobs.popleft()
            yield item, result
    finally:
        for _, job in jobs:
            await outlast(job)


async def outlast(job: "asyncio.Future[T]") -> None:
    """Wait until a job is done, ignoring cancellation; the caller is about to raise."""
    while not job.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([job])
    if not job.cancelled():
        job.exception()  # retrieved, so that the loop does not report it; the caller raises CancelledError


async def run_together(main: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, None]) -> T:
    """Return the result of `main`. The others run concurrently and are cancelled at its end; if one fails, this fails.

    Returns or raises only after every task has ended.
    """
    task = asyncio.create_task(main)
    concurrent = {asyncio.create_task(other) for other in others}
    try:
        waiting = {task, *concurrent}
        while not task.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for other in done & concurrent:
                other.result()  # re-raises its exception
        return task.result()
    finally:
        for other in (task, *concurrent):
            other.cancel()
        await asyncio.gather(task, *concurrent, return_exceptions=True)


async def run_until_set(event: asyncio.Event, work: Coroutine[Any, Any, None], grace_s: float = 0.0) -> bool:
    """Run `work` to its end. Once the event is set, cancel it after `grace_s` and return False."""
    task, stop = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((task,), timeout=grace_s)
        if task.done():
            task.result()  # re-raises its exception
        return task.done()
    finally:
        for other in (task, stop):
            other.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


class Notifier:
    """Wakes everyone that waits for the next change. Belongs to one event loop; threads must not call `notify`.

    A waiter is registered when `wait` is called, not when it is first awaited, so nothing is lost between reading the
    state and waiting for it to change:

        while not entry.complete:
            await notifier.wait()
    """

    __slots__ = ("__weakref__", "_waiters")

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake all current waiters."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def wait(self) -> "asyncio.Future[None]":
        """Return a future that is done at the next `notify`. Cancelling it removes the waiter."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        # A bound method of this object: a waiter keeps the notifier alive even if others hold it weakly.
        waiter.add_done_callback(self._forget)
        return waiter

    def _forget(self, waiter: "asyncio.Future[None]") -> None:
        self._waiters.discard(waiter)


async def wait_any(notifiers: Iterable[Notifier], timeout_s: float, *others: "asyncio.Future[Any]") -> None:
    """Return when one of these notifies, when one of the other futures is done, or at the timeout."""
    waiters = [notifier.wait() for notifier in notifiers]
    try:
        await asyncio.wait({*waiters, *others}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between attempts: `first_s`, doubled each time up to `longest_s`, randomly shortened by up to half.

    The random part prevents many callers of one server from returning at the same moment.
    """

    first_s: float
    longest_s: float
    draw: Callable[[], float] = random.random
    """from 0 (half of the pause) to 1 (all of it)"""

    @classmethod
    def steady(cls, first_s: float, longest_s: float) -> "Backoff":
        """Without the random part, where callers do not compete."""
        return cls(first_s, longest_s, lambda: 1.0)

    def pause_s(self, attempt: int, least_s: float = 0.0) -> float:
        """The pause after an attempt, counted from 0; at least `least_s`, if the server asked for that."""
        pause_s = min(self.longest_s, max(least_s, self.first_s * 2.0 ** min(attempt, 32)))
        return pause_s * ((1.0 if least_s else 0.5) + self.draw() / 2)


@contextmanager
def catch_signals(
    stopping: asyncio.Event,
    *,
    exit_now: Callable[[], None] = lambda: os._exit(EXIT_INTERRUPTED),
    text: str = "stopping; press Ctrl-C again to stop immediately",
) -> Iterator[None]:
    """In this context, the first SIGINT or SIGTERM sets `stopping`, the second calls `exit_now`. Main thread only."""

    def take_signal() -> None:
        if stopping.is_set():
            exit_now()
            return
        logger.info(text)
        stopping.set()

    with _handle_signals(take_signal):
        yield


def run_until_cancelled(work: Coroutine[None, None, T]) -> T:
    """Run `work` in a new event loop and return its result; SIGINT and SIGTERM cancel it and raise `CancelledError`."""

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None
        with _handle_signals(task.cancel):
            return await work

    return asyncio.run(run())


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """SIGTERM raises `KeyboardInterrupt` in the block, like Ctrl-C: for blocking code in the main thread."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _handle_signals(handler: Callable[[], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
