import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.shardcast import choice, sources
from shoal.shardcast.crew import GoneError
from shoal.shardcast.link import Deadlines

SHARD = 1 << 16


def change(data: bytes, *places: int) -> bytes:
    changed = bytearray(data)
    for place in places:
        changed[place] ^= 1
    return bytes(changed)


async def until(check: Callable[[], bool]) -> None:
    """The tests' own deadline bounds this."""
    while not check():
        await asyncio.sleep(0.005)


def hold_shards(after: int, gate: asyncio.Event) -> Callable[[str, asyncio.StreamWriter], Awaitable[bool]]:
    """A script that lets some requests for shards through and keeps the others until the gate opens."""
    passed = 0

    async def act(target: str, writer: asyncio.StreamWriter) -> bool:
        nonlocal passed
        if "/full/" in target:
            passed += 1
            if passed > after:
                await gate.wait()
        return False

    return act


def test_all_files_arrive_small_large_and_empty(basin: Any, run: Any, make_bytes: Any, read_files: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            files = {"a": make_bytes(5 * SHARD, 1), "b": b"", "c": b"x", "d": make_bytes(SHARD + 1, 2)}
            await home.publish(1, files)
            client = await home.client(home.url)
            assert read_files(await client.pull()) == files

    run(work)


def test_a_version_is_fetched_while_it_is_being_published(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(300 * SHARD, 1)}
            client = await home.client(home.url)
            pulled = asyncio.create_task(client.pull())
            await asyncio.sleep(0.05)
            assert client.progress.waiting_for == "a version to be published"
            await home.publish(1, files)
            assert read_files(await pulled) == files

    run(work)


def test_shards_are_fetched_before_the_manifest_has_ended_but_not_far_ahead_of_their_hashes(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(40 * SHARD, 1)}
            entry = await home.publish(1, files)
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

            front = await home.front(hold_lines)
            client = await home.client(front.url, in_flight=3)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: client.progress.bytes_done == 6 * SHARD)
            await asyncio.sleep(0.3)
            assert sorted(front.list_shards()) == list(range(6))
            assert client.store.find(1).full.num_missing == 40
            gates[0].set()
            await until(lambda: client.store.find(1).full.complete)
            assert not pulled.done() and not (home.root / "out" / "v1").exists()
            gates[1].set()
            assert read_files(await pulled) == files
            assert sorted(front.list_shards()) == list(range(40))

    run(work)


