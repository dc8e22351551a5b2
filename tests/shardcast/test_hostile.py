"""One bad upstream next to an honest one: the honest bytes arrive, and the bad one is penalised."""

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

import numpy as np
import pytest

from shoal.identity.keys import Key
from shoal.shardcast.client import ShardcastClient
from shoal.shardcast.fetch import scheduler, upstream_stats
from shoal.shardcast.fetch.connection import FetchDeadlines
from shoal.shardcast.fetch.pull import UpstreamShare
from shoal.shardcast.format.layout import File
from shoal.shardcast.format.records import ManifestHead, sign_record
from shoal.util.metrics import render_metrics

SHARD = 1 << 16
SIZE = 20 * SHARD + 1000

Act = Callable[[str, asyncio.StreamWriter], Awaitable[bool]]


def say(status: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode()


def prefer_first(client: ShardcastClient) -> None:
    """Make the client ask its first upstream before any other."""
    table = client.puller.upstreams
    table.record_success(table.all[0], 10**15, 1.0)
    for other in table.all[1:]:  # one without a measurement counts as the mean
        table.record_success(other, 1 << 16, 1.0)


def on_shards(answer: Callable[[int, asyncio.StreamWriter], Awaitable[None]]) -> Act:
    """A script for requests for shards of the full blob; everything else is forwarded."""

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


async def pull_beside(answer: Any, open_network: Any, **options: Any) -> tuple[UpstreamShare, UpstreamShare]:
    """Pull a version from a bad source, asked first, and a good one; return what the client says of each."""
    async with open_network() as net:
        files = {"weights": np.random.default_rng(1).bytes(SIZE)}
        await net.publish(1, files)
        bad = await net.proxy(on_shards(answer))
        good = await net.proxy()
        client = await net.client(bad.url, good.url, **options)
        prefer_first(client)
        before = sorted(net.root.iterdir())
        folder = await client.pull()
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
        assert sorted(net.root.iterdir()) == before
        first, second = client.progress.upstreams
        assert bad.list_shards() and first.shards == 0
        return first, second


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
        send_chunks_for_ever,
        send_head_for_ever,
        send_gzip,
        send_noise,
        send_busy,
    ],
)
def test_a_bad_source_costs_only_itself(answer: Any, open_network: Any, run: Any) -> None:
    async def work() -> None:
        first, second = await pull_beside(answer, open_network, deadlines=FetchDeadlines())
        assert first.failures
        assert second.failures == 0 and second.wrong == 0

    run(work)


@pytest.mark.parametrize("answer", [send_one_byte, send_nothing, send_drops])
def test_a_stalling_source_costs_only_itself(answer: Any, open_network: Any, run: Any) -> None:
    """Deadlines that a test can wait for may also end on a good source while other processes compute."""

    async def work() -> None:
        first, second = await pull_beside(answer, open_network)
        # A silent upstream may be overtaken by the other one before its deadline.
        assert first.failures or answer is send_nothing
        assert second.shards > 0 and second.wrong == 0

    run(work)


def test_wrong_bytes_are_blamed_on_their_sender_and_nobody_else(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(SIZE, 1)})
            bad = await net.proxy(on_shards(send_wrong))
            client = await net.client(bad.url, net.url, in_flight=1)
            prefer_first(client)
            await client.pull()
            first, second = client.progress.upstreams
            assert first.wrong == len(bad.list_shards()) >= 1
            assert second.wrong == second.failures == 0
            assert any("wrong shard" in note for note in net.notes)

    run(work)


def test_a_redirect_is_never_followed(open_network: Any, run: Any, make_bytes: Any, read_files: Any) -> None:
    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(SIZE, 1)}
            await net.publish(1, files)
            trap = await net.proxy()

            async def send_elsewhere(size: int, writer: asyncio.StreamWriter) -> None:
                location = f"Location: {trap.url}/v/1/{net.store.find(1).digest[:16]}/full/0"
                writer.write(say("302 Found", location, "Content-Length: 0"))
                await writer.drain()

            bad = await net.proxy(on_shards(send_elsewhere))
            client = await net.client(bad.url, net.url)
            prefer_first(client)
            assert read_files(await client.pull()) == files
            assert trap.targets == []
            assert "redirect" in client.progress.upstreams[0].reason

    run(work)


