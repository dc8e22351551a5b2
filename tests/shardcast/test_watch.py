import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

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
