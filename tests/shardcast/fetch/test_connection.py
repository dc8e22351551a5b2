import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from shoal.net.http import Url
from shoal.shardcast.fetch.connection import FetchDeadlines, MissingError, UpstreamConnections, UpstreamError

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
FAST = FetchDeadlines(connect_s=0.5, head_s=0.3, rest_s=0.3, window_s=0.3)


@contextlib.asynccontextmanager
async def serve(script: Script) -> AsyncIterator[Url]:
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await script(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield Url("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_aside(pool: UpstreamConnections, size: int, at_once: int) -> bytes:
    """Read the body in a thread that waits for pieces of a given size."""
    view = memoryview(bytearray(size))
    async with pool.request("/x") as answer:
        answer.start_body(size)

        def read() -> None:
            done = 0
            while answer.left:
                answer.wait_bytes(at_once, 30.0)
                done += answer.try_receive(view[done:])

        await asyncio.to_thread(read)
    return bytes(view)


async def read_all(pool: UpstreamConnections, size: int) -> bytes:
    return await read_aside(pool, size, 1)


def answer_each(reply: bytes, seen: list[int]) -> Script:
    """Responds to every request on a connection; counts connections and requests."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen[0] += 1
        while True:
            await reader.readuntil(b"\r\n\r\n")
            seen[1] += 1
            writer.write(reply)
            await writer.drain()

    return script


def test_a_connection_is_used_again_when_its_answer_was_read(run: Any) -> None:
    async def work() -> None:
        seen = [0, 0]
        async with serve(answer_each(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", seen)) as url:
            pool = UpstreamConnections(url, FAST)
            for _ in range(3):
                assert await read_all(pool, 5) == b"hello"
            assert seen == [1, 3]
            async with pool.request("/x"):
                pass  # not read: the connection cannot be reused
            await read_all(pool, 5)
            assert seen == [2, 5]
            pool.close()

    run(work)


def test_short_heads_are_read_on_a_connection_that_waited_for_large_pieces(run: Any) -> None:
    async def work() -> None:
        seen = [0, 0]
        body = bytes(range(256)) * 1000
        async with serve(answer_each(b"HTTP/1.1 200 OK\r\nContent-Length: 256000\r\n\r\n" + body, seen)) as url:
            pool = UpstreamConnections(url, FAST)
            for _ in range(3):
                assert await read_aside(pool, len(body), 1 << 16) == body
            assert seen == [1, 3]
            pool.close()

    run(work)


def test_a_thread_that_waits_for_more_than_is_sent_sees_the_end(run: Any) -> None:
    async def work() -> None:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 256000\r\n\r\n" + bytes(1000))
            await writer.drain()

        async with serve(script) as url:
            pool = UpstreamConnections(url, FAST)
            with pytest.raises(UpstreamError, match="closed the connection in the middle"):
                await read_aside(pool, 256000, 1 << 16)
            pool.close()

    run(work)


def test_a_connection_that_says_close_is_not_used_again(run: Any) -> None:
    async def work() -> None:
        seen = [0, 0]
        reply = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx"
        async with serve(answer_each(reply, seen)) as url:
            pool = UpstreamConnections(url, FAST)
            await read_all(pool, 1)
            await read_all(pool, 1)
            assert seen == [2, 2]
            pool.close()

    run(work)


def test_an_idle_connection_the_server_closed_is_replaced_without_a_failure(run: Any) -> None:
    async def work() -> None:
        connections = 0

        async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
            await writer.drain()

        async with serve(once) as url:
            pool = UpstreamConnections(url, FAST)
            await read_all(pool, 1)
            await asyncio.sleep(0.05)
            await read_all(pool, 1)
            assert connections == 2
            pool.close()

    run(work)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"", "without a response"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "not followed"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", "responded with status 500"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil I close", "neither Content-Length nor chunked encoding"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n", "bad Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfour", "announced 4 bytes instead of 5"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfive and more", "more than the 5"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfo", "closed the connection in the middle"),
        (b"no http at all\r\n\r\n", "illegal status line"),
    ],
)
def test_what_is_wrong_with_an_answer_is_a_source_error(reply: bytes, reason: str, run: Any) -> None:
    async def work() -> None:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            await writer.drain()

        async with serve(script) as url:
            pool = UpstreamConnections(url, FAST)
            with pytest.raises(UpstreamError, match=reason):
                await read_all(pool, 5)
            pool.close()

    run(work)


def test_missing_is_distinguished_from_failed_and_a_requested_pause_is_kept(run: Any) -> None:
    async def work() -> None:
        for reply in (b"404 Not Found", b"410 Gone"):
            head = b"HTTP/1.1 " + reply + b"\r\nContent-Length: 0\r\n\r\n"
            async with serve(answer_each(head, [0, 0])) as url:
                with pytest.raises(MissingError):
                    await read_all(UpstreamConnections(url, FAST), 1)
        busy = b"HTTP/1.1 429 Slow\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n"
        async with serve(answer_each(busy, [0, 0])) as url:
            with pytest.raises(UpstreamError) as caught:
                await read_all(UpstreamConnections(url, FAST), 1)
            assert caught.value.pause == 7.0

    run(work)


def test_an_answer_that_never_begins_or_never_ends_its_head_is_given_up(run: Any) -> None:
    async def work() -> None:
        async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(3600)

        async def drip_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while True:
                writer.write(b"X: y\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)

        for script in (be_silent, drip_head):
            async with serve(script) as url:
                with pytest.raises(UpstreamError, match="timed out"):
                    await read_all(UpstreamConnections(url, FAST), 5)

    run(work)


def test_a_closed_port_and_an_unknown_host_name_are_source_errors(run: Any) -> None:
    async def work() -> None:
        async with serve(answer_each(b"", [0, 0])) as url:
            pass
        for where in (url, Url("does-not-exist.invalid", 80)):
            with pytest.raises(UpstreamError, match="no connection"):
                await read_all(UpstreamConnections(where, FAST), 1)

    run(work)


def test_a_ticket_goes_with_every_request(run: Any) -> None:
    async def work() -> None:
        announced = []

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            announced.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
            await writer.drain()

        async with serve(script) as url:
            await read_all(UpstreamConnections(url, FAST, ticket="abc.def"), 1)
            assert b"authorization: shoal abc.def" in announced[0].lower()
            assert b"accept-encoding" not in announced[0].lower()

    run(work)