def test_the_next_version_comes_as_a_delta_and_is_the_same_to_the_bit(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            front = await home.front()
            first = {"weights": make_bytes(30 * SHARD, 1), "config": b"{}"}
            second = {"weights": change(first["weights"], 5, 10 * SHARD, 30 * SHARD - 1), "config": b"[]"}
            await home.publish(1, first)
            client = await home.client(front.url)
            assert read_files(await client.pull()) == first
            assert len(front.list_shards("full")) == 31
            await home.publish(2, second)
            folder = await client.pull(2)
            assert folder.name == "v2" and read_files(folder) == second
            assert read_files(home.root / "out" / "v1") == first
            assert len(front.list_shards("full")) == 31
            assert front.list_shards("delta") == [0]

    run(work)


def test_a_single_file_that_changes_its_name_comes_as_a_delta_too(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            front = await home.front()
            data = make_bytes(30 * SHARD, 1)
            await home.publish(1, {"step-1": data})
            client = await home.client(front.url)
            await client.pull()
            await home.publish(2, {"step-2": change(data, 77)})
            assert read_files(await client.pull(2)) == {"step-2": change(data, 77)}
            assert len(front.list_shards("full")) == 30

    run(work)


def test_a_client_several_versions_behind_takes_the_chain_of_deltas(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            front = await home.front()
            data = make_bytes(30 * SHARD, 1)
            await home.publish(1, {"weights": data})
            client = await home.client(front.url, keep=5)
            await client.pull()
            await client.close()
            for version in (2, 3, 4):
                data = change(data, version * 1000)
                await home.publish(version, {"weights": data})
            again = await home.client(front.url, keep=5)
            assert read_files(await again.pull()) == {"weights": data}
            assert len(front.list_shards("full")) == 30
            assert len(front.list_shards("delta")) == 3

    run(work)


def test_a_parent_damaged_on_disk_leads_to_a_full_fetch(basin: Any, run: Any, make_bytes: Any, read_files: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            front = await home.front()
            data = make_bytes(30 * SHARD, 1)
            await home.publish(1, {"weights": data})
            client = await home.client(front.url)
            folder = await client.pull()
            with (folder / "weights").open("r+b") as file:
                file.seek(20 * SHARD)
                file.write(b"damaged")
            await home.publish(2, {"weights": change(data, 9)})
            assert read_files(await client.pull(2)) == {"weights": change(data, 9)}
            assert front.list_shards("delta") == [0]
            assert len(front.list_shards("full")) > 30
            assert any("delta" in note for note in home.notes)

    run(work)


def test_a_parent_that_was_published_anew_is_not_built_on(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            front = await home.front()
            data = make_bytes(30 * SHARD, 1)
            await home.publish(1, {"weights": data})
            client = await home.client(front.url)
            await client.pull()
            await home.publish(2, {"weights": change(data, 9)})
            await home.publish(1, {"weights": change(data, 5)})
            await until(lambda: client.store.find(1).serial == home.store.find(1).serial)
            assert (await client.pull(1)).name == "v1"
            assert read_files(await client.pull(2)) == {"weights": change(data, 9)}
            assert front.list_shards("delta") == []

    run(work)


def test_deltas_can_be_turned_off(basin: Any, run: Any, make_bytes: Any, read_files: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            front = await home.front()
            data = make_bytes(30 * SHARD, 1)
            await home.publish(1, {"weights": data})
            client = await home.client(front.url, deltas=False)
            await client.pull()
            await home.publish(2, {"weights": change(data, 9)})
            assert read_files(await client.pull(2)) == {"weights": change(data, 9)}
            assert front.list_shards("delta") == [] and len(front.list_shards("full")) == 60

    run(work)


def test_an_interrupted_pull_fetches_only_what_is_missing(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(40 * SHARD, 1)}
            await home.publish(1, files)
            gate = asyncio.Event()
            slow = await home.front(hold_shards(17, gate))
            first = await home.client(slow.url)
            pulled = asyncio.create_task(first.pull())
            await until(lambda: first.store.find(1) is not None and first.store.find(1).full.num_missing == 23)
            pulled.cancel()
            await asyncio.gather(pulled, return_exceptions=True)
            missing = list(first.store.find(1).full.missing())
            await first.close()
            front = await home.front()
            second = await home.client(front.url)
            assert read_files(await second.pull()) == files
            assert sorted(front.list_shards()) == missing and len(missing) == 23

    run(work)


def test_a_complete_version_is_not_fetched_again(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(9 * SHARD, 1)})
            front = await home.front()
            first = await home.client(front.url)
            await first.pull()
            await first.close()
            front.targets.clear()
            second = await home.client(front.url)
            assert (await second.pull()).name == "v1"
            assert (await second.pull(1)).name == "v1"
            assert front.list_shards() == []

    run(work)


def test_one_dead_source_at_the_start_is_no_problem(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(9 * SHARD, 1)})
            client = await home.client("http://127.0.0.1:1", "http://does-not-exist.invalid:80", home.url)
            assert (await client.pull()).name == "v1"
            assert client.progress.sources[0].failures and not client.progress.sources[2].failures

    run(work)


def test_with_no_source_up_the_wait_has_a_name_and_ends_when_one_comes(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(9 * SHARD, 1)})
            front = await home.front()
            url = front.url
            await front.close()
            client = await home.client(url)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: "refused" in (client.progress.waiting_for or ""))
            assert url in (client.progress.waiting_for or "")
            front._server = await asyncio.start_server(front._serve, "127.0.0.1", int(url.rpartition(":")[2]))
            assert (await pulled).name == "v1"

    run(work)


def test_a_source_that_vanishes_in_the_middle_and_returns_is_waited_for_by_name(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(40 * SHARD, 1)}
            await home.publish(1, files)
            gate = asyncio.Event()
            front = await home.front(hold_shards(10, gate))
            url = front.url
            client = await home.client(url)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: client.progress.bytes_done >= 10 * SHARD)
            await front.close()
            await until(lambda: url in (client.progress.waiting_for or ""))
            missing = list(client.store.find(1).full.missing())
            gate.set()
            front.targets.clear()
            front._server = await asyncio.start_server(front._serve, "127.0.0.1", int(url.rpartition(":")[2]))
            assert read_files(await pulled) == files
            assert sorted(front.list_shards()) == missing

    run(work)


def test_a_client_that_is_behind_goes_straight_to_the_newest(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(40 * SHARD, 1)}, parent=None)
            gate = asyncio.Event()
            front = await home.front(hold_shards(0, gate))
            client = await home.client(front.url)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: len(front.list_shards()) > 0)
            files = {"weights": make_bytes(40 * SHARD, 2)}
            await home.publish(2, files, parent=None)
            await until(lambda: any("left for version 2" in note for note in home.notes))
            gate.set()
            folder = await pulled
            assert folder.name == "v2" and read_files(folder) == files
            assert client.store.find(1).full.have_bytes == 0

    run(work)


