import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.shardcast.fetch import plan, upstream_stats
from shoal.shardcast.fetch.connection import FetchDeadlines
from shoal.shardcast.fetch.upstreams import GoneError

SHARD = 1 << 16


def change(data: bytes, *claims: int) -> bytes:
    changed = bytearray(data)
    for place in claims:
        changed[place] ^= 1
    return bytes(changed)


async def until(check: Callable[[], bool]) -> None:
    """The tests' own deadline bounds this."""
    while not check():
        await asyncio.sleep(0.005)


def hold_shards(after: int, gate: asyncio.Event) -> Callable[[str, asyncio.StreamWriter], Awaitable[bool]]:
    """A script that forwards some requests for shards and holds the others until the gate opens."""
    passed = 0

    async def act(target: str, writer: asyncio.StreamWriter) -> bool:
        nonlocal passed
        if "/full/" in target:
            passed += 1
            if passed > after:
                await gate.wait()
        return False

    return act


def test_all_files_arrive_small_large_and_empty(open_network: Any, run: Any, make_bytes: Any, read_files: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            files = {"a": make_bytes(5 * SHARD, 1), "b": b"", "c": b"x", "d": make_bytes(SHARD + 1, 2)}
            await net.publish(1, files)
            client = await net.client(net.url)
            assert read_files(await client.pull()) == files

    run(work)


def test_a_version_is_fetched_while_it_is_being_published(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(300 * SHARD, 1)}
            client = await net.client(net.url)
            pulled = asyncio.create_task(client.pull())
            await asyncio.sleep(0.05)
            assert client.progress.waiting_for == "a version to be published"
            await net.publish(1, files)
            assert read_files(await pulled) == files

    run(work)


def test_shards_are_fetched_before_the_manifest_has_ended_but_not_far_ahead_of_their_hashes(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(40 * SHARD, 1)}
            entry = await net.publish(1, files)
            gates = [asyncio.Event(), asyncio.Event()]

            async def hold_lines(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/manifest" not in target:
                    return False
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                for number in range(int(target.rpartition("=")[2]), len(entry.log.lines)):
                    await gates[min(number, 2) - 1].wait()
                    line = entry.log.lines[number] + b"\n"
                    writer.write(b"%x\r\n%s\r\n" % (len(line), line))
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
                await writer.drain()
                return True

            proxy = await net.proxy(hold_lines)
            client = await net.client(proxy.url, in_flight=3)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: client.progress.bytes_done == 6 * SHARD)
            await asyncio.sleep(0.3)
            assert sorted(proxy.list_shards()) == list(range(6))
            assert client.store.find(1).full.num_missing == 40
            gates[0].set()
            await until(lambda: client.store.find(1).full.complete)
            assert not pulled.done() and not (net.root / "out" / "v1").exists()
            gates[1].set()
            assert read_files(await pulled) == files
            assert sorted(proxy.list_shards()) == list(range(40))

    run(work)


def test_the_next_version_comes_as_a_delta_and_is_the_same_to_the_bit(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            proxy = await net.proxy()
            first = {"weights": make_bytes(30 * SHARD, 1), "config": b"{}"}
            second = {"weights": change(first["weights"], 5, 10 * SHARD, 30 * SHARD - 1), "config": b"[]"}
            await net.publish(1, first)
            client = await net.client(proxy.url)
            assert read_files(await client.pull()) == first
            assert len(proxy.list_shards("full")) == 31
            await net.publish(2, second)
            folder = await client.pull(2)
            assert folder.name == "v2" and read_files(folder) == second
            assert read_files(net.root / "out" / "v1") == first
            assert len(proxy.list_shards("full")) == 31
            assert proxy.list_shards("delta") == [0]

    run(work)


def test_a_single_file_that_changes_its_name_comes_as_a_delta_too(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            proxy = await net.proxy()
            data = make_bytes(30 * SHARD, 1)
            await net.publish(1, {"step-1": data})
            client = await net.client(proxy.url)
            await client.pull()
            await net.publish(2, {"step-2": change(data, 77)})
            assert read_files(await client.pull(2)) == {"step-2": change(data, 77)}
            assert len(proxy.list_shards("full")) == 30

    run(work)


def test_a_client_several_versions_behind_takes_the_chain_of_deltas(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            proxy = await net.proxy()
            data = make_bytes(30 * SHARD, 1)
            await net.publish(1, {"weights": data})
            client = await net.client(proxy.url, keep=5)
            await client.pull()
            await client.close()
            for version in (2, 3, 4):
                data = change(data, version * 1000)
                await net.publish(version, {"weights": data})
            again = await net.client(proxy.url, keep=5)
            assert read_files(await again.pull()) == {"weights": data}
            assert len(proxy.list_shards("full")) == 30
            assert len(proxy.list_shards("delta")) == 3

    run(work)


def test_a_parent_damaged_on_disk_leads_to_a_full_fetch(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            proxy = await net.proxy()
            data = make_bytes(30 * SHARD, 1)
            await net.publish(1, {"weights": data})
            client = await net.client(proxy.url)
            folder = await client.pull()
            with (folder / "weights").open("r+b") as file:
                file.seek(20 * SHARD)
                file.write(b"damaged")
            await net.publish(2, {"weights": change(data, 9)})
            assert read_files(await client.pull(2)) == {"weights": change(data, 9)}
            assert proxy.list_shards("delta") == [0]
            assert len(proxy.list_shards("full")) > 30
            assert any("delta" in note for note in net.notes)

    run(work)


def test_a_republished_parent_is_not_built_on(open_network: Any, run: Any, make_bytes: Any, read_files: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            proxy = await net.proxy()
            data = make_bytes(30 * SHARD, 1)
            await net.publish(1, {"weights": data})
            client = await net.client(proxy.url)
            await client.pull()
            await net.publish(2, {"weights": change(data, 9)})
            await net.publish(1, {"weights": change(data, 5)})
            await until(lambda: client.store.find(1).serial == net.store.find(1).serial)
            assert (await client.pull(1)).name == "v1"
            assert read_files(await client.pull(2)) == {"weights": change(data, 9)}
            assert proxy.list_shards("delta") == []

    run(work)


def test_deltas_can_be_turned_off(open_network: Any, run: Any, make_bytes: Any, read_files: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            proxy = await net.proxy()
            data = make_bytes(30 * SHARD, 1)
            await net.publish(1, {"weights": data})
            client = await net.client(proxy.url, deltas=False)
            await client.pull()
            await net.publish(2, {"weights": change(data, 9)})
            assert read_files(await client.pull(2)) == {"weights": change(data, 9)}
            assert proxy.list_shards("delta") == [] and len(proxy.list_shards("full")) == 60

    run(work)


def test_an_interrupted_pull_fetches_only_what_is_missing(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(40 * SHARD, 1)}
            await net.publish(1, files)
            gate = asyncio.Event()
            slow = await net.proxy(hold_shards(17, gate))
            first = await net.client(slow.url)
            pulled = asyncio.create_task(first.pull())
            await until(lambda: first.store.find(1) is not None and first.store.find(1).full.num_missing == 23)
            pulled.cancel()
            await asyncio.gather(pulled, return_exceptions=True)
            missing = list(first.store.find(1).full.missing())
            await first.close()
            proxy = await net.proxy()
            second = await net.client(proxy.url)
            assert read_files(await second.pull()) == files
            assert sorted(proxy.list_shards()) == missing and len(missing) == 23

    run(work)


def test_a_complete_version_is_not_fetched_again(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(9 * SHARD, 1)})
            proxy = await net.proxy()
            first = await net.client(proxy.url)
            await first.pull()
            await first.close()
            proxy.targets.clear()
            second = await net.client(proxy.url)
            assert (await second.pull()).name == "v1"
            assert (await second.pull(1)).name == "v1"
            assert proxy.list_shards() == []

    run(work)


def test_one_dead_source_at_the_start_is_no_problem(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(9 * SHARD, 1)})
            client = await net.client("http://127.0.0.1:1", "http://does-not-exist.invalid:80", net.url)
            assert (await client.pull()).name == "v1"
            assert client.progress.upstreams[0].failures and not client.progress.upstreams[2].failures

    run(work)


def test_with_no_source_up_the_wait_is_described_and_ends_when_one_comes(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(9 * SHARD, 1)})
            proxy = await net.proxy()
            url = proxy.url
            await proxy.close()
            client = await net.client(url)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: "refused" in (client.progress.waiting_for or ""))
            assert url in (client.progress.waiting_for or "")
            proxy._server = await asyncio.start_server(proxy._serve, "127.0.0.1", int(url.rpartition(":")[2]))
            assert (await pulled).name == "v1"

    run(work)


def test_a_source_that_vanishes_in_the_middle_and_returns_is_waited_for_by_name(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(40 * SHARD, 1)}
            await net.publish(1, files)
            gate = asyncio.Event()
            proxy = await net.proxy(hold_shards(10, gate))
            url = proxy.url
            client = await net.client(url)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: client.progress.bytes_done >= 10 * SHARD)
            await proxy.close()
            await until(lambda: url in (client.progress.waiting_for or ""))
            missing = list(client.store.find(1).full.missing())
            gate.set()
            proxy.targets.clear()
            proxy._server = await asyncio.start_server(proxy._serve, "127.0.0.1", int(url.rpartition(":")[2]))
            assert read_files(await pulled) == files
            assert sorted(proxy.list_shards()) == missing

    run(work)


def test_a_client_that_is_behind_goes_straight_to_the_newest(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(40 * SHARD, 1)}, delta=False)
            gate = asyncio.Event()
            proxy = await net.proxy(hold_shards(0, gate))
            client = await net.client(proxy.url)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: len(proxy.list_shards()) > 0)
            files = {"weights": make_bytes(40 * SHARD, 2)}
            await net.publish(2, files, delta=False)
            await until(lambda: any("for version 2" in note for note in net.notes))
            gate.set()
            folder = await pulled
            assert folder.name == "v2" and read_files(folder) == files
            assert client.store.find(1).full.have_bytes == 0

    run(work)


