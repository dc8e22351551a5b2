"""A store with a server, handmade versions, and a plain HTTP client."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11
import numpy as np
import pytest
from blake3 import blake3
from tests.fixtures.shards import write_bytes

from shoal.identity.keys import Key
from shoal.net.http import HttpError, Url, new_client, parse_url
from shoal.net.limits import ServeLimits
from shoal.net.sockets import build_request, connect, read_data, read_head, send_event
from shoal.shardcast.client import ShardcastClient
from shoal.shardcast.fetch.connection import FetchDeadlines
from shoal.shardcast.format.hashing import hash_root
from shoal.shardcast.format.layout import File
from shoal.shardcast.format.records import (
    Delta,
    End,
    Hashes,
    ManifestHead,
    NoDelta,
    digest_head,
    open_line,
    sign_record,
)
from shoal.shardcast.origin import Origin
from shoal.shardcast.relay import Relay
from shoal.shardcast.serve.server import ShardServer
from shoal.shardcast.store.blob import Blob
from shoal.shardcast.store.store import StoredVersion, VersionStore

RUN = "reef"
SHARD = 1 << 18


@dataclass
class Answer:
    """A server's response."""

    status: int
    headers: dict[str, str]
    body: bytes
    short: bool = False
    """whether the connection ended before the body did"""


class ServedStore:
    """A store, its publisher's key, and a server."""

    def __init__(self, folder: Path, key: Key, store: VersionStore, server: ShardServer) -> None:
        self.folder = folder
        self.key = key
        self.store = store
        self.server = server
        self.url = server.url

    async def announce(self, version: int, data: bytes, *, hashes: bool = True, **fields: Any) -> StoredVersion:
        """Add an entry with a head and, with `hashes`, all hashes; none of its bytes are held yet."""
        head = ManifestHead(
            run=RUN,
            version=version,
            serial=fields.get("serial", version + 100),
            shard_size=fields.get("shard_size", SHARD),
            files=(File("weights", len(data)),),
            parent=fields.get("parent"),
            anchor=True,
        )
        entry = await self.store.adopt(sign_record(self.key, "", 0, head))
        if hashes:
            await self.append(entry, Hashes(0, hash_shards(data, head.shard_size)))
        return entry

    async def append(self, entry: StoredVersion, record: Hashes | Delta | NoDelta) -> None:
        await entry.append(sign_record(self.key, entry.digest, len(entry.log.lines), record))

    async def append_end(self, entry: StoredVersion) -> None:
        record = entry.log.compute_end()
        await entry.append(sign_record(self.key, entry.digest, len(entry.log.lines), record))

    async def publish(self, version: int, data: bytes, **fields: Any) -> StoredVersion:
        """A complete version."""
        entry = await self.announce(version, data, **fields)
        for shard in entry.full.layout.shards:
            with entry.full.start(shard.index) as writer:
                await write_bytes(writer, data[shard.index * SHARD :][: shard.size])
                await writer.finish()
        await self.append_end(entry)
        await entry.full.settle()
        return entry

    def target(self, entry: StoredVersion, rest: str) -> str:
        return f"/v/{entry.version}/{entry.digest[:16]}/{rest}"

    async def get(self, target: str, *headers: tuple[str, str]) -> Answer:
        """Send one request on a new connection."""
        sock = await connect(self.url, 5)
        with sock:
            conn = new_client()
            await send_event(sock, conn, build_request(self.url, target, *headers), h11.EndOfMessage())
            head = await read_head(sock, conn, first_s=15, rest_s=5)
            assert isinstance(head, h11.Response)
            fields = {name.decode(): value.decode() for name, value in head.headers}
            body = b""
            try:
                while data := await read_data(sock, conn):
                    body += data
            except (HttpError, OSError):
                return Answer(head.status_code, fields, body, short=True)
            return Answer(head.status_code, fields, body)

    async def say(self, data: bytes) -> bytes:
        """Send these bytes and return everything the server sends until it closes."""
        loop = asyncio.get_running_loop()
        with await connect(self.url, 5) as sock:
            heard = b""
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                await loop.sock_sendall(sock, data)
                while more := await loop.sock_recv(sock, 1 << 16):
                    heard += more
            return heard


def hash_shards(data: bytes, size: int) -> tuple[bytes, ...]:
    return tuple(blake3(data[at : at + size]).digest() for at in range(0, len(data), size))


@pytest.fixture
def make_bytes() -> Callable[[int, int], bytes]:
    """Random bytes: (number, seed)."""
    return lambda size, seed: np.random.default_rng(seed).bytes(size)


