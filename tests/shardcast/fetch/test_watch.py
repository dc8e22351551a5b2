import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import DiskError
from shoal.shardcast import relay as relay_module
from shoal.shardcast.errors import StaleError
from shoal.shardcast.fetch import watch
from shoal.shardcast.fetch.connection import UpstreamError
from shoal.shardcast.fetch.watch import LINE_BYTES, read_lines
from shoal.shardcast.store import store as store_module

SHARD = 1 << 16


async def until(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0.005)


class FakeAnswer:
    def __init__(self, *pieces: bytes) -> None:
        self._pieces = [*pieces, b""]

    async def read_piece(self, timeout_s: float) -> bytes:
        return self._pieces.pop(0)


def read(*pieces: bytes, max_bytes: int | None = None) -> list[bytes]:
    async def collect(lines: AsyncIterator[bytes]) -> list[bytes]:
        return [line async for line in lines]

    return asyncio.run(collect(read_lines(FakeAnswer(*pieces), 1.0, max_bytes)))  # type: ignore[arg-type]


def test_lines_are_put_together_from_pieces() -> None:
    assert read(b"a", b"b\nc", b"\n", b"d\n\ne\n") == [b"ab\n", b"c\n", b"d\n", b"\n", b"e\n"]
    assert read() == []


@given(st.binary(max_size=300).map(lambda data: data.replace(b"x", b"\n")), st.lists(st.integers(1, 20)))
def test_lines_do_not_depend_on_how_they_come(data: bytes, sizes: list[int]) -> None:
    pieces, rest = [], data + b"\n"
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    expected = [line + b"\n" for line in (data + b"\n").split(b"\n")[:-1]]
    assert read(*(piece for piece in [*pieces, rest] if piece)) == expected


def test_a_long_line_in_tiny_pieces_is_not_searched_over_and_over() -> None:
    class Piece(bytes):
        searched = 0

        def split(self, *args: Any) -> list[bytes]:
            Piece.searched += len(self)
            return super().split(*args)

    assert read(*[Piece(b"x")] * 5000, Piece(b"\n")) == [b"x" * 5000 + b"\n"]
    assert Piece.searched == 5001


def test_between_two_lines_other_tasks_run() -> None:
    async def work() -> int:
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        others = asyncio.create_task(take_turns())
        async for _ in read_lines(FakeAnswer(b"line\n" * 100), 1.0, None):  # type: ignore[arg-type]
            pass
        others.cancel()
        return turns

    assert asyncio.run(work()) >= 100


def test_a_torn_an_endless_or_a_too_long_body_is_the_sources_fault() -> None:
    with pytest.raises(UpstreamError, match="middle of a line"):
        read(b"a\nb")
    with pytest.raises(UpstreamError, match="overlong line"):
        read(b"x" * (LINE_BYTES + 1))
    with pytest.raises(UpstreamError, match="more than 10 bytes"):
        read(b"123\n", b"567\n", b"90\n", max_bytes=10)


