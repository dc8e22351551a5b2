"""Those who wait for work: served in order, none forgotten, none woken for nothing."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shoal.swarm import bells
from shoal.swarm.bells import Bell, Outcome


class Counter:
    """A store of things to have, and how often somebody looked."""

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


def judge(answer: bool) -> Outcome:
    return Outcome.SERVED if answer else Outcome.NOTHING


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())


def test_who_does_not_want_to_wait_is_answered_at_once() -> None:
    async def scenario() -> None:
        assert not await Bell(10).serve(Counter().take, judge, 0.0)

    run(scenario)


def test_one_ring_serves_all_things_there_are_in_order_of_coming() -> None:
    async def scenario() -> None:
        bell, store, order = Bell(10), Counter(), []

        async def wait(name: int) -> None:
            if await bell.serve(store.take, judge, 20.0):
                order.append(name)

        tasks = [asyncio.create_task(wait(name)) for name in range(4)]
        await settle()
        assert bell.num_waiting == 4
        store.things, store.num_looks = 2, 0
        bell.ring()
        await settle()
        assert order == [0, 1]
        assert store.num_looks == 3, "the third looked in vain, and the fourth was left asleep"
        store.things = 2
        bell.ring()
        await asyncio.gather(*tasks)
        assert order[:2] == [0, 1] and sorted(order[2:]) == [2, 3]

    run(scenario)


def test_a_ring_between_the_attempt_and_the_wait_is_not_lost() -> None:
    async def scenario() -> None:
        bell, store = Bell(10), Counter()

        async def look_and_miss() -> bool:
            found = await store.take()
            if not store.things and not found:
                store.things = 1
                bell.ring()  # nobody waits yet
            return found

        assert await bell.serve(look_and_miss, judge, 20.0)
        assert store.num_looks == 2

    run(scenario)


def test_who_may_not_have_it_lets_the_next_one_try() -> None:
    async def scenario() -> None:
        bell, store = Bell(10), Counter()

        async def barred() -> str:
            return "not you"

        first = asyncio.create_task(bell.serve(barred, lambda _: Outcome.NOT_YOU, 20.0))
        await settle()
        second = asyncio.create_task(bell.serve(store.take, judge, 20.0))
        await settle()
        store.things = 1
        bell.ring()
        assert await second
        assert not first.done()
        first.cancel()

    run(scenario)


def test_those_who_may_not_have_it_try_once_for_each_ring() -> None:
    async def scenario() -> None:
        bell, num_tries = Bell(10), 0

        async def barred() -> None:
            nonlocal num_tries
            num_tries += 1

        tasks = [asyncio.create_task(bell.serve(barred, lambda _: Outcome.NOT_YOU, 20.0)) for _ in range(3)]
        await settle()
        assert num_tries == 3
        bell.ring()
        await settle()
        assert num_tries == 6
        for task in tasks:
            task.cancel()

    run(scenario)


def test_one_who_hangs_up_in_its_turn_passes_it_on() -> None:
    async def scenario() -> None:
        bell, store = Bell(10), Counter()
        first = asyncio.create_task(bell.serve(store.take, judge, 20.0))
        await settle()
        second = asyncio.create_task(bell.serve(store.take, judge, 20.0))
        await settle()
        store.things = 1
        bell.ring()
        first.cancel()
        assert await second
        assert bell.num_waiting == 0

    run(scenario)


def test_too_many_who_wait_are_answered_at_once() -> None:
    async def scenario() -> None:
        bell, store = Bell(1), Counter()
        first = asyncio.create_task(bell.serve(store.take, judge, 20.0))
        await settle()
        assert not await bell.serve(store.take, judge, 20.0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert bell.num_waiting == 0

    run(scenario)


def test_what_happens_without_a_ring_is_found_by_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bells, "LOOK_S", 0.01)

    async def scenario() -> None:
        bell, store = Bell(10), Counter()
        waiting = asyncio.create_task(bell.serve(store.take, judge, 20.0))
        await settle()
        store.things = 1
        assert await waiting

    run(scenario)


def test_the_wait_ends_with_the_last_answer() -> None:
    async def scenario() -> None:
        store = Counter()
        assert not await Bell(10).serve(store.take, judge, 0.02)
        assert store.num_looks == 2

    run(scenario)


def test_nobody_waits_for_a_bell_that_is_closed() -> None:
    async def scenario() -> None:
        bell, store = Bell(10), Counter()
        waiting = [asyncio.create_task(bell.serve(store.take, judge, 60.0)) for _ in range(3)]
        await settle()
        bell.close()
        assert await asyncio.gather(*waiting, bell.serve(store.take, judge, 60.0)) == [False] * 4
        assert store.num_looks == 4 and not bell.num_waiting

    run(scenario)