@pytest.fixture
def open_served_store(tmp_path: Path) -> Callable[..., "contextlib.AbstractAsyncContextManager[ServedStore]"]:
    """Opens a served store with the arguments of a `ShardServer`, inside a running loop."""

    @contextlib.asynccontextmanager
    async def open_it(*, key: Key | None = None, keep: int = 5, **options: Any) -> AsyncIterator[ServedStore]:
        key = key or Key.generate()
        folder = tmp_path / "data"
        store = await VersionStore.open(folder, run=RUN, publisher=key.public, keep=keep)
        server = ShardServer(store, **options)
        await server.start()
        try:
            yield ServedStore(folder, key, store, server)
        finally:
            await server.close()
            await store.close()

    return open_it


FAST = FetchDeadlines(head_s=2, rest_s=1, window_s=0.5)
"""Short enough for a stall to time out within a test."""

Act = Callable[[str, asyncio.StreamWriter], Awaitable[bool]]
"""Handles a request in a proxy; True if it responded by itself."""


class RecordingProxy:
    """A proxy that records requests, and forwards or answers them as its script decides."""

    def __init__(self, upstream: Url, act: Act | None) -> None:
        self._upstream = upstream
        self._act = act
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.targets: list[str] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        assert self._server is not None
        return "http://{}:{}".format(*self._server.sockets[0].getsockname()[:2])

    def list_shards(self, name: str = "full") -> list[int]:
        """Numbers of the requested shards, with repetitions."""
        return [int(target.rpartition("/")[2]) for target in self.targets if f"/{name}/" in target]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            target = head.split()[1].decode()
            self.targets.append(target)
            if self._act is None or not await self._act(target, writer):
                await self._pass_on(head, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pass_on(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        reader, upstream = await asyncio.open_connection(self._upstream.host, self._upstream.port)
        try:
            upstream.write(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        finally:
            upstream.close()


class Network:
    """An origin with a server, and any number of proxies, relays and clients, closed in order."""

    patient = FetchDeadlines()
    """for tests that delay something themselves"""

    def __init__(
        self,
        root: Path,
        key: Key,
        store: VersionStore,
        origin: Origin,
        server: ShardServer,
        stack: AsyncExitStack,
        notes: list[str],
    ) -> None:
        self.root = root
        self.key = key
        self.store = store
        self.origin = origin
        self.server = server
        self.url = str(server.url)
        self.notes = notes
        self._stack = stack

    async def publish(self, version: int, files: dict[str, bytes], **options: Any) -> StoredVersion:
        """Publish these files as a version; folders of other versions are never touched."""
        folder = self.root / "made" / f"{version}-{len(list((self.root / 'made').glob('*')))}"
        folder.mkdir(parents=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return await self.origin.publish(folder, version, **options)

    async def begin(self, version: int, data: bytes) -> StoredVersion:
        """Begin a version: only its head is written."""
        serial = 1 + max((entry.serial for entry in self.store.entries()), default=0)
        head = ManifestHead(RUN, version, serial, 1 << 16, (File("weights", len(data)),), None, True)
        return await self.store.adopt(sign_record(self.key, "", 0, head))

    async def add_hashes(self, entry: StoredVersion, data: bytes) -> None:
        """Add the hashes of a begun version."""
        record = Hashes(0, hash_shards(data, 1 << 16))
        await entry.append(sign_record(self.key, entry.digest, len(entry.log.lines), record))

    async def finish(self, entry: StoredVersion, data: bytes) -> None:
        """Add the bytes and the end of a begun version."""
        if not entry.log.num_hashes:
            await self.add_hashes(entry, data)
        for shard in entry.full.layout.shards:
            with entry.full.start(shard.index) as writer:
                await write_bytes(writer, memoryview(data)[shard.offset :][: shard.size])
                await writer.finish()
        await entry.append(sign_record(self.key, entry.digest, len(entry.log.lines), entry.log.compute_end()))
        await entry.full.settle()

    async def get(self, url: Url, target: str) -> Answer:
        """Send one request to any server, and return what arrived of its body."""
        reader, writer = await asyncio.open_connection(url.host, url.port)
        try:
            writer.write(f"GET {target} HTTP/1.1\r\nHost: {url.authority}\r\nConnection: close\r\n\r\n".encode())
            status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.read(-1)
            return Answer(int(status.split()[1]), headers, body, short=len(body) < int(headers["content-length"]))
        finally:
            writer.close()

    async def proxy(self, act: Act | None = None, upstream: str | None = None) -> RecordingProxy:
        proxy = RecordingProxy(parse_url(upstream or self.url), act)
        await proxy.start()
        self._stack.push_async_callback(proxy.close)
        return proxy

    async def client(self, *urls: str, out: str = "out", **options: Any) -> ShardcastClient:
        options = {"deadlines": FAST, **options}
        client = await ShardcastClient.open(self.root / out, urls, run=RUN, publisher=self.key.public, **options)
        return await self._stack.enter_async_context(client)

    async def relay(self, *urls: str, data: str = "relay", **options: Any) -> Relay:
        options = {"deadlines": FAST, **options}
        relay = await Relay.open(self.root / data, urls, run=RUN, publisher=self.key.public, **options)
        return await self._stack.enter_async_context(relay)


@pytest.fixture
def open_network(tmp_path: Path, log: Any) -> Callable[..., "contextlib.AbstractAsyncContextManager[Network]"]:
    """Opens a network with the arguments of an `Origin`, inside a running loop."""

    @contextlib.asynccontextmanager
    async def open_test_network(*, keep: int = 5, shard_size: int = 1 << 16, **options: Any) -> AsyncIterator[Network]:
        async with AsyncExitStack() as stack:
            key = Key.generate()
            (tmp_path / "made").mkdir()
            kept = {name: options.pop(name) for name in ("keep_s", "keep_bytes") if name in options}
            store = await VersionStore.open(tmp_path / "origin", run=RUN, publisher=key.public, keep=keep, **kept)
            stack.push_async_callback(store.close)
            server = ShardServer(store, limits=ServeLimits(grace_seconds=0.1))
            await server.start()
            stack.push_async_callback(server.close)
            origin = Origin(store, key, shard_size=shard_size, **options)
            yield Network(tmp_path, key, store, origin, server, stack, log.messages)

    return open_test_network


def read_dir(folder: Path) -> dict[str, bytes]:
    """The files directly in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def read_files() -> Callable[[Path], dict[str, bytes]]:
    return read_dir


class Maker:
    """Signs manifests of given contents, opens stores for them and fills these without a network."""

    shard_size = 1 << 16

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = Key.generate()
        self.run = RUN

    def sign_all(self, head: ManifestHead, *records: Any, key: Key | None = None) -> list[bytes]:
        """The lines of a manifest with these records after the head."""
        signer = key or self.key
        first = sign_record(signer, "", 0, head)
        digest = digest_head(open_line(first, signer.public, ""))
        return [first, *(sign_record(signer, digest, number, record) for number, record in enumerate(records, 1))]

    def make_head(self, version: int, files: dict[str, bytes], **fields: Any) -> ManifestHead:
        sizes = tuple(File(name, len(data)) for name, data in files.items())
        given = {"run": self.run, "serial": version + 1, "shard_size": self.shard_size, "parent": None, "anchor": True}
        return ManifestHead(version=version, files=sizes, **(given | fields))

    def make_lines(
        self, version: int, files: dict[str, bytes], *, portion: int = 3, delta: bytes | None = None, **fields: Any
    ) -> list[bytes]:
        """A complete manifest; with a delta if one is given and the head has a parent."""
        head = self.make_head(version, files, **fields)
        size = head.shard_size
        hashes = [part for data in files.values() for part in hash_shards(data, size)]
        records: list[Any] = [
            Hashes(start, tuple(hashes[start : start + portion])) for start in range(0, len(hashes), portion)
        ]
        delta_root = None
        if delta is not None:
            parts = hash_shards(delta, size)
            records.insert(len(records) // 2, Delta(len(delta), bytes(32), parts))
            delta_root = hash_root(len(delta), size, b"".join(parts))
        elif head.parent is not None:
            records.append(NoDelta("none"))
        total = sum(map(len, files.values()))
        records.append(End(hash_root(total, size, b"".join(hashes)), delta_root))
        return self.sign_all(head, *records)

    async def open_store(self, name: str = "store", **settings: Any) -> VersionStore:
        return await VersionStore.open(self.folder / name, run=self.run, publisher=self.key.public, **settings)

    async def add_lines(self, store: VersionStore, lines: list[bytes]) -> StoredVersion:
        entry = await store.adopt(lines[0])
        for line in lines[len(entry.log.lines) :]:
            await entry.append(line)
        return entry

    async def fill_shard(self, blob: Blob, index: int, files: dict[str, bytes]) -> None:
        shard = blob.layout.shards[index]
        with blob.start(index) as writer:
            await write_bytes(writer, files[shard.file][shard.offset : shard.offset + shard.size])
            await writer.finish()

    async def fill_store(
        self, store: VersionStore, version: int, files: dict[str, bytes], **fields: Any
    ) -> StoredVersion:
        """A complete version, settled."""
        entry = await self.add_lines(store, self.make_lines(version, files, **fields))
        for index in list(entry.full.missing()):
            await self.fill_shard(entry.full, index, files)
        await entry.full.settle()
        return entry


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    """Creates versions and stores in the test's folder."""
    return Maker(tmp_path)
