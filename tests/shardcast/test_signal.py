"""Waking waiters: nothing is lost between looking and waiting, and nothing is kept of those who gave up."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from shoal.shardcast.signal import Signal


def test_all_current_waiters_wake_and_later_ones_wait_for_the_next_time(run: Callable[..., Any]) -> None:
    async def work() -> None:
        signal = Signal()
        waiters = [signal.wait() for _ in range(3)]
        signal.notify()
        await asyncio.gather(*waiters)
        late = signal.wait()
        await asyncio.sleep(0)
        assert not late.done()
        signal.notify()
        await late

    run(work)


def test_a_notice_between_the_call_and_the_await_is_not_lost(run: Callable[..., Any]) -> None:
    async def work() -> None:
        signal = Signal()
        waiting = asyncio.ensure_future(asyncio.wait_for(signal.wait(), 5))  # a task that has not begun yet
        signal.notify()
        await waiting

    run(work)


def test_a_waiter_that_gave_up_is_forgotten(run: Callable[..., Any]) -> None:
    async def work() -> None:
        signal = Signal()
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(signal.wait(), 0.001)
        await asyncio.sleep(0)
        assert not signal._waiters
        signal.notify()

    run(work)


def test_a_waiter_keeps_its_signal_alive_and_nobody_else_does(run: Callable[..., Any]) -> None:
    async def work() -> None:
        known = weakref.WeakValueDictionary({0: Signal()})
        assert 0 not in known
        known[1] = signal = Signal()
        waiter = signal.wait()
        del signal
        gc.collect()
        known[1].notify()
        await waiter
        del waiter
        await asyncio.sleep(0)
        gc.collect()
        assert 1 not in known

    run(work)
