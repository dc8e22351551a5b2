"""Stores as a node uses them, played by scripted servers on loopback."""

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.net.client import Download, HttpDeadlines, parse_endpoint
from shoal.net.retry import RetryingClient, RetryPolicy
from shoal.node import transfer as module
from shoal.node.transfer import BlobStores, StoreError
from shoal.protocol.descriptor import blob_path, incoming_path
from shoal.protocol.messages import CommitAnswer, Manifest, RolloutEntry, SubmissionState
from shoal.util.clock import read_clock

DATA = os.urandom(200_000)
BLOB = hashlib.sha256(DATA).hexdigest()
HERE = parse_endpoint("http://127.0.0.1:8700")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
PUT, GET = incoming_path(BLOB, len(DATA)), blob_path(BLOB)


class FakeStore:
    """A server that records requests and answers each with the next line of its script."""

    def __init__(self, script: list[bytes]) -> None:
        self.script, self.heads, self.bodies = list(script), [], []
        self.num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = re.search(r"content-length: ([0-9]+)", head.lower())
                self.heads.append(head)
                self.bodies.append(await reader.readexactly(int(length[1])) if length else b"")
                answer = self.script.pop(0) if self.script else b""
                writer.write(answer)
                await writer.drain()
                if not answer.startswith(b"HTTP/1.1 200 OK\r\nContent-Length: 0"):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def open_fake_store(*script: bytes, **deadlines: Any) -> AsyncIterator[tuple[FakeStore, BlobStores, str]]:
    """A scripted server, stores that know it, and its URL."""
    fake_store = FakeStore(list(script))
    server = await asyncio.start_server(fake_store.serve, "127.0.0.1", 0)
    name = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/bucket/run/"
    times = {"answer_s": 0.3, "rest_s": 0.3, "window_s": 0.3, "min_rate": 1000, **deadlines}
    stores = make_stores(name, deadlines=HttpDeadlines(**times))
    try:
        async with asyncio.timeout(20):
            yield fake_store, stores, name
    finally:
        stores.close()
        server.close()


def make_stores(*names: str, **options: Any) -> BlobStores:
    async def no_pause(_: float) -> None: ...

    return BlobStores(
        names, options.pop("coordinator", HERE), asker=RetryingClient(RetryPolicy(tries=3), sleep=no_pause), **options
    )


async def put(stores: BlobStores, url: str, folder: Path, timeout_s: float = 10.0) -> None:
    (folder / "file").write_bytes(DATA)
    await stores.put(url, folder / "file", blob=BLOB, size=len(DATA), timeout_s=timeout_s)


async def fetch(stores: BlobStores, url: str, folder: Path, timeout_s: float = 10.0) -> bytes:
    with Download(folder / "copy", BLOB, len(DATA)) as download:
        await stores.fetch(url, download, timeout_s=timeout_s)
        assert download.received == len(DATA)
        download.keep()
    return (folder / "copy").read_bytes()


def send(body: bytes, *, status: bytes = b"200 OK", length: int | None = None) -> bytes:
    head = b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (status, len(body) if length is None else length) + body


def run(check: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(check())  # type: ignore[arg-type]


def test_a_store_is_shown_the_file_and_its_length_and_nothing_of_the_node(tmp_path: Path) -> None:
    async def check() -> None:
        async with open_fake_store(OK) as (fake_store, stores, name):
            await put(stores, f"{name}{PUT}?X-Amz-Signature=ab%2Fcd", tmp_path)
            host = name.split("/")[2]
            lines = fake_store.heads[0].strip().split("\r\n")
            assert lines[0] == f"PUT /bucket/run/{PUT}?X-Amz-Signature=ab%2Fcd HTTP/1.1"
            assert {line.lower() for line in lines[1:]} == {f"host: {host}", f"content-length: {len(DATA)}"}
            assert fake_store.bodies == [DATA]
            assert (stores.num_used, stores.num_failed) == (1, 0)

    run(check)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda url: "http://127.0.0.1:1" + url.partition("/bucket")[2],
        lambda url: url.replace("http://", "https://"),
        lambda url: url.replace("http://", "HTTP://"),
        lambda url: url.replace("http://127.0.0.1", "http://user@127.0.0.1"),
        lambda url: url.replace("/bucket", "@elsewhere.example/bucket"),
        lambda url: url.replace("/bucket/run", ".elsewhere.example/bucket/run"),
        lambda url: url.replace("bucket", "other"),
        lambda url: url.replace("/run/", "/run/../run/"),
        lambda url: url.replace("/run/", "/run//"),
        lambda url: url.replace("?", "x?"),
        lambda url: url.replace(BLOB, "0" * 64),
        lambda url: url.partition("?")[0],
        lambda url: url + "#part",
        lambda url: url + " x",
        lambda url: url + "\r\nX-Evil: 1",
        lambda url: url + "a" * 5000,
        lambda url: "",
    ],
)
def test_a_url_that_is_not_the_place_of_the_file_in_a_named_store_is_never_asked(
    tmp_path: Path, spoil: Callable[[str], str]
) -> None:
    async def check() -> None:
        async with open_fake_store(OK) as (fake_store, stores, name):
            for work, place in ((put, PUT), (fetch, GET)):
                with pytest.raises(StoreError, match="URL outside"):
                    await work(stores, spoil(f"{name}{place}?a=b"), tmp_path)
            assert fake_store.num_connections == 0
            assert stores.is_ready  # it is not the store's fault

    run(check)


