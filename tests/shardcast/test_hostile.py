"""One bad source beside an honest one: the honest bytes arrive, and the bad one pays for it."""

import asyncio
import contextlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.keys import Key
from shoal.shardcast import pump, sources
from shoal.shardcast.client import Client
from shoal.shardcast.layout import File
from shoal.shardcast.records import Head, sign_record

SHARD = 1 << 16
SIZE = 20 * SHARD + 1000

Act = Callable[[str, asyncio.StreamWriter], Awaitable[bool]]


def say(status: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode()


def prefer_first(client: Client) -> None:
    """Make the client ask its first source before any other."""
    book = client.puller.crew.book
    book.record_success(book.sources[0], 10**15, 1.0)
    for other in book.sources[1:]:  # one that was not measured yet counts as much as the mean
        book.record_success(other, 1 << 16, 1.0)


def on_shards(answer: Callable[[int, asyncio.StreamWriter], Awaitable[None]]) -> Act:
    """A script for requests for shards of the full blob; everything else is passed on."""

    async def act(target: str, writer: asyncio.StreamWriter) -> bool:
        if "/full/" not in target:
            return False
        index = int(target.rpartition("/")[2])
        await answer(min(SHARD, SIZE - index * SHARD), writer)
        return True

    return act


async def send_wrong(size: int, writer: asyncio.StreamWriter) -> None:
    writer.write(say("200 OK", f"Content-Length: {size}") + os.urandom(size))
    await writer.drain()


async def send_longer(size: int, writer: asyncio.StreamWriter) -> None:
    writer.write(say("200 OK", f"Content-Length: {size + 1}") + os.urandom(size + 1))
    await writer.drain()


async def send_shorter(size: int, writer: asyncio.StreamWriter) -> None:
    writer.write(say("200 OK", f"Content-Length: {size - 1}") + os.urandom(size - 1))
    await writer.drain()


async def send_more_than_said(size: int, writer: asyncio.StreamWriter) -> None:
    writer.write(say("200 OK", f"Content-Length: {size}") + os.urandom(size + 5000))
    await writer.drain()


async def send_empty(size: int, writer: asyncio.StreamWriter) -> None:
    writer.write(say("200 OK", "Content-Length: 0"))
    await writer.drain()


async def send_half(size: int, writer: asyncio.StreamWriter) -> None:
    writer.write(say("200 OK", f"Content-Length: {size}") + os.urandom(size // 2))
    await writer.drain()


async def send_range(size: int, writer: asyncio.StreamWriter) -> None:
    writer.write(say("206 Partial Content", f"Content-Length: {size}", f"Content-Range: bytes 0-{size - 1}/{size}"))
    writer.write(os.urandom(size))
    await writer.drain()


async def send_one_byte(size: int, writer: asyncio.StreamWriter) -> None:
    writer.write(say("200 OK", f"Content-Length: {size}") + b"x")
    await writer.drain()
    await asyncio.sleep(3600)


async def send_nothing(size: int, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def send_drops(size: int, writer: asyncio.StreamWriter) -> None:
    writer.write(say("200 OK", f"Content-Length: {size}"))
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def send_chunks_for_ever(size: int, writer: asyncio.StreamWriter) -> None:
    writer.write(say("200 OK", "Transfer-Encoding: chunked"))
    while True:
        writer.write(b"1000\r\n" + bytes(4096) + b"\r\n")
        await writer.drain()


async def send_head_for_ever(size: int, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: " + b"x" * 1000 + b"\r\n")
        await writer.drain()


async def send_gzip(size: int, writer: asyncio.StreamWriter) -> None:
    writer.write(say("200 OK", f"Content-Length: {size}", "Content-Encoding: gzip") + os.urandom(size))
    await writer.drain()


async def send_noise(size: int, writer: asyncio.StreamWriter) -> None:
    writer.write(os.urandom(5000))
    await writer.drain()


async def send_busy(size: int, writer: asyncio.StreamWriter) -> None:
    writer.write(say("503 Service Unavailable", "Retry-After: 999999", "Content-Length: 0"))
    await writer.drain()


@pytest.mark.parametrize(
    "answer",
    [
        send_wrong,
        send_longer,
        send_shorter,
        send_more_than_said,
        send_empty,
        send_half,
        send_range,
        send_one_byte,
        send_nothing,
        send_drops,
        send_chunks_for_ever,
        send_head_for_ever,
        send_gzip,
        send_noise,
        send_busy,
    ],
)
def test_a_bad_source_costs_only_itself(answer: Any, basin: Any, run: Any, make_bytes: Any, read_files: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(SIZE, 1)}
            await home.publish(1, files)
            bad = await home.front(on_shards(answer))
            good = await home.front()
            client = await home.client(bad.url, good.url)
            prefer_first(client)
            before = sorted(home.root.iterdir())
            folder = await client.pull()
            assert read_files(folder) == files
            assert sorted(home.root.iterdir()) == before
            first, second = client.progress.sources
            assert bad.list_shards() and first.shards == 0
            # One that says nothing may be overtaken by the other source before its time is up.
            assert first.failures or answer is send_nothing
            assert second.failures == 0 and second.wrong == 0

    run(work)


def test_wrong_bytes_are_blamed_on_who_sent_them_and_nobody_else(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(SIZE, 1)})
            bad = await home.front(on_shards(send_wrong))
            client = await home.client(bad.url, home.url, in_flight=1)
            prefer_first(client)
            await client.pull()
            first, second = client.progress.sources
            assert first.wrong == len(bad.list_shards()) >= 1
            assert second.wrong == second.failures == 0
            assert any("wrong shard" in note for note in home.notes)

    run(work)


def test_a_redirect_is_never_followed(basin: Any, run: Any, make_bytes: Any, read_files: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(SIZE, 1)}
            await home.publish(1, files)
            trap = await home.front()

            async def send_elsewhere(size: int, writer: asyncio.StreamWriter) -> None:
                location = f"Location: {trap.url}/v/1/{home.store.find(1).digest[:16]}/full/0"
                writer.write(say("302 Found", location, "Content-Length: 0"))
                await writer.drain()

            bad = await home.front(on_shards(send_elsewhere))
            client = await home.client(bad.url, home.url)
            prefer_first(client)
            assert read_files(await client.pull()) == files
            assert trap.targets == []
            assert "redirect" in client.progress.sources[0].reason

    run(work)


def test_a_source_that_dies_in_the_middle_is_continued_by_another(basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin(shard_size=1 << 20) as home:
            data = make_bytes(1 << 20, 3)
            entry = await home.publish(1, {"weights": data})

            async def send_right_half(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/full/" not in target:
                    return False
                writer.write(say("200 OK", f"Content-Length: {1 << 20}") + data[: 1 << 19])
                await writer.drain()
                await asyncio.sleep(0.3)
                return True

            ranges = []

            async def note_range(target: str, writer: asyncio.StreamWriter) -> bool:
                ranges.append(target)
                return False

            bad, good = await home.front(send_right_half), await home.front(note_range)
            client = await home.client(bad.url, good.url)
            prefer_first(client)
            before = home.server.registry.render_text()
            folder = await client.pull()
            assert (folder / "weights").read_bytes() == data
            assert bad.list_shards() == [0] and good.list_shards() == [0]
            # Half of the shard came from each: the honest server answered 206.
            assert b'status="206"} 1' in home.server.registry.render_text()
            assert b'status="206"' not in before
            assert entry.version == 1

    run(work)


def test_a_wrong_first_half_is_not_blamed_on_who_continued_it_and_not_continued_again(
    basin: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "COOL_S", (0.0, 0.0))
    monkeypatch.setattr(pump, "FIRST_LATE_S", 600.0)  # nor is it asked for elsewhere because the machine is slow

    async def work() -> None:
        async with basin(shard_size=1 << 20) as home:
            data = make_bytes(1 << 20, 3)
            await home.publish(1, {"weights": data})

            async def send_wrong_half(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/full/" not in target:
                    return False
                writer.write(say("200 OK", f"Content-Length: {1 << 20}") + bytes(1 << 19))
                await writer.drain()
                await asyncio.sleep(0.01)
                return True

            bad, good = await home.front(send_wrong_half), await home.front()
            client = await home.client(bad.url, good.url, deadlines=home.patient)
            prefer_first(client)
            client.puller.crew.rng = random.Random(0)  # with one draw in a hundred the bad one is asked once
            folder = await client.pull()
            assert (folder / "weights").read_bytes() == data
            first, second = client.progress.sources
            assert first.failures >= 2 and first.wrong == 0
            assert second.failures == second.wrong == 0
            # One mixture, and then the whole shard from one source.
            assert good.list_shards() == [0, 0]
            assert b'status="206"} 1\n' in home.server.registry.render_text()

    run(work)


def forge_line(line: bytes) -> bytes:
    """The same line with another hash or size in it, and its old signature."""
    data = json.loads(line)
    body = data["body"]
    if body["kind"] == "hashes":
        body["hashes"][0] = "00" * 32
    else:
        body["serial" if body["kind"] == "head" else "n"] += 1
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def on_lines(part: str, lines: Callable[[], list[bytes]]) -> Act:
    async def act(target: str, writer: asyncio.StreamWriter) -> bool:
        if part not in target:
            return False
        body = b"".join(lines())
        writer.write(say("200 OK", f"Content-Length: {len(body)}") + body)
        await writer.drain()
        return True

    return act


@pytest.mark.parametrize("part", ["/versions", "/manifest"])
def test_a_forged_manifest_is_refused_and_the_honest_one_read(
    part: str, basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(SIZE, 1)}
            entry = await home.publish(1, files)

            def forge() -> list[bytes]:
                first = 0 if part == "/versions" else 1
                return [forge_line(line) for line in entry.log.lines[first:][:1]]

            bad = await home.front(on_lines(part, forge))
            client = await home.client(bad.url, home.url)
            prefer_first(client)
            assert read_files(await client.pull()) == files
            wrong = client.progress.sources[0].wrong
            assert bool(wrong) == any("forged" in note for note in home.notes)
            assert part == "/manifest" or wrong
            assert client.progress.sources[1].wrong == 0

    run(work)


def test_a_version_of_another_run_or_key_is_refused(basin: Any, run: Any, make_bytes: Any, read_files: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(SIZE, 1)}
            await home.publish(1, files)
            head = Head(
                run="another",
                version=9,
                serial=10**19 - 1,
                shard_size=SHARD,
                files=(File("w", 5),),
                parent=None,
                anchor=True,
            )
            for key in (home.key, Key.generate()):
                line = sign_record(key, "", 0, head)
                bad = await home.front(on_lines("/versions", lambda line=line: [line + b"\n"]))
                client = await home.client(bad.url, home.url, out=f"out-{key.public[:4]}")
                assert read_files(await client.pull()) == files
                assert client.progress.sources[0].wrong >= 1
                assert [entry.version for entry in client.store.entries()] == [1]

    run(work)


def test_a_replayed_head_of_a_replaced_version_is_not_taken(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            old = await home.publish(1, {"weights": make_bytes(SIZE, 1)})
            replayed = old.log.lines[0] + b"\n"
            files = {"weights": make_bytes(SIZE, 2)}
            await home.publish(1, files)
            bad = await home.front(on_lines("/versions", lambda: [replayed]))
            client = await home.client(bad.url, home.url)
            assert read_files(await client.pull()) == files
            # The other order: the old one is known first, and gives way.
            late = await home.client(bad.url, out="late")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await late.pull()
            assert not (home.root / "late" / "v1").exists()

    run(work)


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/b", "nul\0", "x" * 10_000, ".hidden", ""])
def test_a_signed_head_with_a_dangerous_name_writes_nothing(name: str, basin: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(SIZE, 1)})
            head = Head(
                run="reef", version=2, serial=2**62, shard_size=SHARD, files=(File(name, 5),), parent=None, anchor=True
            )
            line = sign_record(home.key, "", 0, head)
            bad = await home.front(on_lines("/versions", lambda: [line + b"\n"]))
            client = await home.client(bad.url, home.url)
            before = list_tree(home.root)
            folder = await client.pull()
            assert folder.name == "v1"
            assert client.progress.sources[0].wrong >= 1
            new = {path for path in list_tree(home.root) - before if not path.is_relative_to(home.root / "out")}
            assert new == set()

    run(work)


def list_tree(root: Path) -> set[Path]:
    return set(root.rglob("*"))


def test_a_version_replaced_while_it_is_fetched_ends_in_the_new_one(
    basin: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with basin() as home:
            await home.publish(1, {"weights": make_bytes(SIZE, 1)})
            files = {"weights": make_bytes(SIZE, 2)}
            seen = 0

            async def replace(target: str, writer: asyncio.StreamWriter) -> bool:
                nonlocal seen
                seen += "/full/" in target
                if seen == 5:
                    seen += 1
                    await home.publish(1, files)
                return False

            front = await home.front(replace)
            client = await home.client(front.url, in_flight=2)
            while read_files(await client.pull()) != files:
                await asyncio.sleep(0.01)
            assert sorted(path.name for path in (home.root / "out").iterdir()) == [".shardcast", "latest", "v1"]

    run(work)


def flood(listener: socket.socket, target: bytes, ended: threading.Event) -> None:
    """A source in a thread of its own that answers one target in one-byte chunks, as fast as they are taken."""
    listener.settimeout(0.1)
    until = time.monotonic() + 10
    while time.monotonic() < until and not ended.is_set():
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            continue
        with sock, contextlib.suppress(OSError):
            sock.settimeout(1)
            if target in sock.recv(4096):
                sock.sendall(say("200 OK", "Transfer-Encoding: chunked"))
                while time.monotonic() < until and not ended.is_set():
                    sock.sendall(b"1\r\nx\r\n" * 10_000)
    ended.set()


@pytest.mark.parametrize("target", [b"/versions", b"/probe"])
def test_a_source_that_never_stops_sending_tiny_chunks_stops_nobody(
    basin: Any, run: Any, make_bytes: Any, read_files: Any, target: bytes
) -> None:
    async def work() -> None:
        ended = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=flood, args=(listener, target, ended))
            thread.start()
            try:
                async with basin() as home:
                    files = {"weights": make_bytes(SIZE, 1)}
                    await home.publish(1, files)
                    client = await home.client(f"http://127.0.0.1:{listener.getsockname()[1]}", home.url)
                    assert read_files(await client.pull()) == files
                    assert not ended.is_set(), "the client waited until the source stopped by itself"
            finally:
                ended.set()
                await asyncio.to_thread(thread.join)

    run(work)


def test_a_list_without_end_is_not_read_to_the_end(basin: Any, run: Any, make_bytes: Any, read_files: Any) -> None:
    async def work() -> None:
        async with basin() as home:
            files = {"weights": make_bytes(SIZE, 1)}
            entry = await home.publish(1, files)
            sent = 0

            async def repeat(target: str, writer: asyncio.StreamWriter) -> bool:
                nonlocal sent
                if "/versions" not in target:
                    return False
                writer.write(say("200 OK", "Transfer-Encoding: chunked"))
                line = entry.log.lines[0] + b"\n"
                while True:
                    writer.write(b"%x\r\n%s\r\n" % (len(line), line))
                    await writer.drain()
                    sent += len(line)

            bad = await home.front(repeat)
            client = await home.client(bad.url, home.url)
            assert read_files(await client.pull()) == files
            while not client.progress.sources[0].failures:
                await asyncio.sleep(0.01)
            assert client.progress.sources[0].reason  # too much, or too late where the machine is slow
            assert sent < 1 << 24

    run(work)
