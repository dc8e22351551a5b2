"""Late shards, with deadlines so long that only a hedge can complete them within a test."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shoal.shardcast.client import ShardcastClient
from shoal.shardcast.fetch import scheduler as scheduler_module

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


class Greedy(random.Random):
    """Draws the largest weight: the number of draws depends on the machine, so a seed is not deterministic."""

    def choices(self, population: Any, weights: Any = None, **_: Any) -> list[Any]:
        return [max(zip(weights, population, strict=True), key=lambda pair: pair[0])[1]]


def prefer_first(client: ShardcastClient) -> None:
    client.puller.upstreams.rng = Greedy(0)
    table = client.puller.upstreams
    table.record_success(table.all[0], 10**15, 1.0)
    for other in table.all[1:]:  # one without a measurement counts as the mean
        table.record_success(other, 1 << 16, 1.0)


async def until(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0.005)


def test_the_last_shard_stuck_at_one_source_is_asked_of_another(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A source with a late transfer is avoided: on a busy machine no other shard may count as late.
    monkeypatch.setattr(scheduler_module, "LATE_S", 3.0)

    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(12 * SHARD, 1)}
            await net.publish(1, files)
            stuck, good = await net.proxy(stall_on(11)), await net.proxy()
            client = await net.client(stuck.url, good.url, deadlines=net.patient, in_flight=1)
            prefer_first(client)
            assert read_files(await client.pull()) == files
            assert stuck.list_shards().count(11) == 1 and good.list_shards().count(11) == 1
            # No deadline was involved: there was no failure.
            assert [source.failures for source in client.progress.upstreams] == [0, 0]
            assert list((net.root / "out" / ".shardcast").rglob("*spare*")) == []

    run(work)


def test_a_source_that_stalls_on_everything_does_not_occupy_all_slots(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(40 * SHARD, 1)}
            await net.publish(1, files)
            stuck, good = await net.proxy(stall_on(*range(40))), await net.proxy()
            client = await net.client(stuck.url, good.url, deadlines=net.patient, in_flight=2)
            prefer_first(client)
            assert read_files(await client.pull()) == files
            assert 0 < len(stuck.list_shards()) < 10
            assert client.progress.upstreams[0].shards == 0

    run(work)


def test_with_one_source_nothing_is_asked_for_twice(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(6 * SHARD, 1)})

            async def respond_slowly(target: str, writer: asyncio.StreamWriter) -> bool:
                if target.endswith("/full/5"):
                    await asyncio.sleep(1.2)
                return False

            proxy = await net.proxy(respond_slowly)
            client = await net.client(proxy.url, deadlines=net.patient)
            await client.pull()
            assert sorted(proxy.list_shards()) == list(range(6))

    run(work)


def test_shards_are_asked_for_in_order_and_no_more_than_allowed_at_once(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(30 * SHARD, 1)})
            running, most = 0, 0

            async def count(target: str, writer: asyncio.StreamWriter) -> bool:
                nonlocal running, most
                if "/full/" in target:
                    running += 1
                    most = max(most, running)
                    await asyncio.sleep(0.005)
                    running -= 1
                return False

            proxy = await net.proxy(count)
            client = await net.client(proxy.url, in_flight=3)
            await client.pull()
            assert most == 3
            order = proxy.list_shards()
            assert all(abs(index - place) <= 3 for place, index in enumerate(order))

    run(work)


def test_a_cancelled_pull_leaves_no_transfer_behind(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(6 * SHARD, 1)})
            proxy = await net.proxy(stall_on(*range(6)))
            client = await net.client(proxy.url, deadlines=net.patient)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: len(proxy.list_shards()) == 4)
            pulled.cancel()
            await asyncio.gather(pulled, return_exceptions=True)
            scheduler = client.puller.scheduler
            await until(lambda: not scheduler._jobs and not scheduler._tasks)
            assert scheduler._orders == []

    run(work)


class GatedRequests:
    """A script that records the requested shards, and holds those of some versions until the gate opens."""

    def __init__(self, *versions: int) -> None:
        self.gate = asyncio.Event()
        self.asked: list[tuple[int, int]] = []
        self._versions = versions

    async def __call__(self, target: str, writer: asyncio.StreamWriter) -> bool:
        if "/full/" in target:
            version, index = int(target.split("/")[2]), int(target.rpartition("/")[2])
            self.asked.append((version, index))
            if version in self._versions:
                await self.gate.wait()
        return False


async def adopt_all(net: Any, client: ShardcastClient, *versions: int) -> list[Any]:
    """The versions as known to a client that holds nothing of them yet."""
    await until(lambda: all(client.store.find(version) is not None for version in versions))
    entries = [client.store.find(version) for version in versions]
    await until(lambda: all(entry.log.ended for entry in entries))
    return entries


def test_a_shard_that_nobody_waits_for_any_more_is_not_fetched(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(40 * SHARD, 1)})
            hold = GatedRequests(1)
            proxy = await net.proxy(hold)
            client = await net.client(proxy.url, deadlines=net.patient, in_flight=2)
            (entry,) = await adopt_all(net, client, 1)
            scheduler = client.puller.scheduler
            with contextlib.ExitStack() as callers:
                for index in range(30):
                    callers.enter_context(scheduler.hold_urgent(entry.full, index, "peer"))
                await until(lambda: len(hold.asked) == 2)
            await until(lambda: not scheduler._jobs)
            with scheduler.hold_urgent(entry.full, 33, "peer"):
                await until(lambda: len(hold.asked) == 3)
                hold.gate.set()
                await until(lambda: entry.full.has(33))
            assert hold.asked == [(1, 0), (1, 1), (1, 33)]
            assert entry.full.num_missing == 39

    run(work)


def test_a_shard_stays_urgent_until_its_last_caller_leaves(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(4 * SHARD, 1)})
            hold = GatedRequests(1)
            proxy = await net.proxy(hold)
            client = await net.client(proxy.url, deadlines=net.patient)
            (entry,) = await adopt_all(net, client, 1)
            scheduler = client.puller.scheduler
            with scheduler.hold_urgent(entry.full, 2, "one"):
                with scheduler.hold_urgent(entry.full, 2, "other"):
                    await until(lambda: hold.asked == [(1, 2)])
                await asyncio.sleep(0.05)
                assert list(scheduler._jobs) == [(entry.full, 2)]
                hold.gate.set()
                await until(lambda: entry.full.has(2))
            assert hold.asked == [(1, 2)]

    run(work)


def test_a_client_that_returns_for_a_shard_that_was_just_cancelled_gets_it(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(4 * SHARD, 1)})
            hold = GatedRequests(1)
            proxy = await net.proxy(hold)
            client = await net.client(proxy.url, deadlines=net.patient)
            (entry,) = await adopt_all(net, client, 1)
            scheduler = client.puller.scheduler
            with scheduler.hold_urgent(entry.full, 2, "peer"):
                await until(lambda: hold.asked == [(1, 2)])
            with scheduler.hold_urgent(entry.full, 2, "peer"):  # before the first attempt has ended
                hold.gate.set()
                await until(lambda: entry.full.has(2))

    run(work)


def test_urgent_shards_of_old_versions_do_not_take_slots_of_orders(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            for version in (1, 2):
                await net.publish(version, {"weights": make_bytes(20 * SHARD, version)}, delta=False)
            hold = GatedRequests(1)
            proxy = await net.proxy(hold)
            client = await net.client(proxy.url, deadlines=net.patient, in_flight=2)
            old, _ = await adopt_all(net, client, 1, 2)
            with contextlib.ExitStack() as callers:
                for index in range(20):
                    callers.enter_context(client.puller.scheduler.hold_urgent(old.full, index, f"peer {index}"))
                await until(lambda: len(hold.asked) == 2)
                assert (await client.pull()).name == "v2"
            assert sum(version == 1 for version, _ in hold.asked) <= 4

    run(work)


def test_of_urgent_shards_those_of_the_newest_version_come_first(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            for version in (1, 2):
                await net.publish(version, {"weights": make_bytes(9 * SHARD, version)}, delta=False)
            hold = GatedRequests(1, 2)
            proxy = await net.proxy(hold)
            client = await net.client(proxy.url, deadlines=net.patient, in_flight=1)
            old, new = await adopt_all(net, client, 1, 2)
            scheduler = client.puller.scheduler
            with contextlib.ExitStack() as callers:
                for entry, index in ((old, 0), (old, 1), (new, 5), (new, 4)):
                    callers.enter_context(scheduler.hold_urgent(entry.full, index, "peer"))
                hold.gate.set()
                await until(lambda: old.full.has(1))
            assert hold.asked == [(2, 5), (2, 4), (1, 0), (1, 1)]

    run(work)


def test_a_spare_order_begins_no_shard_while_another_order_is_there(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            for version in (1, 2):
                await net.publish(version, {"weights": make_bytes(9 * SHARD, version)}, delta=False)
            hold = GatedRequests(1, 2)
            proxy = await net.proxy(hold)
            client = await net.client(proxy.url, deadlines=net.patient, in_flight=4)
            old, new = await adopt_all(net, client, 1, 2)
            scheduler = client.puller.scheduler
            spare, pressing = scheduler.order(new.full, spare=True), scheduler.order(old.full)
            hold.gate.set()
            await asyncio.gather(spare.done, pressing.done)
            assert [version for version, _ in hold.asked] == [1] * 9 + [2] * 9

    run(work)
