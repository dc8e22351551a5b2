import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.net.http import ResponseHead, new_client
from shoal.shardcast.fetch.connection import UpstreamError, UpstreamResponse
from shoal.shardcast.fetch.shard import (
    MAX_PIECE,
    MIN_PIECE,
    PIECE_S,
    BodyDeadline,
    BodyReceiver,
    check_range,
    size_piece,
)


def test_the_deadline_moves_only_when_enough_came() -> None:
    pace = BodyDeadline(5.0, 100.0, now=10.0)
    assert pace.deadline == 15.0
    assert not pace.advance(499, now=12.0)
    assert pace.deadline == 15.0
    assert pace.advance(1, now=14.0)
    assert pace.deadline == 19.0
    assert not pace.advance(499, now=18.0)


def test_one_large_piece_moves_the_deadline_once() -> None:
    pace = BodyDeadline(5.0, 100.0, now=0.0)
    assert pace.advance(10**9, now=1.0)
    assert pace.deadline == 6.0
    assert not pace.advance(1, now=2.0)


def test_time_spent_on_our_own_disk_is_forgiven() -> None:
    pace = BodyDeadline(5.0, 100.0, now=0.0)
    pace.forgive(30.0)
    assert pace.deadline == 35.0


def build_answer(status: int, length: int | None, ranged: str | None = None) -> Any:
    started: list[int] = []

    def start_body(size: int) -> None:
        started.append(size)

    reply = ResponseHead(status=status, length=length, retry_after_s=None, content_range=ranged, keep_alive=True)
    return SimpleNamespace(reply=reply, start_body=start_body, started=started)


def test_a_whole_shard_and_the_rest_of_one_are_taken() -> None:
    whole = build_answer(200, 100)
    check_range(whole, 0, 100)
    assert whole.started == [100]
    rest = build_answer(206, 60, "bytes 40-99/100")
    check_range(rest, 40, 100)
    assert rest.started == [60]


@pytest.mark.parametrize(
    ("start", "status", "ranged"),
    [
        (0, 206, "bytes 0-99/100"),
        (40, 200, None),
        (40, 206, None),
        (40, 206, "bytes 0-59/100"),
        (40, 206, "bytes 40-99/1000"),
        (40, 206, "bytes 40-98/100"),
    ],
)
def test_any_other_range_is_refused(start: int, status: int, ranged: str | None) -> None:
    with pytest.raises(UpstreamError):
        check_range(build_answer(status, 100 - start, ranged), start, 100)


@given(st.integers(0, 1 << 40), st.floats(0, 1e5))
def test_a_piece_is_what_comes_in_two_milliseconds_within_bounds(num_bytes: int, seconds: float) -> None:
    size = size_piece(num_bytes, seconds)
    assert MIN_PIECE <= size <= MAX_PIECE and size.bit_count() == 1
    rate = num_bytes / max(seconds, PIECE_S)
    assert size == MIN_PIECE or size <= PIECE_S * rate + 1
    assert size == MAX_PIECE or 2 * size > PIECE_S * rate - 1


SIZE = 1 << 18
FILES = {"weights": os.urandom(SIZE)}


class Line:
    """A body of one shard over a real connection; the test controls the other end."""

    def __init__(self, size: int, *, window_s: float = 10.0, min_rate: float = 1.0) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.far = socket.create_connection(server.getsockname())
            self.near, _ = server.accept()
        self.near.setblocking(False)
        self.counted: list[int] = []
        reply = ResponseHead(status=200, length=size, retry_after_s=None, content_range=None, keep_alive=True)
        self.answer = UpstreamResponse(reply, self.near, new_client())
        self.answer.start_body(size)
        self.intake = BodyReceiver(self.answer, BodyDeadline(window_s, min_rate, time.monotonic()), self.counted.append)

    async def send(self, data: bytes) -> None:
        await asyncio.to_thread(self.far.sendall, data)


@contextlib.contextmanager
def open_line(size: int = SIZE, **settings: float) -> Iterator[Line]:
    line = Line(size, **settings)
    with line.near, line.far:
        yield line


