"""The wait queue: callers are served in order, none is forgotten, none is woken for nothing."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shoal.coordinator.api import long_poll
from shoal.coordinator.api.long_poll import PollResult, WaitQueue


class Counter:
    """A stock of items, which counts how often it was checked."""

    def __init__(self, things: int = 0) -> None:
        self.things = things
        self.num_looks = 0

    async def take(self) -> bool:
        self.num_looks += 1
        await asyncio.sleep(0)
        if self.things:
            self.things -= 1
            return True
        return False


def judge(answer: bool) -> PollResult:
    return PollResult.SERVED if answer else PollResult.NOTHING


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())


def test_a_caller_that_does_not_wait_is_answered_at_once() -> None:
    async def scenario() -> None:
        assert not await WaitQueue(10).poll(Counter().take, judge, 0.0)

    run(scenario)


def test_one_event_serves_all_things_there_are_in_order_of_coming() -> None:
    async def scenario() -> None:
        queue, store, order = WaitQueue(10), Counter(), []

        async def wait(name: int) -> None:
            if await queue.poll(store.take, judge, 20.0):
                order.append(name)

        tasks = [asyncio.create_task(wait(name)) for name in range(4)]
        await settle()
        assert queue.num_waiting == 4
        store.things, store.num_looks = 2, 0
        queue.notify()
        await settle()
        assert order == [0, 1]
        assert store.num_looks == 3, "the third found nothing, and the fourth was not woken"
        store.things = 2
        queue.notify()
        await asyncio.gather(*tasks)
        assert order[:2] == [0, 1] and sorted(order[2:]) == [2, 3]

    run(scenario)


def test_an_event_between_the_attempt_and_the_wait_is_not_lost() -> None:
    async def scenario() -> None:
        queue, store = WaitQueue(10), Counter()

        async def look_and_miss() -> bool:
            found = await store.take()
            if not store.things and not found:
                store.things = 1
                queue.notify()  # nobody waits yet
            return found

        assert await queue.poll(look_and_miss, judge, 20.0)
        assert store.num_looks == 2

    run(scenario)


def test_an_ineligible_waiter_lets_the_next_one_try() -> None:
    async def scenario() -> None:
        queue, store = WaitQueue(10), Counter()

        async def barred() -> str:
            return "not you"

        first = asyncio.create_task(queue.poll(barred, lambda _: PollResult.NOT_YOU, 20.0))
        await settle()
        second = asyncio.create_task(queue.poll(store.take, judge, 20.0))
        await settle()
        store.things = 1
        queue.notify()
        assert await second
        assert not first.done()
        first.cancel()

    run(scenario)


def test_ineligible_waiters_try_once_for_each_event() -> None:
    async def scenario() -> None:
        queue, num_tries = WaitQueue(10), 0

        async def barred() -> None:
            nonlocal num_tries
            num_tries += 1

        tasks = [asyncio.create_task(queue.poll(barred, lambda _: PollResult.NOT_YOU, 20.0)) for _ in range(3)]
        await settle()
        assert num_tries == 3
        queue.notify()
        await settle()
        assert num_tries == 6
        for task in tasks:
            task.cancel()

    run(scenario)


def test_a_waiter_that_disconnects_in_its_turn_passes_it_on() -> None:
    async def scenario() -> None:
        queue, store = WaitQueue(10), Counter()
        first = asyncio.create_task(queue.poll(store.take, judge, 20.0))
        await settle()
        second = asyncio.create_task(queue.poll(store.take, judge, 20.0))
        await settle()
        store.things = 1
        queue.notify()
        first.cancel()
        assert await second
        assert queue.num_waiting == 0

    run(scenario)


def test_waiters_beyond_the_limit_are_answered_at_once() -> None:
    async def scenario() -> None:
        queue, store = WaitQueue(1), Counter()
        first = asyncio.create_task(queue.poll(store.take, judge, 20.0))
        await settle()
        assert not await queue.poll(store.take, judge, 20.0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert queue.num_waiting == 0

    run(scenario)


def test_what_happens_without_an_event_is_found_by_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_poll, "RETRY_S", 0.01)

    async def scenario() -> None:
        queue, store = WaitQueue(10), Counter()
        waiting = asyncio.create_task(queue.poll(store.take, judge, 20.0))
        await settle()
        store.things = 1
        assert await waiting

    run(scenario)


def test_the_wait_ends_with_the_last_answer() -> None:
    async def scenario() -> None:
        store = Counter()
        assert not await WaitQueue(10).poll(store.take, judge, 0.02)
        assert store.num_looks == 2

    run(scenario)


def test_nobody_waits_for_a_queue_that_is_closed() -> None:
    async def scenario() -> None:
        queue, store = WaitQueue(10), Counter()
        waiting = [asyncio.create_task(queue.poll(store.take, judge, 60.0)) for _ in range(3)]
        await settle()
        queue.close()
        assert await asyncio.gather(*waiting, queue.poll(store.take, judge, 60.0)) == [False] * 4
        assert store.num_looks == 4 and not queue.num_waiting

    run(scenario)