def test_a_version_nearly_done_is_finished_before_a_newer_one(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(40 * SHARD, 1)}, delta=False)
            gate = asyncio.Event()
            proxy = await net.proxy(hold_shards(30, gate))
            client = await net.client(proxy.url)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: client.progress.bytes_done >= 30 * SHARD)
            await net.publish(2, {"weights": make_bytes(40 * SHARD, 2)}, delta=False)
            await until(lambda: client.store.find(2) is not None)
            await asyncio.sleep(0.1)
            gate.set()
            assert (await pulled).name == "v1"
            assert (await client.pull()).name == "v2"

    run(work)


def test_a_version_deleted_everywhere_is_not_waited_for(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            first = await net.publish(1, {"weights": make_bytes(40 * SHARD, 1)}, delta=False)
            gate = asyncio.Event()
            proxy = await net.proxy(hold_shards(20, gate))
            client = await net.client(proxy.url)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: client.progress.bytes_done >= 20 * SHARD)
            await net.publish(2, {"weights": make_bytes(40 * SHARD, 2)}, delta=False)
            await net.store.drop(first)
            gate.set()
            assert (await pulled).name == "v2"

    run(work)


def test_a_version_asked_for_by_number_that_is_gone_is_an_error_and_one_to_come_is_waited_for(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network(keep=1) as net:
            await net.publish(3, {"weights": make_bytes(3 * SHARD, 1)})
            client = await net.client(net.url)
            with pytest.raises(GoneError, match=r"^no longer available; the newest is 3"):
                await client.pull(2)
            later = asyncio.create_task(client.pull(4))
            await until(lambda: client.progress.waiting_for == "version 4 to be published")
            await net.publish(4, {"weights": make_bytes(3 * SHARD, 2)})
            assert (await later).name == "v4"
            alone = await net.client(net.url, out="alone", only=9)
            with pytest.raises(GoneError, match=r"^not published yet; the newest is 4"):
                await alone.pull(9)

    run(work)


def test_a_version_is_not_said_to_be_gone_before_every_source_was_heard(
    open_network: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "LISTING_S", 0.05)

    async def work() -> None:
        async with open_network() as net:
            first = await net.publish(1, {"weights": make_bytes(3 * SHARD, 1)})
            second = await net.publish(2, {"weights": make_bytes(3 * SHARD, 2)})
            gate = asyncio.Event()

            async def hold_list(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/versions" in target:
                    await gate.wait()
                return False

            async def list_newest(target: str, writer: asyncio.StreamWriter) -> bool:
                if target != "/versions":
                    return first.digest[:16] in target
                body = second.log.lines[0] + b"\n"
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                await writer.drain()
                return True

            slow, quick = await net.proxy(hold_list), await net.proxy(list_newest)
            client = await net.client(quick.url, slow.url, deadlines=net.patient)
            pulled = asyncio.create_task(client.pull(1))
            await until(lambda: client.store.find(2) is not None)
            await asyncio.sleep(0.2)
            assert not pulled.done()
            gate.set()
            assert (await pulled).name == "v1"

    run(work)


def test_a_source_that_cannot_be_reached_is_named_when_a_version_is_gone(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(3, {"weights": make_bytes(3 * SHARD, 1)})
            client = await net.client(net.url, "http://127.0.0.1:1")
            with pytest.raises(GoneError, match=r"the newest is 3 \(no response from http://127.0.0.1:1\)"):
                await client.pull(2)

    run(work)


HASTY = FetchDeadlines(connect_s=1, head_s=2, rest_s=1, window_s=0.5, stall_s=0.5)
"""Short enough to abandon a stalled version within a test."""


def test_a_version_abandoned_by_its_publisher_is_given_up_for_one_that_can_be_finished(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            files, data = {"weights": make_bytes(9 * SHARD, 1)}, make_bytes(9 * SHARD, 2)
            await net.publish(1, files)
            for version, hashed in ((2, False), (3, True)):
                entry = await net.begin(version, data)
                if hashed:
                    await net.add_hashes(entry, data)
            client = await net.client(net.url, deadlines=HASTY)
            assert read_files(await client.pull()) == files
            assert [note for note in net.notes if "for version 2: no progress" in note]
            assert [note for note in net.notes if "for version 1: no progress" in note]
            await net.finish(entry, data)
            follow = client.follow()
            while (folder := await anext(follow)).name != "v3":
                pass
            assert read_files(folder) == {"weights": data}
            await follow.aclose()

    run(work)


def test_a_stalled_version_is_waited_for_if_there_is_no_other_or_if_it_was_requested(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            data = make_bytes(9 * SHARD, 2)
            entry = await net.begin(2, data)
            client = await net.client(net.url, deadlines=HASTY, out="alone")
            alone = asyncio.create_task(client.pull())
            await until(lambda: client.store.find(2) is not None)
            await net.publish(1, {"weights": make_bytes(9 * SHARD, 1)}, delta=False)
            asking = await net.client(net.url, deadlines=HASTY, out="asking")
            asked = asyncio.create_task(asking.pull(2))
            assert (await alone).name == "v1"
            await asyncio.sleep(1.0)
            assert not asked.done() and sum("abandoning version 2" in note for note in net.notes) == 1, (
                "by the other client"
            )
            await net.finish(entry, data)
            assert read_files(await asked) == {"weights": data}

    run(work)


def test_repeated_wrong_bytes_are_no_progress(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_stats, "BAN_S", (0.01, 0.01))
    monkeypatch.setattr(upstream_stats, "COOL_S", (0.01, 0.01))

    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(9 * SHARD, 1)}
            await net.publish(1, files, delta=False)
            await net.publish(2, {"weights": make_bytes(9 * SHARD, 2)}, delta=False)

            async def lie(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/v/2/" not in target or "/full/" not in target:
                    return False
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % SHARD + bytes(SHARD))
                await writer.drain()
                return True

            proxy = await net.proxy(lie)
            client = await net.client(proxy.url, deadlines=HASTY)
            assert read_files(await client.pull()) == files

    run(work)


def test_following_yields_each_new_version_once_and_never_an_older_one(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(3 * SHARD, 1)})
            client = await net.client(net.url)
            follow = client.follow()
            assert (await anext(follow)).name == "v1"
            upcoming = asyncio.ensure_future(anext(follow))
            await until(lambda: client.progress.waiting_for == "a newer version")
            await net.publish(0, {"weights": make_bytes(3 * SHARD, 7)})
            await asyncio.sleep(0.1)
            assert not upcoming.done()
            await net.publish(5, {"weights": make_bytes(3 * SHARD, 5)})
            assert (await upcoming).name == "v5"
            await net.publish(5, {"weights": make_bytes(3 * SHARD, 6)})
            assert (await anext(follow)).name == "v5"
            assert (net.root / "out" / "v5" / "weights").read_bytes() == make_bytes(3 * SHARD, 6)
            await follow.aclose()

    run(work)


def test_shards_are_spread_over_the_sources(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(80 * SHARD, 1)})
            proxies = [await net.proxy() for _ in range(3)]
            client = await net.client(*(proxy.url for proxy in proxies))
            await client.pull()
            counts = [len(proxy.list_shards()) for proxy in proxies]
            assert min(counts) > 0 and sum(counts) == 80
            assert [source.shards for source in client.progress.upstreams] == counts

    run(work)


def test_a_client_without_a_ticket_gets_an_error_and_does_not_ask_forever(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def deny(target: str, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nWWW-Authenticate: Shoal\r\n\r\n")
        return True

    async def work() -> None:
        async with open_network() as net:
            data = make_bytes(SHARD, 1)
            await net.publish(1, {"weights": data})
            client = await net.client((await net.proxy(deny)).url, (await net.proxy(deny)).url)
            with pytest.raises(ConfigError, match="every source requires a ticket"):
                await client.pull()
            open_too = await net.client((await net.proxy(deny)).url, net.url, out="other")
            assert (await open_too.pull() / "weights").read_bytes() == data, "one that serves us is enough"

    run(work)
