"""Blocks in parallel: a few threads, reused buffers, results in order.

Invariants:
- results are handed over in the order of the jobs, whatever the threads do, so output does not depend on their number;
- when `run_jobs` returns or raises, no job is running: files may be closed;
- memory is bounded by the number of threads. Buffers are made once, for the first touch of fresh memory is dear.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.shardcast.codec import BLOCK_BYTES, BLOCK_ELEMENTS
from shoal.shardcast.delta_stream import Bytes
from shoal.shardcast.errors import DeltaError

MAX_THREADS = 4
"""Threads by default at most: together they keep up with any disk, and stay below 150 MB in the worst case."""
_AHEAD = 2
"""Jobs beyond one for each thread that may wait to be run or to be handed over."""

Job = TypeVar("Job")
Result = TypeVar("Result")


class Scratch:
    """Buffers for one block."""

    def __init__(self) -> None:
        self.base: Bytes = np.zeros(BLOCK_BYTES, dtype=np.uint8)
        self.block: Bytes = np.zeros(BLOCK_BYTES, dtype=np.uint8)
        self.changed: NDArray[np.bool_] = np.zeros(BLOCK_ELEMENTS, dtype=np.bool_)


class Workers:
    """Threads that run jobs on blocks, each with a scratch of its own."""

    def __init__(self, threads: int | None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self._threads = threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._idle = [Scratch() for _ in range(self._threads)]
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="shoal-delta")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown()

    def run_jobs(
        self, work: Callable[[Scratch, Job], Result], jobs: Iterable[Job], emit: Callable[[Result], object]
    ) -> None:
        """Run a job after the other, several at a time, and hand over their results in order."""
        pending: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                pending.append(self._pool.submit(self._run_job, work, job))
                if len(pending) == self._threads + _AHEAD:
                    emit(pending.popleft().result())
            while pending:
                emit(pending.popleft().result())
        finally:
            for future in pending:
                future.cancel()
            wait(pending)

    def _run_job(self, work: Callable[[Scratch, Job], Result], job: Job) -> Result:
        scratch = self._idle.pop()  # there are as many as threads
        try:
            return work(scratch, job)
        finally:
            self._idle.append(scratch)


def read_range(descriptor: int, offset: int, size: int, buffer: Bytes) -> Bytes:
    """Fill the front of a buffer from a file, and return that much of it, zero-padded to a multiple of 8 bytes."""
    done = 0
    while done < size:
        count = os.preadv(descriptor, [buffer.data[done:size]], offset + done)
        if count == 0:
            raise DeltaError("a file of the checkpoint became shorter while it was read")
        done += count
    padded = buffer[: pad_size(size)]
    padded[size:] = 0
    return padded


def write_range(descriptor: int, offset: int, data: Bytes) -> None:
    """Write all of a buffer to its place in a file."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data.data[done:], offset + done)


def pad_size(size: int) -> int:
    """The next multiple of 8."""
    return -(-size // 8) * 8
