"""How a role is stopped: the first Ctrl-C or SIGTERM asks it to end in order, the second ends it at once.

At once is safe: whatever a role writes is whole or not there, and it resumes where it was.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def catch_signals(
    stopping: asyncio.Event,
    note: Callable[[str], None],
    *,
    exit_now: Callable[[int], None] = os._exit,
) -> Iterator[None]:
    """While inside, the first signal sets `stopping`, and the second ends the process. For the main thread's loop."""
    loop = asyncio.get_running_loop()

    def take_signal() -> None:
        if stopping.is_set():
            exit_now(EXIT_INTERRUPTED)
            return
        note("stopping; once more to stop at once")
        stopping.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, take_signal)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
