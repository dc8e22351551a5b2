"""Blocking work beside the event loop.

Whoever is cancelled while a thread works for it hears of it only when the thread is through: the buffers and files that
the thread uses are free again when the caller goes on, whatever happened.

Calls that wait for other machines have threads of their own, so that what hashes or writes never queues behind them.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

MAX_RECEIVERS = 1024
"""Far above what is ever in flight: a transfer that queued for a thread would look slow to its server."""
RECEIVERS: Executor = ThreadPoolExecutor(MAX_RECEIVERS, thread_name_prefix="shoal-receive")
"""Threads for transfers, one for each shard in flight; there are as many as were ever in flight at once."""


async def run_blocking(
    pool: Executor | None, call: Callable[..., T], *args: object, halt: threading.Event | None = None
) -> T:
    """The result of a call in a thread of the pool (None: the event loop's own).

    `halt` is set when the caller is cancelled, for a long call that looks at it.
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
    """Items with their results, in order, while up to `num_ahead` calls run. Close it with `aclosing`."""
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
    """Wait until a job is through, deaf to cancellation; its caller is about to raise."""
    while not job.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([job])
    if not job.cancelled():
        job.exception()  # looked at, so that the loop does not report it: the cancellation is what the caller hears