def test_a_place_of_another_size_or_for_another_purpose_is_not_taken(tmp_path: Path) -> None:
    async def check() -> None:
        async with open_fake_store(OK) as (fake_store, stores, name):
            for place in (incoming_path(BLOB, len(DATA) + 1), GET):
                with pytest.raises(StoreError):
                    await put(stores, f"{name}{place}?a=b", tmp_path)
            with pytest.raises(StoreError):
                await fetch(stores, f"{name}{PUT}?a=b", tmp_path)
            assert fake_store.num_connections == 0

    run(check)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(tmp_path: Path, status: int) -> None:
    async def check() -> None:
        async with open_fake_store(OK) as (other, _, elsewhere):
            moved = b"HTTP/1.1 %d Moved\r\nLocation: %s%s?a=b\r\nContent-Length: 0\r\n\r\n"
            script = [moved % (status, elsewhere.encode(), place.encode()) for place in (PUT, GET)]
            for work, place, line in ((put, PUT, script[0]), (fetch, GET, script[1])):
                async with open_fake_store(line) as (fake_store, stores, name):
                    with pytest.raises(StoreError, match=f"status {status}"):
                        await work(stores, f"{name}{place}?a=b", tmp_path)
                    assert len(fake_store.heads) == 1
            assert other.num_connections == 0
            assert list(tmp_path.glob("*copy*")) == []

    run(check)


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        ([send(DATA + b"x")] * 3, "exceeds the limit of 200000"),
        ([send(DATA, length=10**12)] * 3, "middle|complete message body"),
        (
            [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"10000\r\n" + DATA[:65536] + b"\r\n"] * 3,
            "complete message body",
        ),
        ([send(DATA[:-1] + b"x")], "wrong hash"),
        ([send(DATA[:-1])], "wrong hash"),
        ([send(b"")], "wrong hash"),
        ([b""] * 3, "without a response"),
        ([b"rubbish\r\n\r\n"] * 3, "illegal status line"),
        ([send(b"<Error/>", status=b"403 Forbidden")], "status 403"),
        ([send(b"x" * 100_000, status=b"403 Forbidden")] * 3, "exceeds the limit of 65536"),
        ([send(b"<Error/>", status=b"503 Slow Down")] * 3, "status 503"),
        ([send(DATA[:100], status=b"206 Partial Content")], "status 206"),
    ],
)
def test_a_store_that_sends_too_much_or_something_else_or_nothing_gives_no_file(
    tmp_path: Path, answers: list[bytes], match: str, log
) -> None:
    async def check() -> None:
        async with open_fake_store(*answers) as (fake_store, stores, name):
            with pytest.raises(StoreError, match=match):
                await fetch(stores, f"{name}{GET}?a=b", tmp_path)
            assert len(fake_store.heads) == len(answers)
            assert list(tmp_path.iterdir()) == []
            assert (stores.num_used, stores.num_failed, len(log.messages)) == (0, 1, 1)
            with pytest.raises(StoreError, match="cool-down"):
                await fetch(stores, f"{name}{GET}?a=b", tmp_path)
            assert not stores.is_ready and len(fake_store.heads) == len(answers)

    run(check)


def test_an_interrupted_read_resumes_where_it_stopped(tmp_path: Path) -> None:
    async def check() -> None:
        broken = send(DATA[:150_000], length=len(DATA))
        rest = send(DATA[150_000:], status=b"206 Partial Content")
        async with open_fake_store(broken, rest) as (fake_store, stores, name):
            assert await fetch(stores, f"{name}{GET}?a=b", tmp_path) == DATA
            assert "range: bytes=150000-" in fake_store.heads[1].lower()
            assert "range" not in fake_store.heads[0].lower()

    run(check)