def test_a_source_that_dies_in_the_middle_is_continued_by_another(open_network: Any, run: Any, make_bytes: Any) -> None:
    async def work() -> None:
        async with open_network(shard_size=1 << 20) as net:
            data = make_bytes(1 << 20, 3)
            entry = await net.publish(1, {"weights": data})

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

            bad, good = await net.proxy(send_right_half), await net.proxy(note_range)
            client = await net.client(bad.url, good.url)
            prefer_first(client)
            before = render_metrics(net.server.registry)
            folder = await client.pull()
            assert (folder / "weights").read_bytes() == data
            assert bad.list_shards() == [0] and good.list_shards() == [0]
            # Half of the shard came from each: the honest server answered 206.
            assert b'status="206"} 1' in render_metrics(net.server.registry)
            assert b'status="206"' not in before
            assert entry.version == 1

    run(work)


def test_a_wrong_first_half_is_not_blamed_on_the_upstream_that_continued_it_and_not_continued_again(
    open_network: Any, run: Any, make_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_stats, "COOL_S", (0.0, 0.0))
    monkeypatch.setattr(scheduler, "FIRST_LATE_S", 600.0)  # no hedge because the machine is slow

    async def work() -> None:
        async with open_network(shard_size=1 << 20) as net:
            data = make_bytes(1 << 20, 3)
            await net.publish(1, {"weights": data})

            async def send_wrong_half(target: str, writer: asyncio.StreamWriter) -> bool:
                if "/full/" not in target:
                    return False
                writer.write(say("200 OK", f"Content-Length: {1 << 20}") + bytes(1 << 19))
                await writer.drain()
                await asyncio.sleep(0.01)
                return True

            bad, good = await net.proxy(send_wrong_half), await net.proxy()
            client = await net.client(bad.url, good.url, deadlines=net.patient)
            prefer_first(client)
            client.puller.upstreams.rng = random.Random(0)  # with one draw in a hundred the bad one is asked once
            folder = await client.pull()
            assert (folder / "weights").read_bytes() == data
            first, second = client.progress.upstreams
            assert first.failures >= 2 and first.wrong == 0
            assert second.failures == second.wrong == 0
            # One mixture, and then the whole shard from one upstream.
            assert good.list_shards() == [0, 0]
            assert b'status="206"} 1.0\n' in render_metrics(net.server.registry)

    run(work)


def forge_line(line: bytes) -> bytes:
    """The same line with a different hash or size, and its old signature."""
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
    part: str, open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(SIZE, 1)}
            entry = await net.publish(1, files)

            def forge() -> list[bytes]:
                first = 0 if part == "/versions" else 1
                return [forge_line(line) for line in list(entry.log.lines)[first:][:1]]

            bad = await net.proxy(on_lines(part, forge))
            client = await net.client(bad.url, net.url)
            prefer_first(client)
            assert read_files(await client.pull()) == files
            wrong = client.progress.upstreams[0].wrong
            assert bool(wrong) == any("forged" in note for note in net.notes)
            assert part == "/manifest" or wrong
            assert client.progress.upstreams[1].wrong == 0

    run(work)


def test_a_version_of_another_run_or_key_is_refused(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(SIZE, 1)}
            await net.publish(1, files)
            head = ManifestHead(
                run="another",
                version=9,
                serial=10**19 - 1,
                shard_size=SHARD,
                files=(File("w", 5),),
                parent=None,
                anchor=True,
            )
            for key in (net.key, Key.generate()):
                line = sign_record(key, "", 0, head)
                bad = await net.proxy(on_lines("/versions", lambda line=line: [line + b"\n"]))
                client = await net.client(bad.url, net.url, out=f"out-{key.public[:4]}")
                assert read_files(await client.pull()) == files
                assert client.progress.upstreams[0].wrong >= 1
                assert [entry.version for entry in client.store.entries()] == [1]

    run(work)


