"""Both blob stores behind one interface, for the tests of what they have in common.

The bucket is on moto's server, a separate process on loopback. Where obstore or moto are not installed, the tests of S3
are skipped.
"""

import asyncio
import importlib.util
import itertools
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator.blobs import open_blobs
from shoal.coordinator.blobs.base import BlobStore
from shoal.coordinator.blobs.disk import DiskLimits

_START_S = 30
_names = itertools.count()


class Place:
    """Where a store is."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder

    async def send(self, data: bytes, size: int = 10_000) -> AsyncIterator[bytes]:
        for start in range(0, len(data), size):
            yield data[start : start + size]

    @property
    def blobs(self) -> Path:
        """The folder of a store on disk, or the temporary folder of one in a bucket."""
        return self.folder / "blobs"

    def open(self, **limits: int) -> Any:
        return open_blobs(self.url, self.blobs, DiskLimits(**limits))

    def run(self, work: Callable[[Any], Awaitable[None]], **limits: int) -> None:
        async def run() -> None:
            store = self.open(**limits)
            try:
                async with asyncio.timeout(30):
                    await work(store)
            finally:
                await store.close()

        asyncio.run(run())

    async def read(self, store: BlobStore, name: str) -> bytes:
        async with await store.open(name) as reader:
            data = b"".join([piece async for piece in reader])
            assert reader.size == len(data)
            return data

    def list_all(self) -> list[str]:
        """Everything stored there, including temporary names."""
        if self.url:
            from shoal.coordinator.blobs.s3 import open_bucket

            return sorted(item["path"] for page in open_bucket(self.url).list() for item in page)
        found = [path.relative_to(self.blobs) for path in self.folder.rglob("*") if path.is_file()]
        return sorted(str(path) for path in found if path.name != "lock")

    def check_counts(self, store: Any, num_blobs: int, num_bytes: int) -> None:
        """Check the counts of a store on disk; one in a bucket does not count."""
        assert store.num_uploads == 0
        assert self.url or (store.num_blobs, store.num_bytes) == (num_blobs, num_bytes)


def _ask_url(method: str, url: str, data: bytes | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url, data=data, method=method)
    request.add_header("Content-Type", "application/octet-stream")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.fixture
def ask_url() -> Callable[..., tuple[int, bytes]]:
    """Send a plain, unsigned HTTP request; return status and body of the answer."""
    return _ask_url


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The address of an S3 server that accepts any credentials."""
    for package in ("obstore", "moto", "flask"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _await_port(server, port)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


@pytest.fixture
def bucket(moto: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket; the credentials for it are in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    name = f"shoal-test-{next(_names)}"
    status, _ = _ask_url("PUT", f"{moto}/{name}", b"")
    assert status == 200
    return f"s3://{name}/run/blobs?endpoint={moto}"


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty store."""
    return Place(request.getfixturevalue("bucket") if request.param == "s3" else "", tmp_path)


@pytest.fixture
def disk_place(tmp_path: Path) -> Place:
    """An empty store on disk."""
    return Place("", tmp_path)


@pytest.fixture(scope="session")
def make_place() -> Callable[[Path], Place]:
    """The same in a given folder."""
    return lambda folder: Place("", folder)


@pytest.fixture
def s3_place(bucket: str, tmp_path: Path) -> Place:
    """An empty store in a bucket."""
    return Place(bucket, tmp_path)


def _await_port(server: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail("moto's server did not start")
            time.sleep(0.05)
        else:
            return
