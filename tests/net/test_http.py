import asyncio
import contextlib
import itertools
import socket
from collections.abc import Awaitable, Callable, Iterator

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.net.http import (
    HEAD_BYTES,
    MAX_CHUNKS,
    HttpError,
    Url,
    new_client,
    new_server,
    parse_count,
    parse_reply,
    parse_url,
    receive_data,
    take_rest,
)
from shoal.net.sockets import (
    build_request,
    connect,
    read_data,
    read_head,
    send_event,
    try_receive_into,
    wait_readable,
    wait_writable,
)

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.contextmanager
def open_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        yield left, right


def run_bounded(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(bounded())


async def read_request(data: bytes, *, close: bool = True) -> h11.Request | h11.Response | None:
    """The head that a server reads from these bytes."""
    with open_pair() as (client, server):
        client.sendall(data)
        if close:
            client.shutdown(socket.SHUT_WR)
        return await read_head(server, new_server(), first_s=5, rest_s=5)


async def read_answer(data: bytes) -> tuple[h11.Response, h11.Connection]:
    """The head that a client reads from these bytes."""
    with open_pair() as (client, server):
        conn = new_client()
        await send_event(client, conn, build_request(Url("x", 80), "/"), h11.EndOfMessage())
        server.sendall(data)
        server.shutdown(socket.SHUT_WR)
        response = await read_head(client, conn, first_s=5, rest_s=5)
        assert isinstance(response, h11.Response)
        return response, conn


def refuse_request(data: bytes) -> int:
    with pytest.raises(HttpError) as caught:
        asyncio.run(read_request(data))
    return caught.value.status


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000", Url("127.0.0.1", 8000)),
        ("http://127.0.0.1:8000/", Url("127.0.0.1", 8000)),
        ("http://Relay-1.Example.org", Url("relay-1.example.org", 80)),
        ("http://[::1]:9", Url("::1", 9)),
    ],
)
def test_an_address_is_read(text: str, url: Url) -> None:
    assert parse_url(text) == url
    assert parse_url(str(url)) == url


def test_an_address_is_written_with_brackets_and_without_the_usual_port() -> None:
    assert Url("::1", 9).authority == "[::1]:9"
    assert str(Url("a.b", 80)) == "http://a.b"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:80",
        "http://",
        "http://:80",
        "http://a:0",
        "http://a:65536",
        "http://a:080000",
        "http://a/b",
        "http://a?b",
        "http://a#b",
        "http://u@a",
        "http://u:p@a",
        "http://a b",
        "http://a\r\nX: y",
        "http://a\0",
        "http://-a",
        "http://[::1",
        "http://[1.2.3.4]",
        "http://[:::]",
        "file:///etc/passwd",
        "ftp://a",
        "HTTP://a",
    ],
)
def test_an_invalid_address_is_a_user_error(text: str) -> None:
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        parse_url(text)


def test_https_has_a_port_of_its_own() -> None:
    assert parse_url("https://a") == parse_url("https://a:443") == Url("a", 443, "https")
    assert str(Url("a", 443, "https")) == "https://a"
    assert Url("a", 80, "https").authority == "a:80"


@given(text=st.text(max_size=60))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        url = parse_url(f"http://{text}")
        assert parse_url(str(url)) == url


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("7", 7), ("1234567890123456789", 1234567890123456789)])
def test_a_count_has_one_spelling(text: str, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize("text", ["", "-1", "+1", "01", " 1", "1 ", "1_0", "0x1", "1.0", "\u0661", "1\n", "9" * 20])
def test_other_spellings_are_not_counts(text: str) -> None:
    assert parse_count(text) is None


def test_a_request_is_read_and_what_follows_stays_for_the_next() -> None:
    async def work() -> None:
        with open_pair() as (client, server):
            conn = new_server()
            client.sendall(GET + GET.replace(b"/ ", b"/two "))
            targets = []
            for _ in range(2):
                request = await read_head(server, conn, first_s=5, rest_s=5)
                assert isinstance(request, h11.Request)
                targets.append(request.target)
                assert isinstance(conn.next_event(), h11.EndOfMessage)
                response = h11.Response(status_code=200, headers=[("Content-Length", "0")])
                await send_event(server, conn, response, h11.EndOfMessage())
                conn.start_next_cycle()
            assert targets == [b"/", b"/two"]

    run_bounded(work)


def test_a_head_that_comes_byte_by_byte_is_read() -> None:
    async def work() -> None:
        with open_pair() as (client, server):

            async def drip() -> None:
                for byte in GET:
                    client.send(bytes([byte]))
                    await asyncio.sleep(0)

            dripping = asyncio.create_task(drip())
            request = await read_head(server, new_server(), first_s=5, rest_s=5)
            await dripping
            assert isinstance(request, h11.Request) and request.method == b"GET"

    run_bounded(work)


def test_a_peer_that_closes_before_its_first_byte_is_no_error() -> None:
    assert asyncio.run(read_request(b"")) is None


def test_a_peer_that_closes_in_the_middle_of_a_head_is_an_error() -> None:
    assert refuse_request(GET[:-2]) == 400


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 100 + b"\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/9\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)) + b"\r\n\r\n",
        b"hello\r\n\r\n",
    ],
)
def test_invalid_http_is_refused(data: bytes) -> None:
    assert refuse_request(data) == 400