@contextlib.asynccontextmanager
async def open_blob(maker: Any) -> Any:
    store = await maker.open_store()
    try:
        yield (await maker.add_lines(store, maker.make_lines(1, FILES, shard_size=SIZE))).full
    finally:
        await store.close()


@pytest.mark.parametrize("step", [SIZE, 50_000, 7000])
def test_a_body_arrives_whole_however_it_comes_and_leaves_its_connection_as_it_was(
    run: Callable[..., Any], maker: Any, step: int
) -> None:
    async def work() -> None:
        async with open_blob(maker) as blob:
            with open_line() as line, blob.start(0) as writer:
                receiving = asyncio.create_task(writer.receive(line.intake.pull))
                for start in range(0, SIZE, step):
                    await line.send(FILES["weights"][start : start + step])
                await receiving
                line.intake.report()
                await writer.finish()
                assert line.intake.failure is None and line.answer.reusable and sum(line.counted) == SIZE
                assert line.near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1

    run(work)


def test_what_came_before_a_pause_is_shown_and_counted_during_it(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_blob(maker) as blob:
            with open_line() as line, blob.start(0) as writer:
                receiving = asyncio.create_task(writer.receive(line.intake.pull))
                sent = 0
                for size in (100_000, 1, 20_000, 1):  # also less than a piece
                    await line.send(bytes(size))
                    sent += size
                    while blob.ready(0) < sent:
                        await blob.claims.progress(0).wait()
                while sum(line.counted) < sent:
                    await asyncio.sleep(0.01)
                assert not receiving.done()
                receiving.cancel()
                await asyncio.wait([receiving])

    run(work)


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_ends_in_the_middle_is_the_sources_failure_and_its_bytes_stay(
    run: Callable[..., Any], maker: Any, reset: bool
) -> None:
    async def work() -> None:
        async with open_blob(maker) as blob:
            with open_line() as line, blob.start(0) as writer:
                receiving = asyncio.create_task(writer.receive(line.intake.pull))
                await line.send(FILES["weights"][:70_000])
                while writer.written < 70_000:
                    await asyncio.sleep(0.001)
                if reset:
                    line.far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                line.far.close()
                await receiving
                assert str(line.intake.failure) == (
                    "Connection reset by peer" if reset else "closed the connection in the middle of a body"
                )
                assert writer.written == 70_000 and not line.answer.reusable
                with open_line(SIZE - 70_000) as other:
                    receiving = asyncio.create_task(writer.receive(other.intake.pull))
                    await other.send(FILES["weights"][70_000:])
                    await receiving
                await writer.finish()

    run(work)


@pytest.mark.parametrize("dripping", [False, True])
def test_a_body_that_stalls_or_drips_is_given_up(run: Callable[..., Any], maker: Any, dripping: bool) -> None:
    async def work() -> None:
        async with open_blob(maker) as blob:
            with open_line(window_s=0.2, min_rate=10_000) as line, blob.start(0) as writer:
                receiving = asyncio.create_task(writer.receive(line.intake.pull))
                while not receiving.done():
                    if dripping:
                        await line.send(b"x")
                    await asyncio.sleep(0.01)
                await receiving
                assert "too slow or stalled" in str(line.intake.failure) and not writer.over

    run(work)


def test_the_time_of_our_own_disk_is_not_the_sources(run: Callable[..., Any]) -> None:
    async def work() -> None:
        with open_line(window_s=0.2, min_rate=10_000) as line:
            view = memoryview(bytearray(SIZE))
            await line.send(b"x")
            assert line.intake.pull(view) == 1
            time.sleep(0.3)
            assert line.intake.pull(view) is None and line.intake.failure is None

    run(work)


def test_a_cancelled_receiver_no_longer_uses_the_socket(run: Callable[..., Any], maker: Any) -> None:
    async def work() -> None:
        async with open_blob(maker) as blob:
            with open_line() as line, blob.start(0) as writer:
                receiving = asyncio.create_task(writer.receive(line.intake.pull))
                await line.send(b"x")
                while not writer.written:
                    await asyncio.sleep(0.001)
                receiving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await receiving
                await line.send(b"later")
                assert await asyncio.get_running_loop().sock_recv(line.near, 10) == b"later"

    run(work)
