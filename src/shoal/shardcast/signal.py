"""Wakes everyone who waits for the next change of something.

A waiter is registered when `wait` is called, not when it is first awaited, so between looking at the state and waiting
for it to change nothing is lost, with a deadline around it or without:

    while not entry.complete:
        await signal.wait()

Belongs to one event loop. Threads do not notify: their caller does, back on the loop.
"""

import asyncio


class Signal:
    """An event that is over as soon as it happened."""

    __slots__ = ("__weakref__", "_waiters")

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake all current waiters."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def wait(self) -> "asyncio.Future[None]":
        """To be awaited: done at the next `notify`. Cancelling it takes the waiter off the list."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        # A bound method of this object: whoever waits keeps the signal alive, though it is held weakly elsewhere.
        waiter.add_done_callback(self._forget)
        return waiter

    def _forget(self, waiter: "asyncio.Future[None]") -> None:
        self._waiters.discard(waiter)
