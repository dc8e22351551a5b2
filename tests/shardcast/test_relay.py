import asyncio
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.shardcast import blob as blob_module
from shoal.shardcast import relay as relay_module
from shoal.shardcast import sources
from shoal.shardcast.limits import ServeLimits
from shoal.shardcast.link import Deadlines
from shoal.shardcast.relay import Relay

SHARD = 1 << 16
BIG = 1 << 20


def change(data: bytes, *places: int) -> bytes:
    changed = bytearray(data)
    for place in places:
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
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(40 * SHARD, 1), "config": b"{}"}
            near = await home.relay(home.url, data="near")
            far = await home.relay(str(near.server.url), data="far")
            client = await home.client(str(far.server.url))
            pulled = asyncio.create_task(client.pull())
            await home.publish(1, files)
            assert read_files(await pulled) == files
            data = change(files["weights"], 3, 20 * SHARD)
            await home.publish(2, {**files, "weights": data})
            assert read_files(await client.pull(2)) == {**files, "weights": data}
            assert client.store.find(2).delta.complete

    run(work)


def test_a_shard_passes_through_two_relays_before_it_has_arrived_at_the_first(
    basin: Any, run: Any, make_bytes: Any
) -> None:
    """The origin's side stops in the middle of the only shard; what it sent so far is at the client all the same."""

    async def work() -> None:
        async with basin(shard_size=4 * BIG) as home:
            data = make_bytes(4 * BIG, 1)
            await home.publish(1, {"weights": data})
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

            front = await home.front(send_half)
            patient = home.patient
            near = await home.relay(front.url, data="near", deadlines=patient)
            far = await home.relay(str(near.server.url), data="far", deadlines=patient)
            client = await home.client(str(far.server.url), deadlines=patient)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: client.progress.bytes_done == half)
            assert not near.store.find(1).full.has(0) and not far.store.find(1).full.has(0)
            gate.set()
            folder = await pulled
            assert (folder / "weights").read_bytes() == data
            assert front.list_shards() == [0]

    run(work)


def test_a_relay_fetches_anchors_and_deltas_ahead_and_other_fulls_when_asked(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            front = await home.front()
            relay = await home.relay(front.url)
            first = make_bytes(20 * SHARD, 1)
            second = change(first, 7)
            await home.publish(1, {"weights": first})
            await home.publish(2, {"weights": second})
            await until(lambda: holds_full(relay, 1))
            await until(lambda: relay.store.find(2) is not None and relay.store.find(2).delta is not None)
            await until(lambda: relay.store.find(2).delta.settled)
            await asyncio.sleep(0.1)
            assert sorted(front.list_shards()) == list(range(20))
            assert relay.store.find(2).full.have_bytes == 0
            # Who wants no deltas asks for the full second version, through the relay.
            client = await home.client(str(relay.server.url), keep=1, deltas=False)
            assert read_files(await client.pull(2)) == {"weights": second}
            await until(lambda: holds_full(relay, 2))
            assert len(front.list_shards()) == 40

    run(work)


def test_a_relay_serves_on_while_its_upstream_is_away(basin: Any, run: Any, make_bytes: Any, read_files: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(20 * SHARD, 1)}
            await home.publish(1, files)
            front = await home.front()
            relay = await home.relay(front.url)
            await until(lambda: holds_full(relay, 1))
            await front.close()
            await asyncio.sleep(0.3)
            client = await home.client(str(relay.server.url))
            assert read_files(await client.pull()) == files

    run(work)


def test_a_restarted_relay_fetches_nothing_again(basin: Any, run: Any, make_bytes: Any, read_files: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(20 * SHARD, 1)}
            await home.publish(1, files)
            front = await home.front()
            relay = await home.relay(front.url)
            await until(lambda: holds_full(relay, 1))
            assert sorted(front.list_shards()) == list(range(20))
            await stop(relay)
            front.targets.clear()
            again = await home.relay(front.url)
            client = await home.client(str(again.server.url))
            assert read_files(await client.pull()) == files
            assert front.list_shards() == []

    run(work)


def test_a_relay_stopped_in_the_middle_goes_on_from_its_shards(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(30 * SHARD, 1)})
            gate = asyncio.Event()
            passed = 0

            async def hold(target: str, writer: asyncio.StreamWriter) -> bool:
                nonlocal passed
                passed += "/full/" in target
                if passed > 12:
                    await gate.wait()
                return False

            slow = await home.front(hold)
            relay = await home.relay(slow.url)
            await until(lambda: relay.store.find(1) is not None and relay.store.find(1).full.num_missing == 18)
            missing = list(relay.store.find(1).full.missing())
            await stop(relay)
            front = await home.front()
            again = await home.relay(front.url)
            await until(lambda: holds_full(again, 1))
            assert sorted(front.list_shards()) == missing

    run(work)