def test_a_replayed_head_of_a_replaced_version_is_not_taken(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            old = await net.publish(1, {"weights": make_bytes(SIZE, 1)})
            replayed = old.log.lines[0] + b"\n"
            files = {"weights": make_bytes(SIZE, 2)}
            await net.publish(1, files)
            bad = await net.proxy(on_lines("/versions", lambda: [replayed]))
            client = await net.client(bad.url, net.url)
            assert read_files(await client.pull()) == files
            # The other order: the old one is known first, and is replaced.
            late = await net.client(bad.url, out="late")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await late.pull()
            assert not (net.root / "late" / "v1").exists()

    run(work)


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/b", "nul\0", "x" * 10_000, ".hidden", ""])
def test_a_signed_head_with_a_dangerous_name_writes_nothing(
    name: str, open_network: Any, run: Any, make_bytes: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(SIZE, 1)})
            head = ManifestHead(
                run="reef", version=2, serial=2**62, shard_size=SHARD, files=(File(name, 5),), parent=None, anchor=True
            )
            line = sign_record(net.key, "", 0, head)
            bad = await net.proxy(on_lines("/versions", lambda: [line + b"\n"]))
            client = await net.client(bad.url, net.url)
            before = list_tree(net.root)
            folder = await client.pull()
            assert folder.name == "v1"
            assert client.progress.upstreams[0].wrong >= 1
            new = {path for path in list_tree(net.root) - before if not path.is_relative_to(net.root / "out")}
            assert new == set()

    run(work)


def list_tree(root: Path) -> set[Path]:
    return set(root.rglob("*"))


def test_a_version_replaced_while_it_is_fetched_ends_in_the_new_one(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            await net.publish(1, {"weights": make_bytes(SIZE, 1)})
            files = {"weights": make_bytes(SIZE, 2)}
            seen = 0

            async def replace(target: str, writer: asyncio.StreamWriter) -> bool:
                nonlocal seen
                seen += "/full/" in target
                if seen == 5:
                    seen += 1
                    await net.publish(1, files)
                return False

            proxy = await net.proxy(replace)
            client = await net.client(proxy.url, in_flight=2)
            while read_files(await client.pull()) != files:
                await asyncio.sleep(0.01)
            assert sorted(path.name for path in (net.root / "out").iterdir()) == [".shardcast", "latest", "v1"]

    run(work)


def flood(listener: socket.socket, target: bytes, ended: threading.Event) -> None:
    """An upstream in its own thread that sends one target in one-byte chunks, as fast as they are read."""
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
    open_network: Any, run: Any, make_bytes: Any, read_files: Any, target: bytes
) -> None:
    async def work() -> None:
        ended = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=flood, args=(listener, target, ended))
            thread.start()
            try:
                async with open_network() as net:
                    files = {"weights": make_bytes(SIZE, 1)}
                    await net.publish(1, files)
                    client = await net.client(f"http://127.0.0.1:{listener.getsockname()[1]}", net.url)
                    assert read_files(await client.pull()) == files
                    assert not ended.is_set(), "the client waited until the source stopped by itself"
            finally:
                ended.set()
                await asyncio.to_thread(thread.join)

    run(work)


def test_a_list_without_end_is_not_read_to_the_end(
    open_network: Any, run: Any, make_bytes: Any, read_files: Any
) -> None:
    async def work() -> None:
        async with open_network() as net:
            files = {"weights": make_bytes(SIZE, 1)}
            entry = await net.publish(1, files)
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

            bad = await net.proxy(repeat)
            client = await net.client(bad.url, net.url)
            assert read_files(await client.pull()) == files
            while not client.progress.upstreams[0].failures:
                await asyncio.sleep(0.01)
            assert client.progress.upstreams[0].reason  # too much, or too late if the machine is slow
            assert sent < 1 << 24

    run(work)
