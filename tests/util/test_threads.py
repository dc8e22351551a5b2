"""Calls in threads: a cancelled caller continues only when its thread is done."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shoal.util.aio import map_ordered, run_blocking


def test_a_cancelled_caller_hears_of_it_when_the_thread_is_through(run: Callable[..., Any]) -> None:
    async def work() -> None:
        began, go_on, through = threading.Event(), threading.Event(), threading.Event()

        def block() -> None:
            began.set()
            assert go_on.wait(10)
            through.set()

        task = asyncio.create_task(run_blocking(None, block))
        await asyncio.to_thread(began.wait, 10)
        for _ in range(3):  # repeatedly
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert through.is_set()

    run(work)


def test_an_error_of_the_thread_reaches_the_caller_but_not_one_that_was_cancelled(run: Callable[..., Any]) -> None:
    def fail() -> None:
        time.sleep(0.02)
        raise OSError("full")

    async def work() -> None:
        with pytest.raises(OSError, match="full"):
            await run_blocking(None, fail)
        task = asyncio.create_task(run_blocking(None, fail))
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work)


def test_results_come_in_order_with_no_more_calls_ahead_than_allowed(run: Callable[..., Any]) -> None:
    async def work() -> None:
        taken: list[int] = []

        def items() -> Any:
            for number in range(20):
                taken.append(number)
                yield number

        def square(number: int) -> int:
            time.sleep(0.003 if number % 3 == 0 else 0)
            return number * number

        with ThreadPoolExecutor(4) as pool:
            found = []
            async for item, result in map_ordered(pool, square, items(), 5):
                assert len(taken) - len(found) <= 5
                found.append((item, result))
        assert found == [(number, number * number) for number in range(20)]

    run(work)


def test_when_the_reader_stops_no_call_is_left_running(run: Callable[..., Any]) -> None:
    async def work() -> None:
        running = set()

        def sleep(number: int) -> None:
            running.add(number)
            time.sleep(0.01)
            running.discard(number)

        with ThreadPoolExecutor(2) as pool:
            async with contextlib.aclosing(map_ordered(pool, sleep, range(100), 6)) as results:
                async for _ in results:
                    break
            assert not running

    run(work)


def test_an_error_of_one_call_ends_the_rest(run: Callable[..., Any]) -> None:
    async def work() -> None:
        asked = []

        def fail_third(number: int) -> None:
            asked.append(number)
            if number == 3:
                raise ValueError("three")

        with ThreadPoolExecutor(2) as pool, pytest.raises(ValueError, match="three"):
            async for _ in map_ordered(pool, fail_third, range(100), 4):
                pass
        assert max(asked) < 10

    run(work)
