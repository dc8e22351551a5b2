"""Late shards, with deadlines so long that only a hedge can save the day within a test."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from shoal.shardcast.client import Client
from shoal.shardcast.pump import MAX_URGENT, Pump

SHARD = 1 << 16


def stall_on(*indices: int) -> Callable[[str, asyncio.StreamWriter], Awaitable[bool]]:
    """A script that sends one byte of some shards and then nothing."""

    async def act(target: str, writer: asyncio.StreamWriter) -> bool:
        if "/full/" not in target or int(target.rpartition("/")[2]) not in indices:
            return False
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\nx" % SHARD)
        await writer.drain()
        await asyncio.sleep(3600)
        return True

    return act


def prefer_first(client: Client) -> None:
    book = client.puller.crew.book
    book.record_success(book.sources[0], 10**15, 1.0)
    for other in book.sources[1:]:  # one that was not measured yet counts as much as the mean
        book.record_success(other, 1 << 16, 1.0)


async def until(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0.005)


def test_the_last_shard_stuck_at_one_source_is_asked_of_another(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(12 * SHARD, 1)}
            await home.publish(1, files)
            stuck, good = await home.front(stall_on(11)), await home.front()
            # One at a time: a source with a late transfer is avoided, and on a slow machine any may be late.
            client = await home.client(stuck.url, good.url, deadlines=home.patient, in_flight=1)
            prefer_first(client)
            assert read_files(await client.pull()) == files
            assert stuck.list_shards().count(11) == 1 and good.list_shards().count(11) == 1
            # It was not a deadline that helped: nobody has failed.
            assert [source.failures for source in client.progress.sources] == [0, 0]
            assert list((home.root / "out" / ".shardcast").rglob("*spare*")) == []

    run(work)


def test_a_source_that_stalls_on_everything_does_not_hold_all_places(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(40 * SHARD, 1)}
            await home.publish(1, files)
            stuck, good = await home.front(stall_on(*range(40))), await home.front()
            client = await home.client(stuck.url, good.url, deadlines=home.patient, in_flight=2)
            prefer_first(client)
            assert read_files(await client.pull()) == files
            assert 0 < len(stuck.list_shards()) < 10
            assert client.progress.sources[0].shards == 0

    run(work)


def test_with_one_source_nothing_is_asked_for_twice(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(6 * SHARD, 1)})

            async def dawdle(target: str, writer: asyncio.StreamWriter) -> bool:
                if target.endswith("/full/5"):
                    await asyncio.sleep(1.2)
                return False

            front = await home.front(dawdle)
            client = await home.client(front.url, deadlines=home.patient)
            await client.pull()
            assert sorted(front.list_shards()) == list(range(6))

    run(work)


def test_shards_are_asked_for_in_order_and_no_more_than_allowed_at_once(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(30 * SHARD, 1)})
            running, most = 0, 0

            async def count(target: str, writer: asyncio.StreamWriter) -> bool:
                nonlocal running, most
                if "/full/" in target:
                    running += 1
                    most = max(most, running)
                    await asyncio.sleep(0.005)
                    running -= 1
                return False

            front = await home.front(count)
            client = await home.client(front.url, in_flight=3)
            await client.pull()
            assert most == 3
            order = front.list_shards()
            assert all(abs(index - place) <= 3 for place, index in enumerate(order))

    run(work)


def test_a_cancelled_pull_leaves_no_transfer_behind(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(6 * SHARD, 1)})
            front = await home.front(stall_on(*range(6)))
            client = await home.client(front.url, deadlines=home.patient)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: len(front.list_shards()) == 4)
            pulled.cancel()
            await asyncio.gather(pulled, return_exceptions=True)
            pump = client.puller.pump
            await until(lambda: not pump._jobs and not pump._tasks)
            assert pump._orders == []

    run(work)


def test_urgent_shards_are_bounded(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            entry = await home.publish(1, {"weights": make_bytes(2 * SHARD, 1)})
            client = await home.client(home.url)
            pump = Pump(client.puller.crew)
            assert all(pump.urge(entry, "full", index) for index in range(MAX_URGENT))
            assert pump.urge(entry, "full", 3)
            assert not pump.urge(entry, "full", MAX_URGENT)

    run(work)
