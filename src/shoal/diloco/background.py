"""Threads for work on long vectors: one that runs concurrently with the inner steps, and several for one vector.

For a large model, encoding an update and computing the next outer weights take seconds of a core. If an accelerator
does the inner steps, `BackgroundThread` does this concurrently. `run_pieces` cuts a vector into pieces that fit a
core's cache. Use it only for work that is elementwise, or within blocks whose size divides `PIECE`, so that the result
does not depend on which thread takes which piece.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class BackgroundThread:
    """A single worker thread, or none: then the work is done immediately."""

    def __init__(self, *, is_threaded: bool) -> None:
        self._pool = ThreadPoolExecutor(1, "diloco-aside") if is_threaded else None

    def start(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Return a future of the result or exception; the arguments must not be modified meanwhile."""
        if self._pool is not None:
            return self._pool.submit(work, *args, **kwargs)
        done: Future[T] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 (passed on as it is)
            done.set_exception(error)  # raised when the caller asks for the result
        return done

    def close(self) -> None:
        """Accept no further work."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


PIECE = 1 << 16
"""Elements; a multiple of the codecs' blocks. Changing breaks: the last bits of norms, and so of clipped means."""
MANY = 16
"""number of pieces from which threads are worth starting"""
MAX_THREADS = 16


def run_pieces(count: int, work: Callable[[slice], None]) -> None:
    """Call work(piece) for slices that cover `count` elements; raises the first piece's exception."""
    pieces = [slice(start, min(count, start + PIECE)) for start in range(0, count, PIECE)]
    num_threads = min(os.cpu_count() or 1, MAX_THREADS)
    if len(pieces) < MANY or num_threads == 1:
        for piece in pieces:
            work(piece)
        return
    with ThreadPoolExecutor(num_threads, "diloco-pieces") as pool:
        for _ in pool.map(work, pieces):
            pass