def test_a_version_nearly_done_is_finished_before_a_newer_one(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(40 * SHARD, 1)}, parent=None)
            gate = asyncio.Event()
            front = await home.front(hold_shards(30, gate))
            client = await home.client(front.url)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: client.progress.bytes_done >= 30 * SHARD)
            await home.publish(2, {"weights": make_bytes(40 * SHARD, 2)}, parent=None)
            await until(lambda: client.store.find(2) is not None)
            await asyncio.sleep(0.1)
            gate.set()
            assert (await pulled).name == "v1"
            assert (await client.pull()).name == "v2"

    run(work)


def test_a_version_deleted_everywhere_is_not_waited_for(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            first = await home.publish(1, {"weights": make_bytes(40 * SHARD, 1)}, parent=None)
            gate = asyncio.Event()
            front = await home.front(hold_shards(20, gate))
            client = await home.client(front.url)
            pulled = asyncio.create_task(client.pull())
            await until(lambda: client.progress.bytes_done >= 20 * SHARD)
            await home.publish(2, {"weights": make_bytes(40 * SHARD, 2)}, parent=None)
            await home.store.drop(first)
            gate.set()
            assert (await pulled).name == "v2"

    run(work)


def test_a_version_asked_for_by_number_that_is_gone_is_an_error_and_one_to_come_is_waited_for(
    basin: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with basin(keep=1) as home:
            await home.publish(3, {"weights": make_bytes(3 * SHARD, 1)})
            client = await home.client(home.url)
            with pytest.raises(GoneError, match="version 2 is not to be had any more; the newest is 3"):
                await client.pull(2)
            later = asyncio.create_task(client.pull(4))
            await until(lambda: client.progress.waiting_for == "version 4 to be published")
            await home.publish(4, {"weights": make_bytes(3 * SHARD, 2)})
            assert (await later).name == "v4"

    run(work)


def test_a_version_is_not_said_to_be_gone_before_every_source_was_heard(
    basin: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "PATIENCE_S", 0.05)

    async def work() -> None:
        async with basin() as home:
            first = await home.publish(1, {"weights": make_bytes(3 * SHARD, 1)})
            second = await home.publish(2, {"weights": make_bytes(3 * SHARD, 2)})
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

            slow, quick = await home.front(hold_list), await home.front(list_newest)
            client = await home.client(quick.url, slow.url, deadlines=home.patient)
            pulled = asyncio.create_task(client.pull(1))
            await until(lambda: client.store.find(2) is not None)
            await asyncio.sleep(0.2)
            assert not pulled.done()
            gate.set()
            assert (await pulled).name == "v1"

    run(work)


def test_a_source_that_cannot_be_reached_is_named_when_a_version_is_gone(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(3, {"weights": make_bytes(3 * SHARD, 1)})
            client = await home.client(home.url, "http://127.0.0.1:1")
            with pytest.raises(GoneError, match=r"the newest is 3 \(not heard: http://127.0.0.1:1\)"):
                await client.pull(2)

    run(work)


HASTY = Deadlines(connect_s=1, head_s=2, rest_s=1, window_s=0.5, stall_s=0.5)
"""So that a version that does not move is left within a test."""


def test_a_version_that_its_publisher_abandoned_is_left_for_one_that_can_be_finished(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            files, data = {"weights": make_bytes(9 * SHARD, 1)}, make_bytes(9 * SHARD, 2)
            await home.publish(1, files)
            for version, hashed in ((2, False), (3, True)):
                entry = await home.begin(version, data)
                if hashed:
                    await home.add_hashes(entry, data)
            client = await home.client(home.url, deadlines=HASTY)
            assert read_files(await client.pull()) == files
            assert [note for note in home.notes if "left for version 2: nothing came" in note]
            assert [note for note in home.notes if "left for version 1: nothing came" in note]
            await home.finish(entry, data)
            follow = client.follow()
            while (folder := await anext(follow)).name != "v3":
                pass
            assert read_files(folder) == {"weights": data}
            await follow.aclose()

    run(work)


def test_a_version_that_does_not_move_is_waited_for_if_there_is_no_other_or_if_it_was_asked_for(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            data = make_bytes(9 * SHARD, 2)
            entry = await home.begin(2, data)
            client = await home.client(home.url, deadlines=HASTY, out="alone")
            alone = asyncio.create_task(client.pull())
            await until(lambda: client.store.find(2) is not None)
            await home.publish(1, {"weights": make_bytes(9 * SHARD, 1)}, parent=None)
            notes: list[str] = []
            asking = await home.client(home.url, deadlines=HASTY, out="asking", note=notes.append)
            asked = asyncio.create_task(asking.pull(2))
            assert (await alone).name == "v1"
            await asyncio.sleep(1.0)
            assert not asked.done() and not notes
            await home.finish(entry, data)
            assert read_files(await asked) == {"weights": data}

    run(work)


def test_wrong_bytes_again_and_again_are_no_sign_of_life(
    basin: Any, run: Any, make_bytes: Any, read_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "BAN_S", (0.01, 0.01))
    monkeypatch.setattr(sources, "COOL_S", (0.01, 0.01))

    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(9 * SHARD, 1)}
            await home.publish(1, files, parent=None)
            await home.publish(2, {"weights": make_bytes(9 * SHARD, 2)}, parent=None)

            async def lie(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/v/2/" not in target or "/full/" not in target:
                    return False
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % SHARD + bytes(SHARD))
                await writer.drain()
                return True

            front = await home.front(lie)
            client = await home.client(front.url, deadlines=HASTY)
            assert read_files(await client.pull()) == files

    run(work)


def test_following_yields_each_new_version_once_and_never_an_older_one(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(3 * SHARD, 1)})
            client = await home.client(home.url)
            follow = client.follow()
            assert (await anext(follow)).name == "v1"
            upcoming = asyncio.ensure_future(anext(follow))
            await until(lambda: client.progress.waiting_for == "a newer version")
            await home.publish(0, {"weights": make_bytes(3 * SHARD, 7)})
            await asyncio.sleep(0.1)
            assert not upcoming.done()
            await home.publish(5, {"weights": make_bytes(3 * SHARD, 5)})
            assert (await upcoming).name == "v5"
            await home.publish(5, {"weights": make_bytes(3 * SHARD, 6)})
            assert (await anext(follow)).name == "v5"
            assert (home.root / "out" / "v5" / "weights").read_bytes() == make_bytes(3 * SHARD, 6)
            await follow.aclose()

    run(work)


def test_shards_are_spread_over_the_sources(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(80 * SHARD, 1)})
            fronts = [await home.front() for _ in range(3)]
            client = await home.client(*(front.url for front in fronts))
            await client.pull()
            counts = [len(front.list_shards()) for front in fronts]
            assert min(counts) > 0 and sum(counts) == 80
            assert [source.shards for source in client.progress.sources] == counts

    run(work)


def test_a_client_without_a_ticket_is_told_so_and_does_not_ask_for_ever(basin: Any, run: Any, make_bytes: Any) -> None:
    async def deny(target: str, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nWWW-Authenticate: Shoal\r\n\r\n")
        return True

    async def work() -> None:
        async with basin() as home:
            data = make_bytes(SHARD, 1)
            await home.publish(1, {"weights": data})
            client = await home.client((await home.front(deny)).url, (await home.front(deny)).url)
            with pytest.raises(ConfigError, match="every source asks for a ticket"):
                await client.pull()
            open_too = await home.client((await home.front(deny)).url, home.url, out="other")
            assert (await open_too.pull() / "weights").read_bytes() == data, "one that serves us is enough"

    run(work)
