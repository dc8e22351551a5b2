"""Waking waiters: no notification is lost between reading and waiting, and cancelled waiters are removed."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from shoal.util.aio import Notifier


def test_all_current_waiters_wake_and_later_ones_wait_for_the_next_time(run: Callable[..., Any]) -> None:
    async def work() -> None:
        signal = Notifier()
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
        signal = Notifier()
        waiting = asyncio.ensure_future(asyncio.wait_for(signal.wait(), 5))  # a task that has not started yet
        signal.notify()
        await waiting

    run(work)


def test_a_waiter_that_gave_up_is_forgotten(run: Callable[..., Any]) -> None:
    async def work() -> None:
        signal = Notifier()
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(signal.wait(), 0.001)
        await asyncio.sleep(0)
        assert not signal._waiters
        signal.notify()

    run(work)


def test_only_a_waiter_keeps_its_notifier_alive(run: Callable[..., Any]) -> None:
    async def work() -> None:
        known = weakref.WeakValueDictionary({0: Notifier()})
        assert 0 not in known
        known[1] = signal = Notifier()
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