def test_a_relay_serves_the_shards_it_has_of_a_version_it_has_not(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            data = make_bytes(30 * SHARD, 1)
            await home.publish(1, {"weights": data})
            gate = asyncio.Event()

            async def hold_late(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/full/" in target and int(target.rpartition("/")[2]) >= 10:
                    await gate.wait()
                return False

            front = await home.front(hold_late)
            relay = await home.relay(front.url, deadlines=home.patient)
            client = await home.client(str(relay.server.url), deadlines=home.patient)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: client.progress.bytes_done == 10 * SHARD)
            gate.set()
            assert ((await pulled) / "weights").read_bytes() == data

    run(work)


def test_a_request_for_a_late_shard_makes_it_urgent(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(60 * SHARD, 1)})

            async def dawdle(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/full/" in target:
                    await asyncio.sleep(0.1)
                return False

            front = await home.front(dawdle)
            relay = await home.relay(front.url, in_flight=1)
            await until(lambda: len(front.list_shards()) >= 1)
            entry = relay.store.find(1)
            answer = await home.get(relay.server.url, f"/v/1/{entry.digest[:16]}/full/55")
            assert answer.status == 200 and len(answer.body) == SHARD
            order = front.list_shards()
            assert order.index(55) < 20

    run(work)


def test_bad_bytes_from_upstream_are_never_passed_on_whole(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin(shard_size=BIG) as home:
            data = make_bytes(BIG, 1)
            await home.publish(1, {"weights": data})

            async def corrupt(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/full/" not in target:
                    return False
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % BIG + change(data, BIG // 2))
                await writer.drain()
                return True

            bad = await home.front(corrupt)
            relay = await home.relay(bad.url)
            await until(lambda: relay.puller.progress.sources[0].wrong > 0)
            entry = relay.store.find(1)
            answer = await home.get(relay.server.url, f"/v/1/{entry.digest[:16]}/full/0")
            assert answer.status != 200 or answer.short
            assert not entry.full.has(0)

    run(work)


def test_the_cache_limit_lets_old_versions_go_first(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            relay = await home.relay(home.url, max_bytes=45 * SHARD)
            for version in (1, 2, 3):
                await home.publish(version, {"weights": make_bytes(20 * SHARD, version)}, parent=None)
                await until(lambda version=version: holds_full(relay, version))
                assert relay.store.used_bytes <= 45 * SHARD
            assert [entry.version for entry in relay.store.entries() if entry.full.have_bytes] == [2, 3]

    run(work)


def test_a_version_larger_than_the_cache_is_noted_once_not_told_of_and_never_fetched(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            small = {"weights": make_bytes(5 * SHARD, 1)}
            await home.publish(1, small, parent=None)
            front = await home.front()
            relay = await home.relay(front.url, max_bytes=10 * SHARD)
            await until(lambda: holds_full(relay, 1))
            large = await home.publish(2, {"weights": make_bytes(20 * SHARD, 2)}, parent=None)
            await until(lambda: any("no room" in note for note in home.notes))
            front.targets.clear()
            answers = [await home.get(relay.server.url, f"/v/2/{large.digest[:16]}/full/{i}") for i in range(5)]
            assert {answer.status for answer in answers} == {404}
            assert await list_told(home, relay) == [1]
            client = await home.client(str(relay.server.url))
            assert read_files(await client.pull()) == small
            await home.publish(3, {"weights": make_bytes(5 * SHARD, 3)}, parent=None)
            await until(lambda: holds_full(relay, 3))
            assert not any("/v/2/" in target and "/full/" in target for target in front.targets)
            assert sum("version 2" in note for note in home.notes) == 1

    run(work)


def test_a_disk_that_takes_no_more_is_noted_once_and_left_alone_for_a_while(
    basin: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "DISK_PAUSE_S", 2.0)

    async def refuse(self: Any) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def work() -> None:
        async with basin() as home:
            entry = await home.publish(1, {"weights": make_bytes(9 * SHARD, 1)})
            front = await home.front()
            with monkeypatch.context() as patch:
                patch.setattr(blob_module.Blob, "prepare", refuse)
                relay = await home.relay(front.url)
                await until(lambda: any("tried again" in note for note in home.notes))
                await until(lambda: not relay.puller.pump._jobs)
                asked = len(front.list_shards())
                for index in range(9):
                    answer = await home.get(relay.server.url, f"/v/1/{entry.digest[:16]}/full/{index}")
                    assert answer.status == 404
                assert len(front.list_shards()) == asked
            await until(lambda: holds_full(relay, 1))
            assert len(home.notes) == 1

    run(work)


async def list_told(home: Any, relay: Relay) -> list[int]:
    """The versions that a relay tells others of."""
    lines = (await home.get(relay.server.url, "/versions")).body.splitlines()
    return [json.loads(line)["body"]["version"] for line in lines]


def test_a_version_is_told_of_only_while_somebody_upstream_does(
    basin: Any, run: Any, make_bytes: Any, read_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An origin dies in the middle of a version: who comes late to the relay never hears of it, until it is back."""
    monkeypatch.setattr(sources, "LOST_S", 0.2)
    monkeypatch.setattr(sources, "COOL_S", (0.05, 0.2))

    async def work() -> None:
        async with basin() as home:
            first, data = {"weights": make_bytes(9 * SHARD, 1)}, make_bytes(9 * SHARD, 2)
            await home.publish(1, first)
            front = await home.front()
            url = front.url
            relay = await home.relay(url)
            await until(lambda: holds_full(relay, 1))
            second = await home.begin(2, data)
            await home.add_hashes(second, data)
            await until(lambda: relay.store.find(2) is not None and relay.store.find(2).log.num_hashes == 9)
            assert await list_told(home, relay) == [1, 2]
            await front.close()
            while await list_told(home, relay) != [1]:
                await asyncio.sleep(0.02)
            client = await home.client(str(relay.server.url))
            assert read_files(await client.pull()) == first
            following = asyncio.create_task(client.pull(2))
            await until(lambda: client.progress.waiting_for == "version 2 to be published")
            front._server = await asyncio.start_server(front._serve, "127.0.0.1", int(url.rpartition(":")[2]))
            await home.finish(second, data)
            assert read_files(await following) == {"weights": data}

    run(work)


def test_an_order_that_does_not_move_makes_room_for_one_that_does(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(9 * SHARD, 1)}, parent=None)
            await home.publish(2, {"weights": make_bytes(9 * SHARD, 2)}, parent=None)

            async def hold_second(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/v/2/" in target and "/full/" in target:
                    await asyncio.sleep(3600)
                return False

            front = await home.front(hold_second)
            hasty = Deadlines(connect_s=1, head_s=60, rest_s=1, window_s=60, stall_s=0.5)
            relay = await home.relay(front.url, deadlines=hasty)
            await until(lambda: holds_full(relay, 1))
            assert not holds_full(relay, 2)

    run(work)


def test_who_asks_for_old_shards_and_hangs_up_does_not_delay_the_newest_version(
    basin: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            first = make_bytes(60 * SHARD, 1)
            await home.publish(1, {"weights": first})
            old = await home.publish(2, {"weights": change(first, 7)})
            gate = asyncio.Event()

            async def hold_old(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/v/2/" in target and "/full/" in target:
                    await gate.wait()
                return False

            front = await home.front(hold_old)
            relay = await home.relay(front.url, deadlines=home.patient)
            await until(lambda: relay.store.find(2) is not None and relay.store.find(2).log.ended)
            await until(lambda: holds_full(relay, 1))
            urgent = relay.puller.pump._urgent
            socks = []
            for index in range(60):
                _, writer = await asyncio.open_connection(*relay.server.address)
                writer.write(f"GET /v/2/{old.digest[:16]}/full/{index} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                socks.append(writer)
            await until(lambda: len(urgent) == 60)
            assert len(front.list_shards()) - 60 <= 8
            await home.publish(3, {"weights": make_bytes(20 * SHARD, 3)}, parent=None)
            await until(lambda: holds_full(relay, 3))
            for writer in socks:
                writer.close()
            await until(lambda: len(urgent) == 0 and not relay.puller.pump._jobs)
            gate.set()
            assert relay.store.find(2).full.have_bytes == 0

    run(work)


def test_old_versions_are_let_go(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            relay = await home.relay(home.url, keep=2)
            for version in (1, 2, 3):
                await home.publish(version, {"weights": make_bytes(3 * SHARD, version)}, parent=None)
                await until(lambda version=version: holds_full(relay, version))
            assert [entry.version for entry in relay.store.entries()] == [2, 3]
            answer = await home.get(relay.server.url, f"/v/1/{home.store.find(1).digest[:16]}/full/0")
            assert answer.status == 410

    run(work)


def test_two_relays_in_one_folder_are_refused_in_a_sentence(basin: Any, run: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.relay(home.url, data="same")
            with pytest.raises(ConfigError, match="in use by process"):
                await home.relay(home.url, data="same")

    run(work)


def test_a_relay_with_a_bad_address_leaves_its_folder_free(basin: Any, run: Any, tmp_path: Path) -> None:
    async def work() -> None:
        async with basin() as home:
            with pytest.raises(ConfigError, match="https"):
                await home.relay("https://relay.example", data="same")
            with pytest.raises(ConfigError, match="cannot listen"):
                await home.relay(home.url, data="same", port=home.server.address[1])
            relay = await home.relay(home.url, data="same", limits=ServeLimits(grace_seconds=0.1))
            assert relay.server.url.port > 0

    run(work)
