import asyncio
import contextlib
import errno
import json
import os
import resource
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.fixtures.shards import write_bytes

import shoal.shardcast.serve.connection as connection_module
from shoal.errors import ConfigError, UnavailableError
from shoal.net.limits import MAX_QUANTUM, Phase, ServeLimits
from shoal.net.sockets import connect
from shoal.shardcast.serve.server import ShardServer
from shoal.shardcast.store.store import VersionStore

SHARD = 1 << 18
TAIL = 1 << 16
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.contextmanager
def allow_sockets(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.asynccontextmanager
async def open_sockets(env, count: int) -> AsyncIterator[list[socket.socket]]:
    """Silent connections."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(await connect(env.url, 10)) for _ in range(count)]


async def read_all(sock: socket.socket) -> bytes:
    """Everything received until the server closes, cleanly or by a reset."""
    answered = b""
    with contextlib.suppress(ConnectionResetError):
        while data := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
            answered += data
    return answered


async def read_until(sock: socket.socket, size: int) -> bytes:
    answered = b""
    while len(answered) < size:
        data = await asyncio.get_running_loop().sock_recv(sock, size - len(answered))
        assert data, "closed early"
        answered += data
    return answered


async def read_head(sock: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += await read_until(sock, 1)
    return head


async def send(sock: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def wait_for(condition) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def read_metrics(env) -> dict[str, float]:
    lines = (await env.get("/metrics")).body.decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def build_get(target: str, *fields: str) -> bytes:
    return "\r\n".join([f"GET {target} HTTP/1.1", "Host: x", *fields, "", ""]).encode()


def test_requests_in_a_pipe_are_answered_in_order_on_one_connection(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        data = make_bytes(3 * SHARD, 1)
        async with open_served_store() as env:
            entry = await env.publish(0, data)
            targets = [env.target(entry, f"full/{index}") for index in (2, 0, 1)]
            last = build_get("/nowhere", "Connection: close")
            answered = await env.say(b"".join(build_get(target) for target in targets) + last)
            for index in (2, 0, 1):
                head, _, answered = answered.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 OK\r\n")
                assert answered[:SHARD] == data[index * SHARD :][:SHARD]
                answered = answered[SHARD:]
            assert answered.startswith(b"HTTP/1.1 404 Not Found\r\n")
            assert (await read_metrics(env))["shoal_accepted_total"] == 2

    run(work)


def test_an_old_client_gets_its_answer_and_the_connection_is_closed(open_served_store, run) -> None:
    async def work() -> None:
        async with open_served_store() as env:
            entry = await env.publish(0, b"abc")
            answered = await env.say(f"GET {env.target(entry, 'full/0')} HTTP/1.0\r\n\r\n".encode())
            assert answered.startswith(b"HTTP/1.1 200 OK\r\n") and answered.endswith(b"\r\n\r\nabc")
            answered = await env.say(f"GET {env.target(entry, 'manifest')} HTTP/1.0\r\n\r\n".encode())
            assert answered.partition(b"\r\n\r\n")[2] == b"".join(line + b"\n" for line in entry.log.lines)

    run(work)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\0" * 20 + b"\r\n\r\n", 400),
        (b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET http://x/healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400),
        (b"GET ../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400),
        (b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 500_000, 431),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"GET /healthz HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"HEAD /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
        (b"DELETE /v/0 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
        (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
        (b"POST /versions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello", 400),
        (b"POST /versions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n" + bytes(100_000), 400),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n", 400),
    ],
)
def test_what_is_not_served_is_refused_once_and_the_connection_closed(
    open_served_store, run, request_bytes, status
) -> None:
    async def work() -> None:
        async with open_served_store() as env:
            answered = await env.say(request_bytes)
            assert answered.startswith(b"HTTP/1.1 %d " % status)
            assert answered.count(b"HTTP/1.1 ") == 1
            assert b"Traceback" not in answered and b"Error" not in answered
            assert (await env.get("/healthz")).status == 200

    run(work)


def test_a_request_smuggled_behind_two_lengths_is_never_answered(open_served_store, run) -> None:
    async def work() -> None:
        async with open_served_store() as env:
            for fields in (
                b"Content-Length: 4\r\nTransfer-Encoding: chunked",
                b"Transfer-Encoding: chunked\r\nContent-Length: 4",
                b"Content-Length: 0\r\nContent-Length: 44",
                b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
            ):
                smuggled = b"POST / HTTP/1.1\r\nHost: x\r\n" + fields + b"\r\n\r\n0\r\n\r\n" + HEALTH
                answered = await env.say(smuggled)
                assert answered.count(b"HTTP/1.1 ") == 1 and b'"ok"' not in answered
                assert answered[9:12] in (b"400", b"501")

    run(work)


def test_a_refusal_reaches_a_client_that_keeps_sending(open_served_store, run) -> None:
    async def work() -> None:
        async with open_served_store() as env, open_sockets(env, 1) as (sock,):
            await send(sock, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n" + bytes(70_000))
            await wait_for(lambda: env.server.metrics.requests.total == 1)
            await send(sock, bytes(20_000))
            await asyncio.sleep(0.01)
            assert (await read_head(sock)).startswith(b"HTTP/1.1 400 ")
            loop = asyncio.get_running_loop()
            while await loop.sock_recv(sock, 1 << 16):  # to a clean end: a reset would raise
                pass

    run(work)


def test_a_request_for_another_protocol_is_answered_in_this_one(open_served_store, run) -> None:
    async def work() -> None:
        async with open_served_store() as env:
            upgrade = build_get("/healthz", "Connection: Upgrade", "Upgrade: websocket")
            answered = await env.say(upgrade + build_get("/healthz", "Connection: close"))
            assert answered.count(b"HTTP/1.1 200 OK") == 2

    run(work)


def test_curl_fetches_whole_shards_and_resumes_in_the_middle(
    open_served_store, run, tmp_path: Path, make_bytes
) -> None:
    async def work() -> None:
        data = make_bytes(2 * SHARD, 1)

        async def fetch(*options: str) -> bytes:
            process = await asyncio.create_subprocess_exec("curl", "-sS", "--fail", *options, stdout=subprocess.PIPE)
            out, _ = await process.communicate()
            assert process.returncode == 0
            return out

        async with open_served_store() as env:
            entry = await env.publish(0, data)
            url = f"{env.url}{env.target(entry, 'full')}"
            assert await fetch(f"{url}/0", f"{url}/1") == data
            (tmp_path / "half").write_bytes(data[:1000])
            await fetch("-C", "-", "-o", str(tmp_path / "half"), f"{url}/0")
            assert (tmp_path / "half").read_bytes() == data[:SHARD]
            assert await fetch("-r", "7-11", f"{url}/1") == data[SHARD + 7 : SHARD + 12]

    run(work)


def test_bytes_are_passed_on_before_the_shard_is_complete_but_never_its_tail(
    open_served_store, run, make_bytes
) -> None:
    async def work() -> None:
        data = make_bytes(SHARD, 1)
        async with open_served_store() as env:
            entry = await env.announce(0, data)
            with entry.full.start(0) as writer, await connect(env.url, 5) as sock:
                await send(sock, build_get(env.target(entry, "full/0")))
                await write_bytes(writer, data[:1000])
                head = await read_head(sock)
                assert head.startswith(b"HTTP/1.1 200 OK") and b"Content-Length: %d\r\n" % SHARD in head
                assert await read_until(sock, 1000) == data[:1000]
                await write_bytes(writer, data[1000:])
                assert await read_until(sock, SHARD - TAIL - 1000) == data[1000 : SHARD - TAIL]
                assert (await read_metrics(env))["shoal_transfers"] == 1
                with pytest.raises(BlockingIOError):
                    sock.recv(1)
                await writer.finish()
                assert await read_until(sock, TAIL) == data[SHARD - TAIL :]
                await send(sock, HEALTH)
                assert (await read_head(sock)).startswith(b"HTTP/1.1 200 OK")
            assert (await read_metrics(env))["shoal_transfers"] == 0

    run(work)


def test_a_writer_that_gives_up_ends_the_answer_short(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        data = make_bytes(SHARD, 1)
        async with open_served_store() as env:
            entry = await env.announce(0, data)
            with entry.full.start(0) as writer:
                await write_bytes(writer, data[:5000])
                asking = asyncio.create_task(env.get(env.target(entry, "full/0")))
                await wait_for(lambda: asking.done() or entry.held)
                await asyncio.sleep(0.02)
                writer.abort()
                answer = await asking
            assert (answer.status, answer.short, answer.body) == (200, True, data[:5000])

    run(work)


def test_bytes_of_two_writers_are_never_in_one_answer(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        good, bad = make_bytes(SHARD, 1), make_bytes(SHARD, 2)
        async with open_served_store() as env:
            entry = await env.announce(0, good)
            first = entry.full.start(0)
            await write_bytes(first, bad[:5000])
            async with open_sockets(env, 1) as (sock,):
                await send(sock, build_get(env.target(entry, "full/0")))
                await read_head(sock)
                await read_until(sock, 5000)
                # All in one step, as it can happen between two checks of the server.
                first.abort()
                with entry.full.start(0), entry.full.path_of("weights").open("r+b") as file:
                    file.write(good)
                    file.flush()
                    entry.full.mark(0)
                assert entry.full.ready(0) == SHARD
                assert await read_all(sock) == b""
            assert (await env.get(env.target(entry, "full/0"))).body == good

    run(work)


def test_a_writer_that_gives_up_while_its_bytes_are_being_sent_stops_them(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        size = 48 << 20  # more than the buffers of both sides hold
        async with open_served_store() as env:
            entry = await env.announce(0, bytes(size), shard_size=size)
            with entry.full.start(0) as writer:
                await write_bytes(writer, bytes(size))
                async with open_sockets(env, 1) as (sock,):
                    await send(sock, build_get(env.target(entry, "full/0")))
                    await read_head(sock)
                    writer.abort()
                    assert len(await read_all(sock)) < size - TAIL

    run(work)


def test_a_writer_that_stalls_ends_the_answer_short(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        data = make_bytes(SHARD, 1)
        async with open_served_store(limits=ServeLimits(stall_seconds=0.05)) as env:
            entry = await env.announce(0, data)
            with entry.full.start(0) as writer:
                await write_bytes(writer, data[:5000])
                answer = await env.get(env.target(entry, "full/0"))
            assert answer.short and answer.body == data[:5000]
            assert (await read_metrics(env))['shoal_cut_total{reason="stalled"}'] == 1

    run(work)


def test_a_file_cut_off_under_us_ends_the_answer_short(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        async with open_served_store() as env:
            entry = await env.publish(0, make_bytes(SHARD, 1))
            with entry.full.path_of("weights").open("r+b") as file:
                file.truncate(1000)
            answer = await env.get(env.target(entry, "full/0"))
            assert (answer.status, answer.short, len(answer.body)) == (200, True, 1000)
            assert env.server.metrics.cut.values == {"file": 1}

    run(work)


def test_a_version_dropped_while_it_is_sent_is_sent_to_its_end(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        size = 32 << 20
        data = make_bytes(size, 1)
        async with open_served_store() as env:
            entry = await env.announce(0, data, shard_size=size)
            with entry.full.start(0) as writer:
                await write_bytes(writer, data)
                await writer.finish()
            async with open_sockets(env, 1) as (sock,):
                await send(sock, build_get(env.target(entry, "full/0")))
                await read_head(sock)
                await env.store.drop(entry)
                assert entry.folder.exists()
                assert await read_until(sock, size) == data
                await wait_for(lambda: not entry.folder.exists())

    run(work)


def test_two_thousand_idle_sockets_and_a_dripped_head_do_not_hinder_an_honest_client(
    open_served_store, run, make_bytes
) -> None:
    async def work() -> None:
        data = make_bytes(4 * SHARD, 1)
        limits = ServeLimits(max_connections=1024, header_seconds=60)
        async with open_served_store(limits=limits) as env:
            entry = await env.publish(0, data)

            async def drip() -> None:
                with await connect(env.url, 5) as sock, contextlib.suppress(OSError):
                    for byte in HEALTH[:-1] * 1000:
                        await send(sock, bytes([byte]))
                        await asyncio.sleep(0.001)

            dripping = asyncio.create_task(drip())
            async with open_sockets(env, 1) as (honest,):
                await send(honest, build_get(env.target(entry, "full/0")))
                await read_head(honest)
                assert await read_until(honest, SHARD) == data[:SHARD]
                async with open_sockets(env, 2000):
                    for index in range(4):
                        assert (await env.get(env.target(entry, f"full/{index}"))).body == data[index * SHARD :][:SHARD]
                    # A client with an earlier request keeps its connection: those without one are evicted first.
                    await send(honest, build_get(env.target(entry, "full/1")))
                    await read_head(honest)
                    assert await read_until(honest, SHARD) == data[SHARD : 2 * SHARD]
                    numbers = await read_metrics(env)
                    assert 1000 < numbers["shoal_connections"] <= 1024
                    assert numbers["shoal_evicted_total"] >= 2000 - 1024
            await dripping  # ended by the server, as the oldest of those without a request

    with allow_sockets(8000):
        run(work)


def test_connections_that_come_all_at_once_stay_within_the_limit(open_served_store, run) -> None:
    async def work() -> None:
        async with open_served_store(limits=ServeLimits(max_connections=10)) as env:
            # Connected while the loop is blocked, so that the server finds them all in one iteration.
            socks = [socket.create_connection(env.server.address, 5) for _ in range(100)]
            await wait_for(lambda: env.server.metrics.accepted.total == 100)
            await wait_for(lambda: len(env.server._tasks) == len(env.server.connections))
            assert len(env.server._tasks) == 10
            assert env.server.metrics.evicted.total == 90
            for sock in socks:
                sock.close()

    run(work)


def test_many_connections_of_one_address_push_out_their_own_idle_ones_only(open_served_store, run) -> None:
    async def work() -> None:
        limits = ServeLimits(per_peer_connections=4, trust_loopback=False)
        async with open_served_store(limits=limits) as env:
            async with open_sockets(env, 20) as socks:
                await wait_for(lambda: len(env.server._tasks) == 4)
                await send(socks[-1], HEALTH)
                assert (await read_head(socks[-1])).startswith(b"HTTP/1.1 200")
                assert await read_all(socks[0]) == b""
            await wait_for(lambda: not env.server._tasks)

    run(work)


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        (ServeLimits(max_connections=2), b"503"),
        (ServeLimits(per_peer_connections=2, trust_loopback=False), b"429"),
    ],
)
def test_when_all_places_are_being_served_a_new_connection_is_told_to_come_back(
    open_served_store, run, make_bytes, limits, status
) -> None:
    async def work() -> None:
        data = make_bytes(SHARD, 1)
        async with open_served_store(limits=limits) as env:
            entry = await env.announce(0, data)
            async with open_sockets(env, 2) as busy:
                with entry.full.start(0) as writer:
                    await write_bytes(writer, data[:5000])
                    for sock in busy:
                        await send(sock, build_get(env.target(entry, "full/0")))
                        await read_head(sock)
                    async with open_sockets(env, 1) as (late,):
                        answered = await read_all(late)
                        assert answered[9:12] == status and b"Retry-After: 1\r\n" in answered
                    await write_bytes(writer, data[5000:])
                    await writer.finish()
                for sock in busy:
                    assert await read_until(sock, SHARD) == data
            assert (await env.get("/healthz")).status == 200

    run(work)


def test_a_long_poll_is_evicted_in_favour_of_a_request(open_served_store, run) -> None:
    async def work() -> None:
        async with open_served_store(limits=ServeLimits(max_connections=3)) as env, open_sockets(env, 3) as socks:
            for number, sock in enumerate(socks, 1):
                await send(sock, build_get("/versions?wait=30"))
                await wait_for(lambda number=number: len(env.server.connections._phases[Phase.PARKED]) == number)
            assert (await env.get("/healthz")).status == 200
            assert await read_all(socks[0]) == b""

    run(work)


def test_a_head_that_is_not_finished_in_time_ends_its_connection(open_served_store, run) -> None:
    async def work() -> None:
        limits = ServeLimits(header_seconds=0.3, idle_seconds=0.3)
        async with open_served_store(limits=limits) as env, open_sockets(env, 3) as (silent, begun, served):
            await send(begun, HEALTH[:-2])
            await send(served, HEALTH)
            assert await read_all(silent) == b""
            assert await read_all(begun) == b""
            assert (await read_all(served)).startswith(b"HTTP/1.1 200 OK")
            await wait_for(lambda: not env.server._tasks)

    run(work)


def test_a_client_that_never_reads_is_disconnected_and_its_slot_freed(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        size = 48 << 20  # more than the buffers of both sides hold
        data = make_bytes(size, 1)
        limits = ServeLimits(max_connections=1, window_seconds=0.1)
        async with open_served_store(limits=limits) as env:
            entry = await env.announce(0, data, shard_size=size)
            with entry.full.start(0) as writer:
                await write_bytes(writer, data)
                await writer.finish()
            async with open_sockets(env, 1) as (deaf,):
                await send(deaf, build_get(env.target(entry, "full/0")))
                await wait_for(lambda: env.server.metrics.cut.values.get("slow") == 1)
                await wait_for(lambda: not env.server._tasks)
                assert not entry.held
                assert (await env.get("/healthz")).status == 200

    run(work)


def test_a_client_that_never_reads_short_answers_is_disconnected_as_well(open_served_store, run) -> None:
    async def work() -> None:
        async with open_served_store(limits=ServeLimits(window_seconds=0.1)) as env, open_sockets(env, 1) as (deaf,):
            ask = build_get("/probe")

            async def flood() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        await send(deaf, ask)

            flooding = asyncio.create_task(flood())
            await wait_for(lambda: env.server.metrics.cut.total >= 1)
            await wait_for(lambda: not env.server._tasks)
            await flooding

    run(work)


def test_a_reader_that_is_slow_but_fast_enough_gets_everything(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        size = 16 << 20
        data = make_bytes(size, 1)
        async with open_served_store(limits=ServeLimits(window_seconds=0.5, min_rate=1 << 16)) as env:
            entry = await env.announce(0, data, shard_size=size)
            with entry.full.start(0) as writer:
                await write_bytes(writer, data)
                await writer.finish()
            async with open_sockets(env, 1) as (sock,):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                await send(sock, build_get(env.target(entry, "full/0")))
                await read_head(sock)
                answered = b""
                while len(answered) < size:
                    answered += await asyncio.get_running_loop().sock_recv(sock, 1 << 18)
                    await asyncio.sleep(0.002)
                assert answered == data

    run(work)


def test_a_peer_that_resets_in_the_middle_frees_its_slot(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        size = 32 << 20
        async with open_served_store() as env:
            entry = await env.announce(0, bytes(size), shard_size=size)
            with entry.full.start(0) as writer:
                await write_bytes(writer, bytes(size))
                await writer.finish()
            sock = await connect(env.url, 5)
            await send(sock, build_get(env.target(entry, "full/0")))
            await read_head(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            sock.close()
            await wait_for(lambda: not env.server._tasks)
            assert not entry.held
            assert (await read_metrics(env))["shoal_transfers"] == 0

    run(work)


def count_wants(wanted: list[int]):
    """A relay's hook that counts the current waiters per shard."""

    @contextlib.contextmanager
    def want(blob, index, peer):
        wanted.append(index)
        try:
            yield
        finally:
            wanted.remove(index)

    return want


@pytest.mark.parametrize("target", ["full/1", "manifest?from=2", "/versions?after=1000&wait=30"])
def test_a_client_that_disconnects_while_waiting_is_not_waited_for(
    open_served_store, run, make_bytes, target: str
) -> None:
    async def work() -> None:
        wanted: list[int] = []
        async with open_served_store(want=count_wants(wanted)) as env:
            entry = await env.announce(4, make_bytes(2 * SHARD, 1))
            sock = await connect(env.url, 5)
            await send(sock, build_get(target if target.startswith("/") else env.target(entry, target)))
            await wait_for(lambda: env.server.connections._phases[Phase.PARKED])
            assert wanted == ([1] if "full" in target else [])
            sock.close()
            await wait_for(lambda: not len(env.server.connections))
            assert not wanted
            assert (await read_metrics(env))['shoal_cut_total{reason="left"}'] == 1

    run(work)


def test_a_client_that_has_already_sent_its_next_request_is_answered(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        data, wanted = make_bytes(2 * SHARD, 1), []
        async with open_served_store(want=count_wants(wanted)) as env:
            entry = await env.announce(4, data)
            with await connect(env.url, 5) as sock:
                await send(sock, build_get(env.target(entry, "full/1")))
                await wait_for(lambda: wanted)
                await send(sock, build_get("/healthz"))
                await asyncio.sleep(0.02)
                with entry.full.start(1) as writer:
                    await write_bytes(writer, data[SHARD:])
                    await writer.finish()
                assert b" 200 " in await read_head(sock)
                assert await read_until(sock, SHARD) == data[SHARD:]
                assert b" 200 " in await read_head(sock)
                assert not wanted

    run(work)


def test_a_shard_that_will_never_be_here_is_refused_at_once(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        async with open_served_store(want=lambda *_: None) as env:
            entry = await env.announce(4, make_bytes(2 * SHARD, 1))
            assert (await env.get(env.target(entry, "full/1"))).status == 404

    run(work)


def test_only_versions_that_pass_are_listed(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        async with open_served_store(announce=lambda entry: entry.version != 2) as env:
            entries = [await env.announce(version, make_bytes(SHARD, 1)) for version in (1, 2, 3)]
            listed = (await env.get("/versions")).body
            assert listed == b"".join(entries[number].log.lines[0] + b"\n" for number in (0, 2))
            assert (await env.get("/versions?after=101&wait=1")).body == entries[2].log.lines[0] + b"\n"

    run(work)


def test_accepting_survives_a_lack_of_descriptors_and_resets(
    open_served_store, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        limits = ServeLimits(header_seconds=60)
        async with open_served_store(limits=limits) as env, open_sockets(env, 1) as (idle,):
            await wait_for(lambda: len(env.server._tasks) == 1)
            loop = asyncio.get_running_loop()
            accept = type(loop).sock_accept
            trouble = [errno.EMFILE, errno.ECONNABORTED, errno.ENFILE, errno.ENOBUFS, errno.EPROTO]

            async def fail(self, listener: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
                result = await accept(self, listener)
                if trouble:
                    result[0].close()
                    raise OSError(trouble.pop(0), "no")
                return result

            monkeypatch.setattr(type(loop), "sock_accept", fail)
            async with open_sockets(env, 6):
                await wait_for(lambda: not trouble)
            assert await read_all(idle) == b""  # evicted because descriptors ran out
            assert (await env.get("/healthz")).status == 200

    run(work)


def test_closing_lets_a_transfer_end_and_the_others_not(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        data = make_bytes(SHARD, 1)
        async with open_served_store(limits=ServeLimits(grace_seconds=60)) as env:
            entry = await env.announce(0, data)
            with entry.full.start(0) as writer:
                await write_bytes(writer, data[:5000])
                async with open_sockets(env, 3) as (busy, parked, fresh):
                    await send(busy, build_get(env.target(entry, "full/0")))
                    await read_head(busy)
                    await send(parked, build_get("/versions?after=9999&wait=30"))
                    await asyncio.sleep(0.02)
                    closing = asyncio.create_task(env.server.close())
                    assert await read_all(parked) == b"" and await read_all(fresh) == b""
                    with pytest.raises(ConnectionRefusedError):
                        await connect(env.url, 5)
                    assert not closing.done()
                    await write_bytes(writer, data[5000:])
                    await writer.finish()
                    assert await read_all(busy) == data
                    await closing

    run(work)


def test_closing_ends_what_the_grace_period_does_not_suffice_for(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        data = make_bytes(SHARD, 1)
        async with open_served_store(limits=ServeLimits(grace_seconds=0.05)) as env:
            entry = await env.announce(0, data)
            with entry.full.start(0) as writer:
                await write_bytes(writer, data[:5000])
                async with open_sockets(env, 1) as (busy,):
                    await send(busy, build_get(env.target(entry, "full/0")))
                    await read_head(busy)
                    await env.server.close()
                    assert await read_all(busy) == data[:5000]

    run(work)


def test_a_bug_in_an_answer_ends_one_connection_and_is_reported_to_the_loop_only(open_served_store, make_bytes) -> None:
    failures: list[dict[str, object]] = []

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

        def fail() -> dict[str, object]:
            raise ZeroDivisionError("secret")

        async with asyncio.timeout(20), open_served_store(describe=fail) as env:
            assert await env.say(build_get("/status")) == b""
            assert (await env.get("/healthz")).status == 200
            assert (await read_metrics(env))['shoal_cut_total{reason="bug"}'] == 1

    asyncio.run(work())
    assert [type(failure["exception"]) for failure in failures] == [ZeroDivisionError]


def test_pages_that_are_not_in_memory_are_read_outside_the_loop(
    open_served_store, run, make_bytes, monkeypatch
) -> None:
    async def work() -> None:
        data = make_bytes(2 * SHARD, 1)
        async with open_served_store() as env:
            entry = await env.publish(0, data)
            threads = []

            def read(descriptor: int, size: int, offset: int, read=os.pread) -> bytes:
                threads.append(threading.current_thread())
                return read(descriptor, size, offset)

            monkeypatch.setattr(os, "pread", read)
            monkeypatch.setattr(connection_module, "_is_cached", lambda descriptor, offset: False)
            for index in range(2):
                assert (await env.get(env.target(entry, f"full/{index}"))).body == data[index * SHARD :][:SHARD]
            assert len(threads) == 2 and threading.main_thread() not in threads

    run(work)


def test_no_call_to_the_kernel_holds_up_the_others_for_a_whole_shard(open_served_store, run, monkeypatch) -> None:
    async def work() -> None:
        size = 16 << 20
        async with open_served_store() as env:
            entry = await env.announce(0, bytes(size), shard_size=size)
            with entry.full.start(0) as writer:
                await write_bytes(writer, bytes(size))
                await writer.finish()
            sizes = []

            def push(target: int, source: int, offset: int, count: int, push=os.sendfile) -> int:
                sizes.append(count)
                return push(target, source, offset, count)

            monkeypatch.setattr(os, "sendfile", push)
            assert len((await env.get(env.target(entry, "full/0"))).body) == size
            assert max(sizes) == MAX_QUANTUM

    run(work)


def test_a_limited_server_sends_the_same_bytes(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        data = make_bytes(2 * SHARD, 1)
        limits = ServeLimits(rate=20_000_000, peer_rate=10_000_000, trust_loopback=False)
        async with open_served_store(limits=limits) as env:
            entry = await env.publish(0, data)
            first, second = await asyncio.gather(*[env.get(env.target(entry, f"full/{i}")) for i in range(2)])
            assert first.body + second.body == data
            peers = env.server.addresses.list_connected()
            assert all(peer.bucket is not None for peer in peers)

    run(work)


def test_an_address_that_cannot_be_bound_is_a_user_error(open_served_store, run) -> None:
    async def work() -> None:
        async with open_served_store() as env:
            with pytest.raises(UnavailableError, match="cannot listen on this address"):
                await ShardServer(env.store).start(*env.server.address)
            for host, port in (
                ("192.0.2.1", 0),
                ("no host", 1),
                ("a..b", 1),
            ):
                with pytest.raises(ConfigError, match="cannot listen on this address"):
                    await ShardServer(env.store).start(host, port)
            with pytest.raises(ConfigError, match="port 65536"):
                await ShardServer(env.store).start("127.0.0.1", 65536)

    run(work)


def test_a_server_listens_on_ipv6_where_there_is_any(run, tmp_path: Path) -> None:
    async def work() -> None:
        store = await VersionStore.open(tmp_path, run="reef", publisher="ab" * 32)
        server = ShardServer(store)
        try:
            await server.start("::1")
        except ConfigError:
            await store.close()
            pytest.skip("this machine has no IPv6")
        with await connect(server.url, 5) as sock:
            await send(sock, build_get("/status", "Connection: close"))
            body = (await read_all(sock)).partition(b"\r\n\r\n")[2]
        assert json.loads(body)["peers"][0]["address"] == "::1"
        await server.close()
        await store.close()

    run(work)
