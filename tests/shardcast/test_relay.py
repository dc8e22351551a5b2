import asyncio
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError, UnavailableError
from shoal.net.limits import ServeLimits
from shoal.shardcast import relay as relay_module
from shoal.shardcast.fetch import upstream_stats
from shoal.shardcast.fetch.connection import FetchDeadlines
from shoal.shardcast.relay import Relay
from shoal.shardcast.store import blob as blob_module

SHARD = 1 << 16
BIG = 1 << 20


def change(data: bytes, *claims: int) -> bytes:
    changed = bytearray(data)
    for place in claims:
        changed[place] ^= 1
    return bytes(changed)


async def until(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0.005)


def holds_full(relay: Relay, version: int) -> bool:
    entry = relay.store.find(version)
    return entry is not None and entry.complete and entry.full.settled


async def stop(relay: Relay) -> None:
    await relay.close()


def test_a_chain_of_relays_brings_every_byte_to_the_client(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as network:
            files = {"weights": make_bytes(40 * SHARD, 1), "config": b"{}"}
            near = await network.relay(network.url, data="near")
            far = await network.relay(str(near.server.url), data="far")
            client = await network.client(str(far.server.url))
            pulled = asyncio.create_task(client.pull())
            await network.publish(1, files)
            assert read_files(await pulled) == files
            data = change(files["weights"], 3, 20 * SHARD)
            await network.publish(2, {**files, "weights": data})
            assert read_files(await client.pull(2)) == {**files, "weights": data}
            assert client.store.find(2).delta.complete

    run(work)


def test_a_shard_passes_through_two_relays_before_it_has_arrived_at_the_first(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    """The upstream stalls in the middle of the only shard; the client has received everything sent so far anyway."""

    async def work() -> None:
        async with open_network(shard_size=4 * BIG) as network:
            data = make_bytes(4 * BIG, 1)
            await network.publish(1, {"weights": data})
            gate = asyncio.Event()
            half = 2 * BIG + 12345

            async def send_half(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/full/" not in target:
                    return False
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data[:half])
                await writer.drain()
                await gate.wait()
                writer.write(data[half:])
                await writer.drain()
                return True

            proxy = await network.proxy(send_half)
            patient = network.patient
            near = await network.relay(proxy.url, data="near", deadlines=patient)
            far = await network.relay(str(near.server.url), data="far", deadlines=patient)
            client = await network.client(str(far.server.url), deadlines=patient)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: client.progress.bytes_done == half)
            assert not near.store.find(1).full.has(0) and not far.store.find(1).full.has(0)
            gate.set()
            folder = await pulled
            assert (folder / "weights").read_bytes() == data
            assert proxy.list_shards() == [0]

    run(work)


def test_a_relay_fetches_anchors_and_deltas_ahead_and_other_fulls_when_asked(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as network:
            proxy = await network.proxy()
            relay = await network.relay(proxy.url)
            first = make_bytes(20 * SHARD, 1)
            second = change(first, 7)
            await network.publish(1, {"weights": first})
            await network.publish(2, {"weights": second})
            await until(lambda: holds_full(relay, 1))
            await until(lambda: relay.store.find(2) is not None and relay.store.find(2).delta is not None)
            await until(lambda: relay.store.find(2).delta.settled)
            await asyncio.sleep(0.1)
            assert sorted(proxy.list_shards()) == list(range(20))
            assert relay.store.find(2).full.have_bytes == 0
            # A client without deltas requests the full second version through the relay.
            client = await network.client(str(relay.server.url), keep=1, deltas=False)
            assert read_files(await client.pull(2)) == {"weights": second}
            await until(lambda: holds_full(relay, 2))
            assert len(proxy.list_shards()) == 40

    run(work)


def test_a_relay_keeps_serving_while_its_upstream_is_down(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as network:
            files = {"weights": make_bytes(20 * SHARD, 1)}
            await network.publish(1, files)
            proxy = await network.proxy()
            relay = await network.relay(proxy.url)
            await until(lambda: holds_full(relay, 1))
            await proxy.close()
            await asyncio.sleep(0.3)
            client = await network.client(str(relay.server.url))
            assert read_files(await client.pull()) == files

    run(work)


def test_a_restarted_relay_fetches_nothing_again(open_network: Any, run: Any, make_bytes: Any, read_files: Any) -> None:
    async def work() -> None:
        async with open_network() as network:
            files = {"weights": make_bytes(20 * SHARD, 1)}
            await network.publish(1, files)
            proxy = await network.proxy()
            relay = await network.relay(proxy.url)
            await until(lambda: holds_full(relay, 1))
            assert sorted(proxy.list_shards()) == list(range(20))
            await stop(relay)
            proxy.targets.clear()
            again = await network.relay(proxy.url)
            client = await network.client(str(again.server.url))
            assert read_files(await client.pull()) == files
            assert proxy.list_shards() == []

    run(work)


def test_a_relay_stopped_in_the_middle_continues_from_its_shards(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as network:
            await network.publish(1, {"weights": make_bytes(30 * SHARD, 1)})
            gate = asyncio.Event()
            passed = 0

            async def hold(target: str, writer: asyncio.StreamWriter) -> bool:
                nonlocal passed
                passed += "/full/" in target
                if passed > 12:
                    await gate.wait()
                return False

            slow = await network.proxy(hold)
            relay = await network.relay(slow.url)
            await until(lambda: relay.store.find(1) is not None and relay.store.find(1).full.num_missing == 18)
            missing = list(relay.store.find(1).full.missing())
            await stop(relay)
            proxy = await network.proxy()
            again = await network.relay(proxy.url)
            await until(lambda: holds_full(again, 1))
            assert sorted(proxy.list_shards()) == missing

    run(work)


def test_a_relay_serves_the_shards_it_has_of_an_incomplete_version(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as network:
            data = make_bytes(30 * SHARD, 1)
            await network.publish(1, {"weights": data})
            gate = asyncio.Event()

            async def hold_late(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/full/" in target and int(target.rpartition("/")[2]) >= 10:
                    await gate.wait()
                return False

            proxy = await network.proxy(hold_late)
            relay = await network.relay(proxy.url, deadlines=network.patient)
            client = await network.client(str(relay.server.url), deadlines=network.patient)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: client.progress.bytes_done == 10 * SHARD)
            gate.set()
            assert ((await pulled) / "weights").read_bytes() == data

    run(work)


def test_a_request_for_a_late_shard_makes_it_urgent(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as network:
            await network.publish(1, {"weights": make_bytes(60 * SHARD, 1)})

            async def respond_slowly(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/full/" in target:
                    await asyncio.sleep(0.1)
                return False

            proxy = await network.proxy(respond_slowly)
            relay = await network.relay(proxy.url, in_flight=1)
            await until(lambda: len(proxy.list_shards()) >= 1)
            entry = relay.store.find(1)
            answer = await network.get(relay.server.url, f"/v/1/{entry.digest[:16]}/full/55")
            assert answer.status == 200 and len(answer.body) == SHARD
            order = proxy.list_shards()
            assert order.index(55) < 20

    run(work)


def test_bad_bytes_from_upstream_are_never_passed_on_whole(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network(shard_size=BIG) as network:
            data = make_bytes(BIG, 1)
            await network.publish(1, {"weights": data})

            async def corrupt(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/full/" not in target:
                    return False
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % BIG + change(data, BIG // 2))
                await writer.drain()
                return True

            bad = await network.proxy(corrupt)
            relay = await network.relay(bad.url)
            await until(lambda: relay.puller.progress.upstreams[0].wrong > 0)
            entry = relay.store.find(1)
            answer = await network.get(relay.server.url, f"/v/1/{entry.digest[:16]}/full/0")
            assert answer.status != 200 or answer.short
            assert not entry.full.has(0)

    run(work)


def test_the_cache_limit_lets_old_versions_go_first(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as network:
            relay = await network.relay(network.url, max_bytes=45 * SHARD)
            for version in (1, 2, 3):
                await network.publish(version, {"weights": make_bytes(20 * SHARD, version)}, delta=False)
                await until(lambda version=version: holds_full(relay, version))
                assert relay.store.used_bytes <= 45 * SHARD
            assert [entry.version for entry in relay.store.entries() if entry.full.have_bytes] == [2, 3]

    run(work)


def test_a_version_larger_than_the_cache_is_logged_once_not_announced_and_never_fetched(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as network:
            small = {"weights": make_bytes(5 * SHARD, 1)}
            await network.publish(1, small, delta=False)
            proxy = await network.proxy()
            relay = await network.relay(proxy.url, max_bytes=10 * SHARD)
            await until(lambda: holds_full(relay, 1))
            large = await network.publish(2, {"weights": make_bytes(20 * SHARD, 2)}, delta=False)
            await until(lambda: any("no space in the cache" in note for note in network.notes))
            proxy.targets.clear()
            answers = [await network.get(relay.server.url, f"/v/2/{large.digest[:16]}/full/{i}") for i in range(5)]
            assert {answer.status for answer in answers} == {404}
            assert await list_announced(network, relay) == [1]
            client = await network.client(str(relay.server.url))
            assert read_files(await client.pull()) == small
            await network.publish(3, {"weights": make_bytes(5 * SHARD, 3)}, delta=False)
            await until(lambda: holds_full(relay, 3))
            assert not any("/v/2/" in target and "/full/" in target for target in proxy.targets)
            assert sum("version 2" in note for note in network.notes) == 1

    run(work)


def test_a_full_disk_is_logged_once_and_retried_after_a_while(
    open_network: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "DISK_PAUSE_S", 2.0)

    async def refuse(self: Any) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def work() -> None:
        async with open_network() as network:
            entry = await network.publish(1, {"weights": make_bytes(9 * SHARD, 1)})
            proxy = await network.proxy()
            with monkeypatch.context() as patch:
                patch.setattr(blob_module.Blob, "prepare", refuse)
                relay = await network.relay(proxy.url)
                await until(lambda: any("retrying every" in note for note in network.notes))
                await until(lambda: not relay.puller.scheduler._jobs)
                asked = len(proxy.list_shards())
                for index in range(9):
                    answer = await network.get(relay.server.url, f"/v/1/{entry.digest[:16]}/full/{index}")
                    assert answer.status == 404
                assert len(proxy.list_shards()) == asked
            await until(lambda: holds_full(relay, 1))
            assert len(network.notes) == 1

    run(work)


async def list_announced(network: Any, relay: Relay) -> list[int]:
    """The versions that a relay announces."""
    lines = (await network.get(relay.server.url, "/versions")).body.splitlines()
    return [json.loads(line)["body"]["version"] for line in lines]


def test_a_version_is_announced_only_while_an_upstream_announces_it(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An origin dies in the middle of a version: late clients of the relay do not see it until the origin is back."""
    monkeypatch.setattr(upstream_stats, "UNREACHABLE_S", 0.2)
    monkeypatch.setattr(upstream_stats, "COOL_S", (0.05, 0.2))

    async def work() -> None:
        async with open_network() as network:
            first, data = {"weights": make_bytes(9 * SHARD, 1)}, make_bytes(9 * SHARD, 2)
            await network.publish(1, first)
            proxy = await network.proxy()
            url = proxy.url
            relay = await network.relay(url)
            await until(lambda: holds_full(relay, 1))
            second = await network.begin(2, data)
            await network.add_hashes(second, data)
            await until(lambda: relay.store.find(2) is not None and relay.store.find(2).log.num_hashes == 9)
            assert await list_announced(network, relay) == [1, 2]
            await proxy.close()
            while await list_announced(network, relay) != [1]:
                await asyncio.sleep(0.02)
            client = await network.client(str(relay.server.url))
            assert read_files(await client.pull()) == first
            following = asyncio.create_task(client.pull(2))
            await until(lambda: client.progress.waiting_for == "version 2 to be published")
            proxy._server = await asyncio.start_server(proxy._serve, "127.0.0.1", int(url.rpartition(":")[2]))
            await network.finish(second, data)
            assert read_files(await following) == {"weights": data}

    run(work)


def test_an_order_without_progress_makes_room_for_one_with_progress(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as network:
            await network.publish(1, {"weights": make_bytes(9 * SHARD, 1)}, delta=False)
            await network.publish(2, {"weights": make_bytes(9 * SHARD, 2)}, delta=False)

            async def hold_second(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/v/2/" in target and "/full/" in target:
                    await asyncio.sleep(3600)
                return False

            proxy = await network.proxy(hold_second)
            hasty = FetchDeadlines(connect_s=1, head_s=60, rest_s=1, window_s=60, stall_s=0.5)
            relay = await network.relay(proxy.url, deadlines=hasty)
            await until(lambda: holds_full(relay, 1))
            assert not holds_full(relay, 2)

    run(work)


def test_a_client_that_requests_old_shards_and_disconnects_does_not_delay_the_newest_version(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as network:
            first = make_bytes(60 * SHARD, 1)
            await network.publish(1, {"weights": first})
            old = await network.publish(2, {"weights": change(first, 7)})
            gate = asyncio.Event()

            async def hold_old(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/v/2/" in target and "/full/" in target:
                    await gate.wait()
                return False

            proxy = await network.proxy(hold_old)
            relay = await network.relay(proxy.url, deadlines=network.patient)
            await until(lambda: relay.store.find(2) is not None and relay.store.find(2).log.ended)
            await until(lambda: holds_full(relay, 1))
            urgent = relay.puller.scheduler._urgent
            socks = []
            for index in range(60):
                _, writer = await asyncio.open_connection(*relay.server.address)
                writer.write(f"GET /v/2/{old.digest[:16]}/full/{index} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                socks.append(writer)
            await until(lambda: len(urgent) == 60)
            assert len(proxy.list_shards()) - 60 <= 8
            await network.publish(3, {"weights": make_bytes(20 * SHARD, 3)}, delta=False)
            await until(lambda: holds_full(relay, 3))
            for writer in socks:
                writer.close()
            await until(lambda: len(urgent) == 0 and not relay.puller.scheduler._jobs)
            gate.set()
            assert relay.store.find(2).full.have_bytes == 0

    run(work)


def test_old_versions_are_dropped(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as network:
            relay = await network.relay(network.url, keep=2)
            for version in (1, 2, 3):
                await network.publish(version, {"weights": make_bytes(3 * SHARD, version)}, delta=False)
                await until(lambda version=version: holds_full(relay, version))
            assert [entry.version for entry in relay.store.entries()] == [2, 3]
            answer = await network.get(relay.server.url, f"/v/1/{network.store.find(1).digest[:16]}/full/0")
            assert answer.status == 410

    run(work)


def test_a_second_relay_in_one_folder_is_refused(open_network: Any, run: Any) -> None:
    async def work() -> None:
        async with open_network() as network:
            await network.relay(network.url, data="same")
            with pytest.raises(ConfigError, match="in use by process"):
                await network.relay(network.url, data="same")

    run(work)


def test_a_relay_with_a_bad_address_leaves_its_folder_free(open_network: Any, run: Any, tmp_path: Path) -> None:
    async def work() -> None:
        async with open_network() as network:
            with pytest.raises(ConfigError, match="ftp"):
                await network.relay("ftp://relay.example", data="same")
            with pytest.raises(UnavailableError, match="cannot listen"):
                await network.relay(network.url, data="same", port=network.server.address[1])
            relay = await network.relay(network.url, data="same", limits=ServeLimits(grace_seconds=0.1))
            assert relay.server.url.port > 0

    run(work)