def test_a_manifest_that_falls_silent_is_read_on_elsewhere(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SILENCE_S", 0.2)

    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(9 * SHARD, 1)}

            async def fall_silent(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/manifest" not in target:
                    return False
                entry = net.store.find(1)
                await until(lambda: entry.log.ended)
                line = entry.log.lines[1] + b"\n" if target.endswith("from=1") else b""
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                writer.write(b"%x\r\n%s\r\n" % (len(line), line) if line else b"")
                await writer.drain()
                await asyncio.sleep(3600)
                return True

            async def be_second(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/versions" in target:
                    await until(lambda: any("/manifest" in target for target in silent.targets))
                return False

            await net.publish(1, files)
            silent, good = await net.proxy(fall_silent), await net.proxy(be_second)
            client = await net.client(silent.url, good.url)
            assert read_files(await client.pull()) == files
            assert client.progress.upstreams[0].wrong == 0

    run(work)


def test_a_version_that_is_no_longer_wanted_is_attributed_to_nobody(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            for version in (1, 2, 3, 4):
                await net.publish(version, {"weights": make_bytes(SHARD, version)}, delta=False)
            proxy = await net.proxy()
            client = await net.client(proxy.url, keep=1)
            source = client.puller.upstreams.all[0]
            await until(lambda: source.listed)
            assert source.announced >= {entry.digest for entry in client.store.entries()}
            await net.publish(0, {"weights": make_bytes(SHARD, 9)}, delta=False)
            stale = net.store.find(0).digest
            await until(lambda: sum("/versions" in target for target in proxy.targets) >= 3)
            assert stale not in source.announced

    run(work)


def test_a_source_that_took_a_version_back_is_not_asked_for_it(
    open_network: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "RELIST_S", 0.05)
    monkeypatch.setattr(watch, "POLL_S", 1)

    async def work() -> None:
        async with open_network() as net:
            first = await net.publish(1, {"weights": make_bytes(3 * SHARD, 1)})
            await net.publish(2, {"weights": make_bytes(3 * SHARD, 2)})
            client = await net.client(net.url)
            table = client.puller.upstreams
            await until(lambda: [entry.log.ended for entry in client.store.entries()] == [True, True])
            await until(lambda: len(table.all[0].announced) == 2)
            await net.store.drop(first)
            await until(lambda: len(table.all[0].announced) == 1)
            assert table.list_holders(first.digest) == []

    run(work)


def test_a_version_in_the_store_has_its_source_at_once(
    open_network: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that is in the store, in the middle of a list, already has its upstream."""
    seen: list[bool] = []

    async def work() -> None:
        async with open_network() as net:
            for version in (1, 2, 3):
                await net.publish(version, {"weights": make_bytes(SHARD, version)}, delta=False)
            client = await net.client(net.url, keep=5)
            table, store = client.puller.upstreams, client.store

            async def look() -> None:
                known = 0
                while known < 3:
                    await store.changed.wait()
                    known = len(store.entries())
                    seen.extend(bool(table.list_holders(entry.digest)) for entry in store.entries())

            looking = asyncio.create_task(look())
            await looking
            assert seen and all(seen)

    original = watch.Watcher._adopt

    async def respond_slowly(self: Any, *args: Any) -> None:
        await asyncio.sleep(0.02)
        await original(self, *args)

    monkeypatch.setattr(watch.Watcher, "_adopt", respond_slowly)
    run(work)


def test_a_manifest_being_read_takes_no_place_in_the_draw(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            entry = await net.publish(1, {"weights": make_bytes(3 * SHARD, 1)})
            gate = asyncio.Event()

            async def hold(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/manifest" in target:
                    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                    await writer.drain()
                if "/manifest" in target or "/full/" in target:
                    await gate.wait()
                return "/manifest" in target

            proxy = await net.proxy(hold)
            client = await net.client(proxy.url, deadlines=net.patient)
            source = client.puller.upstreams.all[0]
            await until(lambda: any("/manifest" in target for target in proxy.targets))
            await asyncio.sleep(0.05)
            assert source.busy == 0
            with client.puller.scheduler.hold_urgent(client.store.find_digest(entry.digest).full, 1, "peer"):
                await until(lambda: len(proxy.list_shards()) == 1)
                assert source.busy == 1

    run(work)


def test_a_source_that_answers_at_once_without_news_is_left_alone_for_a_while(
    open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            entry = await net.publish(1, {"weights": make_bytes(3 * SHARD, 1)})

            async def respond_at_once(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/versions" not in target:
                    return False
                body = b"" if "after" in target else entry.log.lines[0] + b"\n"
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                await writer.drain()
                return True

            proxy = await net.proxy(respond_at_once)
            client = await net.client(proxy.url)
            await client.pull()
            await until(lambda: "without changes" in client.progress.upstreams[0].reason)
            await asyncio.sleep(1.0)
            assert sum("/versions" in target for target in proxy.targets) < 20

    run(work)


def refuse_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, line: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store_module.StoredVersion, "_write_line", refuse)


def test_a_client_whose_disk_takes_no_manifest_says_so(
    open_network: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(3 * SHARD, 1)})
            with monkeypatch.context() as patch:
                refuse_lines(patch)
                client = await net.client(net.url)
                with pytest.raises(DiskError, match="No space left"):
                    await client.pull()

    run(work)


async def adopt_again(store: Any, head: bytes) -> None:
    """Adopt a just dropped version again, as soon as it has no readers."""
    while True:
        try:
            await store.adopt(head)
        except StaleError:
            await asyncio.sleep(0.01)
        else:
            return


def test_a_relay_whose_disk_takes_no_manifest_keeps_serving_and_retries(
    open_network: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "DISK_PAUSE_S", 0.3)

    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(3 * SHARD, 1)}
            await net.publish(1, files)
            relay = await net.relay(net.url)
            await until(lambda: relay.store.find(1) is not None and relay.store.find(1).complete)
            second = await net.publish(2, {"weights": make_bytes(3 * SHARD, 2)}, delta=False)
            await until(lambda: relay.store.find(2) is not None and relay.store.find(2).complete)
            with monkeypatch.context() as patch:
                await relay.store.drop(relay.store.find(2))
                refuse_lines(patch)
                head = second.log.lines[0]
                await adopt_again(relay.store, head)
                await until(lambda: any("new versions paused" in note for note in net.notes))
                answer = await net.get(relay.server.url, f"/v/1/{net.store.find(1).digest[:16]}/full/0")
                assert answer.body == files["weights"][:SHARD]
            await until(lambda: relay.store.find(2) is not None and relay.store.find(2).complete)

    run(work)
