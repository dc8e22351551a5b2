"""Relays build anchors from what they hold, and fetch them only if that fails."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.shardcast.delta import apply
from shoal.shardcast.delta import delta as delta_module
from shoal.shardcast.fetch.connection import FetchDeadlines
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


def list_fulls(proxy: Any) -> set[int]:
    """Versions of which a shard of the full blob was requested."""
    return {int(target.split("/")[2]) for target in proxy.targets if "/full/" in target}


class Line:
    """Slightly different versions, published in order, each on a relay before the next."""

    def __init__(self, net: Any, data: bytes) -> None:
        self.net = net
        self.data = bytearray(data)

    async def publish(self, first: int, last: int, *relays: Relay) -> None:
        for version in range(first, last + 1):
            self.data[version :: SHARD // 2] = bytes(byte ^ version for byte in self.data[version :: SHARD // 2])
            await self.net.publish(version, {"weights": bytes(self.data)})
            for relay in relays:
                await until(lambda: holds_delta(relay, version) or holds_full(relay, version))  # noqa: B023

    @property
    def files(self) -> dict[str, bytes]:
        return {"weights": bytes(self.data)}


def test_over_two_anchors_a_full_blob_crosses_each_link_once(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            line = Line(net, make_bytes(SIZE, 1))
            proxy = await net.proxy()
            near = await net.relay(proxy.url, data="near")
            between = await net.proxy(upstream=str(near.server.url))
            far = await net.relay(between.url, data="far")
            await line.publish(1, 2 * ANCHOR, near, far)
            for relay in (near, far):
                await until(lambda: holds_full(relay, 2 * ANCHOR))  # noqa: B023
                await until(lambda: relay.store.find(ANCHOR) is None)  # noqa: B023
            assert list_fulls(proxy) == list_fulls(between) == {1}, "not one shard of an anchor"
            client = await net.client(str(far.server.url))
            assert read_files(await client.pull()) == line.files
            assert client.store.find(2 * ANCHOR).delta.have_bytes == 0, "who joins late gets the anchor in full"
            assert list_fulls(proxy) == list_fulls(between) == {1}
            assert net.notes == []

    run(work)


def test_deltas_since_the_previous_anchor_are_kept_until_the_next_is_built(
    open_network: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_builds(monkeypatch)

    async def work() -> None:
        async with open_network() as net:
            line = Line(net, make_bytes(SIZE, 1))
            relay = await net.relay(net.url, keep=2)
            await line.publish(1, ANCHOR + 2, relay)
            assert [entry.version for entry in relay.store.entries()] == list(range(1, ANCHOR + 3))
            gate.set()
            await until(lambda: relay.store.find(ANCHOR - 1) is None)
            assert [entry.version for entry in relay.store.entries()] == [ANCHOR, ANCHOR + 1, ANCHOR + 2]

    run(work)


def test_a_request_for_an_anchor_that_is_being_built_waits_for_it(
    open_network: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold_builds(monkeypatch)

    async def work() -> None:
        async with open_network() as net:
            line = Line(net, make_bytes(SIZE, 1))
            proxy = await net.proxy()
            relay = await net.relay(proxy.url)
            await line.publish(1, ANCHOR, relay)
            target = f"/v/{ANCHOR}/{relay.store.find(ANCHOR).digest[:16]}/full/3"
            asked = asyncio.create_task(net.get(relay.server.url, target))
            await asyncio.sleep(0.2)
            assert not asked.done()
            gate.set()
            answer = await asked
            assert answer.status == 200 and answer.body == bytes(line.data)[3 * SHARD : 4 * SHARD]
            assert list_fulls(proxy) == {1}

    run(work)


@pytest.mark.parametrize("place", ["delta", "base"])
def test_a_damaged_file_in_the_chain_means_fetching(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any, place: str
) -> None:
    async def work() -> None:
        async with open_network() as net:
            line = Line(net, make_bytes(SIZE, 1))
            proxy = await net.proxy()
            relay = await net.relay(proxy.url)
            await line.publish(1, ANCHOR - 1, relay)
            damaged = (
                relay.store.find(1).full.path_of("weights") if place == "base" else relay.store.find(4).delta.folder
            )
            flip_byte(damaged)
            await line.publish(ANCHOR, ANCHOR, relay)
            await until(lambda: holds_full(relay, ANCHOR))
            assert list_fulls(proxy) == {1, ANCHOR}
            assert any(f"version {ANCHOR}" in note and "fetched" in note for note in net.notes)
            client = await net.client(str(relay.server.url))
            assert read_files(await client.pull()) == line.files
            await line.publish(ANCHOR + 1, 2 * ANCHOR, relay)
            await until(lambda: holds_full(relay, 2 * ANCHOR))
            assert list_fulls(proxy) == {1, ANCHOR}, "the next one is made again"

    run(work)


@pytest.mark.parametrize("moment", ["building", "hashing"])
def test_a_relay_killed_while_it_builds_an_anchor_builds_it_after_the_restart(
    open_network: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    gate = hold_builds(monkeypatch)

    async def work() -> None:
        async with open_network() as net:
            line = Line(net, make_bytes(SIZE, 1))
            proxy = await net.proxy()
            relay = await net.relay(proxy.url)
            await line.publish(1, ANCHOR, relay)
            folder = relay.store.find(ANCHOR).folder
            await until((folder / "built").exists)
            leave_behind(folder, bytes(line.data), marked=3 if moment == "hashing" else 0)
            gate.set()
            await relay.close()
            again = await net.relay(proxy.url)
            await until(lambda: holds_full(again, ANCHOR))
            assert again.store.find(ANCHOR).full.path_of("weights").read_bytes() == bytes(line.data)
            assert not (folder / "built").exists()
            assert list_fulls(proxy) == {1}

    run(work)


def test_without_space_for_two_full_blobs_the_anchor_is_fetched(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            line = Line(net, make_bytes(SIZE, 1))
            proxy = await net.proxy()
            relay = await net.relay(proxy.url, max_bytes=SIZE + SIZE // 2)
            await line.publish(1, ANCHOR, relay)
            await until(lambda: holds_full(relay, ANCHOR))
            assert list_fulls(proxy) == {1, ANCHOR}
            assert relay.store.used_bytes <= SIZE + SIZE // 2

    run(work)


def test_a_delta_that_never_comes_is_not_waited_for(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            line = Line(net, make_bytes(SIZE, 1))

            async def swallow(target: str, writer: asyncio.StreamWriter) -> bool:
                if f"/v/{ANCHOR - 1}/" in target and "/delta/" in target:
                    await asyncio.sleep(60)
                return False

            proxy = await net.proxy(swallow)
            relay = await net.relay(proxy.url, deadlines=FetchDeadlines(stall_s=0.5))
            await line.publish(1, ANCHOR - 2, relay)
            await line.publish(ANCHOR - 1, ANCHOR)
            await until(lambda: holds_full(relay, ANCHOR))
            assert list_fulls(proxy) == {1, ANCHOR}

    run(work)


def hold_builds(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Relays build nothing before the event is set; until then the build is a folder with one file."""
    gate, build_files = threading.Event(), apply.build_files

    def held(base: Any, deltas: Any, full: Any, built: Path, halt: threading.Event) -> None:
        built.mkdir(exist_ok=True)
        (built / "weights").write_bytes(b"half")
        gate.wait(60)
        if halt.is_set():
            raise delta_module.DeltaError("stopped")
        build_files(base, deltas, full, built, halt)

    monkeypatch.setattr(apply, "build_files", held)
    return gate


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def leave_behind(folder: Path, data: bytes, *, marked: int) -> None:
    """The state after a kill, when the files are in place and this many shards were hashed."""
    if marked:
        (folder / "full.part").mkdir()
        (folder / "full.part" / "weights").write_bytes(data)
        (folder / "full.have").write_bytes(b"\1" * marked + bytes(len(data) // SHARD - marked))
