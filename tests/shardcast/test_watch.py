import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import DiskError
from shoal.shardcast import entry as entry_module
from shoal.shardcast import relay as relay_module
from shoal.shardcast import watch
from shoal.shardcast.errors import StaleError
from shoal.shardcast.link import SourceError
from shoal.shardcast.watch import LINE_BYTES, read_lines

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


def test_between_two_lines_the_others_have_a_turn() -> None:
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
    with pytest.raises(SourceError, match="middle of a line"):
        read(b"a\nb")
    with pytest.raises(SourceError, match="without end"):
        read(b"x" * (LINE_BYTES + 1))
    with pytest.raises(SourceError, match="more than 10 bytes"):
        read(b"123\n", b"567\n", b"90\n", max_bytes=10)


def test_a_manifest_that_falls_silent_is_read_on_elsewhere(
    basin: Any, run: Any, make_bytes: Any, read_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SILENCE_S", 0.2)

    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(9 * SHARD, 1)}

            async def fall_silent(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/manifest" not in target:
                    return False
                entry = home.store.find(1)
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

            await home.publish(1, files)
            silent, good = await home.front(fall_silent), await home.front(be_second)
            client = await home.client(silent.url, good.url)
            assert read_files(await client.pull()) == files
            assert client.progress.sources[0].wrong == 0

    run(work)


def test_a_version_that_is_not_wanted_any_more_is_nobodys(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            for version in (1, 2, 3, 4):
                await home.publish(version, {"weights": make_bytes(SHARD, version)}, parent=None)
            front = await home.front()
            client = await home.client(front.url, keep=1)
            source = client.puller.crew.book.sources[0]
            await until(lambda: source.listed)
            assert source.heads >= {entry.digest for entry in client.store.entries()}
            await home.publish(0, {"weights": make_bytes(SHARD, 9)}, parent=None)
            stale = home.store.find(0).digest
            await until(lambda: sum("/versions" in target for target in front.targets) >= 3)
            assert stale not in source.heads

    run(work)


def test_a_source_that_took_a_version_back_is_not_asked_for_it(
    basin: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "RELIST_S", 0.05)
    monkeypatch.setattr(watch, "POLL_S", 1)

    async def work() -> None:
        async with basin() as home:
            first = await home.publish(1, {"weights": make_bytes(3 * SHARD, 1)})
            await home.publish(2, {"weights": make_bytes(3 * SHARD, 2)})
            client = await home.client(home.url)
            book = client.puller.crew.book
            await until(lambda: [entry.log.ended for entry in client.store.entries()] == [True, True])
            await until(lambda: len(book.sources[0].heads) == 2)
            await home.store.drop(first)
            await until(lambda: len(book.sources[0].heads) == 1)
            assert book.list_holders(first.digest) == []

    run(work)


def test_a_version_in_the_store_has_its_source_at_once(
    basin: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sees a head in the store, in the middle of a list, also finds who announced it."""
    seen: list[bool] = []

    async def work() -> None:
        async with basin() as home:
            for version in (1, 2, 3):
                await home.publish(version, {"weights": make_bytes(SHARD, version)}, parent=None)
            client = await home.client(home.url, keep=5)
            book, store = client.puller.crew.book, client.store

            async def look() -> None:
                known = 0
                while known < 3:
                    await store.changed.wait()
                    known = len(store.entries())
                    seen.extend(bool(book.list_holders(entry.digest)) for entry in store.entries())

            looking = asyncio.create_task(look())
            await looking
            assert seen and all(seen)

    original = watch.Watcher._adopt

    async def dawdle(self: Any, *args: Any) -> None:
        await asyncio.sleep(0.02)
        await original(self, *args)

    monkeypatch.setattr(watch.Watcher, "_adopt", dawdle)
    run(work)


def test_a_manifest_being_read_takes_no_place_in_the_draw(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            entry = await home.publish(1, {"weights": make_bytes(3 * SHARD, 1)})
            gate = asyncio.Event()

            async def hold(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/manifest" in target:
                    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                    await writer.drain()
                if "/manifest" in target or "/full/" in target:
                    await gate.wait()
                return "/manifest" in target

            front = await home.front(hold)
            client = await home.client(front.url, deadlines=home.patient)
            source = client.puller.crew.book.sources[0]
            await until(lambda: any("/manifest" in target for target in front.targets))
            await asyncio.sleep(0.05)
            assert source.busy == 0
            with client.puller.pump.urge(client.store.find_digest(entry.digest), "full", 1, "peer"):
                await until(lambda: len(front.list_shards()) == 1)
                assert source.busy == 1

    run(work)


def test_a_source_that_answers_at_once_without_news_is_left_alone_for_a_while(
    basin: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            entry = await home.publish(1, {"weights": make_bytes(3 * SHARD, 1)})

            async def hurry(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/versions" not in target:
                    return False
                body = b"" if "after" in target else entry.log.lines[0] + b"\n"
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                await writer.drain()
                return True

            front = await home.front(hurry)
            client = await home.client(front.url)
            await client.pull()
            await until(lambda: "without news" in client.progress.sources[0].reason)
            await asyncio.sleep(1.0)
            assert sum("/versions" in target for target in front.targets) < 20

    run(work)


def refuse_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, line: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(entry_module.Entry, "_write_line", refuse)


def test_a_client_whose_disk_takes_no_manifest_says_so(
    basin: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(3 * SHARD, 1)})
            with monkeypatch.context() as patch:
                refuse_lines(patch)
                client = await home.client(home.url)
                with pytest.raises(DiskError, match="No space left"):
                    await client.pull()

    run(work)


async def adopt_again(store: Any, head: bytes) -> None:
    """Take a version back that was just dropped, as soon as nobody reads it any more."""
    while True:
        try:
            await store.adopt(head)
        except StaleError:
            await asyncio.sleep(0.01)
        else:
            return


def test_a_relay_whose_disk_takes_no_manifest_serves_on_and_tries_again(
    basin: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "DISK_PAUSE_S", 0.3)

    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(3 * SHARD, 1)}
            await home.publish(1, files)
            relay = await home.relay(home.url)
            await until(lambda: relay.store.find(1) is not None and relay.store.find(1).complete)
            second = await home.publish(2, {"weights": make_bytes(3 * SHARD, 2)}, parent=None)
            await until(lambda: relay.store.find(2) is not None and relay.store.find(2).complete)
            with monkeypatch.context() as patch:
                await relay.store.drop(relay.store.find(2))
                refuse_lines(patch)
                head = second.log.lines[0]
                await adopt_again(relay.store, head)
                await until(lambda: any("no new versions" in note for note in home.notes))
                answer = await home.get(relay.server.url, f"/v/1/{home.store.find(1).digest[:16]}/full/0")
                assert answer.body == files["weights"][:SHARD]
            await until(lambda: relay.store.find(2) is not None and relay.store.find(2).complete)

    run(work)