@pytest.mark.parametrize("size", [HEAD_BYTES, 2 * HEAD_BYTES, 20 * HEAD_BYTES])
def test_a_head_longer_than_the_bound_is_refused_however_it_arrives(size: int) -> None:
    head = b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * size
    assert refuse_request(head + b"\r\n\r\n") == 431
    assert refuse_request(head) in (400, 431)


def test_a_head_as_long_as_the_bound_is_read() -> None:
    head = b"GET / HTTP/1.1\r\nHost: x\r\nX: \r\n\r\n"
    padded = head.replace(b"X: ", b"X: " + b"a" * (HEAD_BYTES - len(head)))
    assert isinstance(asyncio.run(read_request(padded)), h11.Request)
    assert refuse_request(padded.replace(b"X: ", b"X: a")) == 431


@given(data=st.binary(max_size=300))
def test_any_bytes_are_a_head_or_nothing_or_an_http_error(data: bytes) -> None:
    for start in (b"", b"GET / HTTP/1.1\r\n", b"GET "):
        with contextlib.suppress(HttpError):
            head = asyncio.run(read_request(start + data + b"\r\n\r\n"))
            assert head is None or isinstance(head, h11.Request)


def test_silence_and_an_unfinished_head_both_end_at_their_deadline() -> None:
    async def work() -> None:
        with open_pair() as (client, server):
            with pytest.raises(TimeoutError):
                await read_head(server, new_server(), first_s=0.01, rest_s=60)
            client.sendall(GET[:-2])
            with pytest.raises(TimeoutError):
                await read_head(server, new_server(), first_s=60, rest_s=0.01)

    run_bounded(work)


def test_an_answer_with_a_length_is_read_past_h11() -> None:
    async def work() -> None:
        with open_pair() as (client, server):
            conn = new_client()
            await send_event(client, conn, build_request(Url("h", 81), "/x", ("Range", "bytes=1-")), h11.EndOfMessage())
            sent = server.recv(1000)
            assert sent.startswith(b"GET /x HTTP/1.1\r\nHost: h:81\r\n") and b"Range: bytes=1-\r\n" in sent
            server.sendall(
                b"HTTP/1.1 206 Partial Content\r\nContent-Length: 10\r\nContent-Range: bytes 1-10/11\r\n\r\n0123"
            )
            response = await read_head(client, conn, first_s=5, rest_s=5)
            assert isinstance(response, h11.Response)
            reply = parse_reply(response)
            assert (reply.status, reply.length, reply.content_range) == (206, 10, "bytes 1-10/11")
            assert reply.keep_alive and reply.retry_after_s is None
            assert take_rest(conn) == b"0123"
            server.sendall(b"456789")
            buffer = bytearray(6)
            await wait_readable(client)
            assert try_receive_into(client, memoryview(buffer)) == 6
            assert bytes(buffer) == b"456789"
            server.close()
            await wait_readable(client)
            assert try_receive_into(client, memoryview(buffer)) == 0

    run_bounded(work)


def test_an_answer_in_chunks_is_read_piece_by_piece_to_its_end() -> None:
    async def work() -> None:
        with open_pair() as (client, server):
            conn = new_client()
            await send_event(client, conn, build_request(Url("h", 80), "/"), h11.EndOfMessage())
            server.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
            response = await read_head(client, conn, first_s=5, rest_s=5)
            assert isinstance(response, h11.Response) and parse_reply(response).length is None
            assert await read_data(client, conn) == b"abc"
            server.sendall(b"2\r\nde\r\n0\r\n\r\n")
            assert await read_data(client, conn) == b"de"
            assert await read_data(client, conn) == b""

    run_bounded(work)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def frame(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


async def begin_answer(head: bytes = CHUNKED) -> h11.Connection:
    """A client's connection that has read the head of a response, and nothing of its body."""
    return (await read_answer(head))[1]


async def read_body(parts: list[bytes]) -> list[bytes]:
    """The pieces of a chunked body that arrives in these parts."""
    conn, left = await begin_answer(), list(parts)

    async def receive() -> bytes:
        return left.pop(0) if left else b""

    pieces = []
    while piece := await receive_data(receive, conn):
        assert conn.their_state is h11.SEND_BODY  # only an empty piece marks its end
        pieces.append(piece)
    return pieces


def test_chunks_that_came_together_are_one_piece_and_the_end_is_one_of_its_own() -> None:
    body = frame(b"ab", b"c", b"d" * 1000)
    assert asyncio.run(read_body([body + b"0\r\n\r\n"])) == [b"abc" + b"d" * 1000]
    assert asyncio.run(read_body([body, body + b"00", b"\r\n\r\n"])) == [b"abc" + b"d" * 1000] * 2


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=20), st.lists(st.integers(0, 900), max_size=8))
def test_a_body_is_the_same_however_it_is_chunked_and_cut(pieces: list[bytes], cuts: list[int]) -> None:
    body = frame(*pieces) + b"0\r\n\r\n"
    places = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    parts = [body[start:end] for start, end in itertools.pairwise(places)]
    assert b"".join(asyncio.run(read_body(parts))) == b"".join(pieces)


