"""Work for a round that inner steps need not wait for: encoding an update, making the next outer weights.

Of a large model both take seconds of a core. Where an accelerator does the inner steps, a thread does this beside them.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Aside:
    """One thread of its own, or none: then the work is done at once."""

    def __init__(self, *, is_threaded: bool) -> None:
        self._pool = ThreadPoolExecutor(1, "diloco-aside") if is_threaded else None

    def start(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """The result, or what was raised, in a future; the arguments must not be written to meanwhile."""
        if self._pool is not None:
            return self._pool.submit(work, *args, **kwargs)
        done: Future[T] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 (passed on as it is)
            done.set_exception(error)  # raised where the result is asked for
        return done

    def close(self) -> None:
        """Begin nothing further."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
