"""Anchors are made by relays from what they hold, and fetched only where that cannot be."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.shardcast import build
from shoal.shardcast import delta as delta_module
from shoal.shardcast.link import Deadlines
from shoal.shardcast.relay import Relay

SHARD = 1 << 16
SIZE = 6 * SHARD
ANCHOR = 8


async def until(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0.005)


def holds_full(relay: Relay, version: int) -> bool:
    entry = relay.store.find(version)
    return entry is not None and entry.complete and entry.full.settled


def holds_delta(relay: Relay, version: int) -> bool:
    entry = relay.store.find(version)
    return entry is not None and entry.delta is not None and entry.delta.settled


def list_fulls(front: Any) -> set[int]:
    """Versions of which a shard of the full blob was asked for."""
    return {int(target.split("/")[2]) for target in front.targets if "/full/" in target}


class Line:
    """Versions that differ a little, published one after the other, each on a relay before the next comes."""

    def __init__(self, home: Any, data: bytes) -> None:
        self.home = home
        self.data = bytearray(data)

    async def publish(self, first: int, last: int, *relays: Relay) -> None:
        for version in range(first, last + 1):
            self.data[version :: SHARD // 2] = bytes(byte ^ version for byte in self.data[version :: SHARD // 2])
            await self.home.publish(version, {"weights": bytes(self.data)})
            for relay in relays:
                await until(lambda: holds_delta(relay, version) or holds_full(relay, version))  # noqa: B023

    @property
    def files(self) -> dict[str, bytes]:
        return {"weights": bytes(self.data)}


def test_over_two_anchors_a_full_blob_crosses_each_link_once(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            line = Line(home, make_bytes(SIZE, 1))
            front = await home.front()
            near = await home.relay(front.url, data="near")
            between = await home.front(upstream=str(near.server.url))
            far = await home.relay(between.url, data="far")
            await line.publish(1, 2 * ANCHOR, near, far)
            for relay in (near, far):
                await until(lambda: holds_full(relay, 2 * ANCHOR))  # noqa: B023
                await until(lambda: relay.store.find(ANCHOR) is None)  # noqa: B023
            assert list_fulls(front) == list_fulls(between) == {1}, "not one shard of an anchor"
            client = await home.client(str(far.server.url))
            assert read_files(await client.pull()) == line.files
            assert client.store.find(2 * ANCHOR).delta.have_bytes == 0, "who joins late gets the anchor in full"
            assert list_fulls(front) == list_fulls(between) == {1}
            assert home.notes == []

    run(work)


def test_deltas_since_the_anchor_before_are_kept_until_the_next_is_made(
    basin: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_builds(monkeypatch)

    async def work() -> None:
        async with basin() as home:
            line = Line(home, make_bytes(SIZE, 1))
            relay = await home.relay(home.url, keep=2)
            await line.publish(1, ANCHOR + 2, relay)
            assert [entry.version for entry in relay.store.entries()] == list(range(1, ANCHOR + 3))
            gate.set()
            await until(lambda: relay.store.find(ANCHOR - 1) is None)
            assert [entry.version for entry in relay.store.entries()] == [ANCHOR, ANCHOR + 1, ANCHOR + 2]

    run(work)


def test_a_request_for_an_anchor_that_is_being_made_waits_for_it(
    basin: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_builds(monkeypatch)

    async def work() -> None:
        async with basin() as home:
            line = Line(home, make_bytes(SIZE, 1))
            front = await home.front()
            relay = await home.relay(front.url)
            await line.publish(1, ANCHOR, relay)
            target = f"/v/{ANCHOR}/{relay.store.find(ANCHOR).digest[:16]}/full/3"
            asked = asyncio.create_task(home.get(relay.server.url, target))
            await asyncio.sleep(0.2)
            assert not asked.done()
            gate.set()
            answer = await asked
            assert answer.status == 200 and answer.body == bytes(line.data)[3 * SHARD : 4 * SHARD]
            assert list_fulls(front) == {1}

    run(work)


@pytest.mark.parametrize("place", ["delta", "base"])
def test_a_damaged_file_on_the_way_means_fetching(
    basin: Any, run: Any, make_bytes: Any, read_files: Any, place: str
) -> None:
    async def work() -> None:
        async with basin() as home:
            line = Line(home, make_bytes(SIZE, 1))
            front = await home.front()
            relay = await home.relay(front.url)
            await line.publish(1, ANCHOR - 1, relay)
            damaged = (
                relay.store.find(1).full.path_of("weights") if place == "base" else relay.store.find(4).delta.folder
            )
            flip_byte(damaged)
            await line.publish(ANCHOR, ANCHOR, relay)
            await until(lambda: holds_full(relay, ANCHOR))
            assert list_fulls(front) == {1, ANCHOR}
            assert any(f"version {ANCHOR}" in note and "fetched" in note for note in home.notes)
            client = await home.client(str(relay.server.url))
            assert read_files(await client.pull()) == line.files
            await line.publish(ANCHOR + 1, 2 * ANCHOR, relay)
            await until(lambda: holds_full(relay, 2 * ANCHOR))
            assert list_fulls(front) == {1, ANCHOR}, "the next one is made again"

    run(work)


@pytest.mark.parametrize("moment", ["building", "hashing"])
def test_a_relay_killed_while_it_makes_an_anchor_makes_it_after_the_start(
    basin: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    gate = hold_builds(monkeypatch)

    async def work() -> None:
        async with basin() as home:
            line = Line(home, make_bytes(SIZE, 1))
            front = await home.front()
            relay = await home.relay(front.url)
            await line.publish(1, ANCHOR, relay)
            folder = relay.store.find(ANCHOR).folder
            await until((folder / "built").exists)
            leave_behind(folder, bytes(line.data), marked=3 if moment == "hashing" else 0)
            gate.set()
            await relay.close()
            again = await home.relay(front.url)
            await until(lambda: holds_full(again, ANCHOR))
            assert again.store.find(ANCHOR).full.path_of("weights").read_bytes() == bytes(line.data)
            assert not (folder / "built").exists()
            assert list_fulls(front) == {1}

    run(work)


def test_without_room_for_two_full_blobs_the_anchor_is_fetched(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            line = Line(home, make_bytes(SIZE, 1))
            front = await home.front()
            relay = await home.relay(front.url, max_bytes=SIZE + SIZE // 2)
            await line.publish(1, ANCHOR, relay)
            await until(lambda: holds_full(relay, ANCHOR))
            assert list_fulls(front) == {1, ANCHOR}
            assert relay.store.used_bytes <= SIZE + SIZE // 2

    run(work)


def test_a_delta_that_never_comes_is_not_waited_for(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            line = Line(home, make_bytes(SIZE, 1))

            async def swallow(target: str, writer: asyncio.StreamWriter) -> bool:
                if f"/v/{ANCHOR - 1}/" in target and "/delta/" in target:
                    await asyncio.sleep(60)
                return False

            front = await home.front(swallow)
            relay = await home.relay(front.url, deadlines=Deadlines(stall_s=0.5))
            await line.publish(1, ANCHOR - 2, relay)
            await line.publish(ANCHOR - 1, ANCHOR)
            await until(lambda: holds_full(relay, ANCHOR))
            assert list_fulls(front) == {1, ANCHOR}

    run(work)


def hold_builds(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Relays build nothing before the event is set; what they have begun by then is a folder with a file in it."""
    gate, build_files = threading.Event(), build.build_files

    def held(base: Any, deltas: Any, full: Any, built: Path, halt: threading.Event) -> None:
        built.mkdir(exist_ok=True)
        (built / "weights").write_bytes(b"half")
        gate.wait(60)
        if halt.is_set():
            raise delta_module.DeltaError("stopped")
        build_files(base, deltas, full, built, halt)

    monkeypatch.setattr(build, "build_files", held)
    return gate


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def leave_behind(folder: Path, data: bytes, *, marked: int) -> None:
    """What a kill leaves after the files were put in their place and so many shards were hashed."""
    if marked:
        (folder / "full.part").mkdir()
        (folder / "full.part" / "weights").write_bytes(data)
        (folder / "full.have").write_bytes(b"\1" * marked + bytes(len(data) // SHARD - marked))