def test_a_store_that_knows_no_ranges_is_read_from_the_beginning(tmp_path: Path) -> None:
    async def check() -> None:
        async with open_fake_store(send(DATA[:150_000], length=len(DATA)), send(DATA)) as (_, stores, name):
            assert await fetch(stores, f"{name}{GET}?a=b", tmp_path) == DATA

    run(check)


def test_the_wrong_rest_of_a_file_is_found_out(tmp_path: Path) -> None:
    async def check() -> None:
        wrong = send(DATA[:50_000], status=b"206 Partial Content")
        async with open_fake_store(send(DATA[:150_000], length=len(DATA)), wrong) as (_, stores, name):
            with pytest.raises(StoreError, match="wrong hash"):
                await fetch(stores, f"{name}{GET}?a=b", tmp_path)
            assert list(tmp_path.iterdir()) == []

    run(check)


def test_a_busy_store_gets_the_same_bytes_once_more(tmp_path: Path) -> None:
    async def check() -> None:
        async with open_fake_store(send(b"", status=b"503 Slow Down"), b"", OK) as (fake_store, stores, name):
            await put(stores, f"{name}{PUT}?a=b", tmp_path)
            assert fake_store.bodies == [DATA] * 3
            assert stores.is_ready

    run(check)


@pytest.mark.parametrize(("work", "place"), [(put, PUT), (fetch, GET)], ids=("put", "fetch"))
def test_a_store_that_says_nothing_costs_no_more_than_the_time_it_was_given(
    tmp_path: Path, work: Any, place: str
) -> None:
    async def check() -> None:
        silent = asyncio.Event()

        async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await silent.wait()
            writer.close()

        server = await asyncio.start_server(wait, "127.0.0.1", 0)
        name = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/bucket/"
        stores = make_stores(name)
        async with asyncio.timeout(10):
            with pytest.raises(StoreError, match="took more than"):
                await work(stores, f"{name}{place}?a=b", tmp_path, timeout_s=0.2)
        silent.set()
        stores.close()
        server.close()
        assert [path.name for path in tmp_path.iterdir()] in ([], ["file"])

    run(check)


def test_a_store_that_rested_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COOLDOWN_S", 0.0)

    async def check() -> None:
        async with open_fake_store(send(b"", status=b"403 Forbidden"), OK) as (fake_store, stores, name):
            with pytest.raises(StoreError):
                await put(stores, f"{name}{PUT}?a=b", tmp_path)
            assert stores.is_ready
            await put(stores, f"{name}{PUT}?a=b", tmp_path)
            assert len(fake_store.heads) == 2

    run(check)


def test_a_store_on_this_machine_is_for_runs_on_this_machine(tmp_path: Path) -> None:
    async def check() -> None:
        far = parse_endpoint("https://run.example.org")
        for host in ("http://127.0.0.1:9", "https://localhost", "http://[::1]:9", "https://127.1.2.3"):
            stores = make_stores(f"{host}/bucket/", coordinator=far)
            assert not stores.is_ready
            with pytest.raises(StoreError, match="URL outside"):
                await put(stores, f"{host}/bucket/{PUT}?a=b", tmp_path)
            assert make_stores(f"{host}/bucket/").is_ready
        assert make_stores("https://s3.example.org/bucket/", coordinator=far).is_ready

    run(check)


def test_a_node_without_stores_asks_none() -> None:
    async def check() -> None:
        assert not make_stores().is_ready

    run(check)


def test_a_store_is_not_asked_when_there_is_hardly_any_time_left(tmp_path: Path) -> None:
    async def check() -> None:
        async with open_fake_store(OK) as (fake_store, stores, name):
            rollouts = (RolloutEntry(hash="1" * 64, tokens=5),)
            manifest = Manifest(lease="l1", fence=1, blob=BLOB, size=len(DATA), version=0, rollouts=rollouts)
            (tmp_path / "file").write_bytes(DATA)
            for left_s, is_put in ((1, False), (60, True)):
                committed = CommitAnswer(
                    submission="s1",
                    state=SubmissionState.COMMITTED,
                    size=len(DATA),
                    deadline_ms=read_clock() + 1000 * left_s,
                    upload_url=f"{name}{PUT}?a=b",
                )
                assert await stores.try_put(committed, manifest, tmp_path / "file", left_s=left_s) == is_put
                assert stores.is_ready and fake_store.num_connections == is_put

    run(check)


def test_a_host_is_named_without_the_port_that_its_scheme_has_anyway() -> None:
    places = ("https://a.example", "https://a.example:443", "https://a.example:8443", "http://[::1]:80", "http://a:443")
    names = ("a.example", "a.example", "a.example:8443", "[::1]", "a:443")
    assert tuple(parse_endpoint(text).authority for text in places) == names