def test_a_body_in_tiny_chunks_is_refused_and_one_in_lines_is_not() -> None:
    with pytest.raises(HttpError, match="tiny chunks"):
        asyncio.run(read_body([frame(*[b"x"] * (MAX_CHUNKS + 2))]))
    few = asyncio.run(read_body([frame(*[b"x"] * MAX_CHUNKS) + b"0\r\n\r\n"]))
    assert few == [b"x" * MAX_CHUNKS]
    lines = [b"l" * 258] * ((1 << 16) // 265)  # a manifest with one hash a line, as much as one read returns
    assert asyncio.run(read_body([frame(*lines), b"0\r\n\r\n"])) == [b"".join(lines)]
    large = [b"l" * 300] * 1000
    assert asyncio.run(read_body([frame(*large), b"0\r\n\r\n"])) == [b"".join(large)]


def test_a_peer_that_always_has_more_data_does_not_starve_others() -> None:
    async def work() -> None:
        conn = await begin_answer()
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def receive() -> bytes:
            return frame(b"x" * 300)

        others = asyncio.create_task(take_turns())
        for _ in range(100):
            assert await receive_data(receive, conn)
        others.cancel()
        assert turns >= 100

    run_bounded(work)


def test_chunks_that_end_in_the_middle_are_an_error() -> None:
    async def work() -> None:
        with open_pair() as (client, server):
            conn = new_client()
            await send_event(client, conn, build_request(Url("h", 80), "/"), h11.EndOfMessage())
            server.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab")
            server.shutdown(socket.SHUT_WR)
            await read_head(client, conn, first_s=5, rest_s=5)
            assert await read_data(client, conn) == b"ab"
            with pytest.raises(HttpError):
                await read_data(client, conn)

    run_bounded(work)


@pytest.mark.parametrize(
    "fields",
    [
        b"",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 99999999999999999999\r\n",
        b"Content-Length: 5\r\nContent-Encoding: gzip\r\n",
    ],
)
def test_an_answer_that_does_not_say_its_length_honestly_is_refused(fields: bytes) -> None:
    async def work() -> None:
        with pytest.raises(HttpError):
            parse_reply((await read_answer(b"HTTP/1.1 200 OK\r\n" + fields + b"\r\nhello"))[0])

    run_bounded(work)


def test_a_response_states_when_to_retry_and_whether_to_keep_the_connection() -> None:
    async def work() -> None:
        head = b"HTTP/1.1 503 No\r\nContent-Length: 0\r\nRetry-After: 7\r\nConnection: Close\r\n\r\n"
        reply = parse_reply((await read_answer(head))[0])
        assert (reply.status, reply.length, reply.retry_after_s, reply.keep_alive) == (503, 0, 7, False)
        old = parse_reply((await read_answer(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n"))[0])
        assert not old.keep_alive

    run_bounded(work)


def test_an_interim_answer_is_refused() -> None:
    async def work() -> None:
        with pytest.raises(HttpError):
            await read_answer(b"HTTP/1.1 100 Continue\r\n\r\n")

    run_bounded(work)


def test_connecting_reaches_a_listener_and_names_what_refuses() -> None:
    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with await connect(Url("127.0.0.1", port), 5) as sock:
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) and not sock.getblocking()
        with pytest.raises(ConnectionRefusedError):
            await connect(Url("127.0.0.1", port), 5)

    run_bounded(work)


def test_waiting_for_room_ends_when_the_other_side_reads() -> None:
    async def work() -> None:
        with open_pair() as (client, server):
            with contextlib.suppress(BlockingIOError):
                while True:
                    server.send(bytes(1 << 16))
            waiting = asyncio.create_task(wait_writable(server))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            with contextlib.suppress(BlockingIOError):
                while True:
                    client.recv(1 << 20)
            await waiting

    run_bounded(work)
