"""Files that nodes upload to a bucket and download from it directly: real nodes, a real service, moto's S3.

Each test has one service and its nodes; a lying coordinator is one whose bucket signs different URLs.
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator.blobs.base import DirectReader
from shoal.coordinator.service import CoordinatorService, ServiceConfig, open_service
from shoal.identity.keys import Key
from shoal.net.retry import RefusedError
from shoal.node.client import NodeClient
from shoal.node.session import Role, open_session
from shoal.protocol.messages import Manifest, RolloutEntry, VersionStatement
from shoal.protocol.params import RunParams

S3Reader: Any = pytest.importorskip("shoal.coordinator.blobs.s3", reason="obstore is not installed").S3Reader
DATA = os.urandom(120_000)
BLOB = hashlib.sha256(DATA).hexdigest()


class BucketSwarm:
    """A service with a bucket, a worker, and a validator that is also the trainer."""

    def __init__(self, service: CoordinatorService, worker: NodeClient, judge: NodeClient, folder: Path) -> None:
        self.service, self.worker, self.judge, self.folder = service, worker, judge, folder
        self.through: list[str] = []
        """requests that carried a file through the coordinator"""
        core = service.coordinator
        put, read = core.put_blob, S3Reader.__aiter__

        async def put_blob(node: str, submission: str, chunks: AsyncIterator[bytes]) -> Any:
            self.through.append("put")
            return await put(node, submission, chunks)

        async def read_blob(reader: Any) -> AsyncIterator[bytes]:
            if not reader._key.startswith("checking/"):
                self.through.append("get")
            async for piece in read(reader):
                yield piece

        core.put_blob, S3Reader.__aiter__ = put_blob, read_blob
        self.undo = lambda: setattr(S3Reader, "__aiter__", read)

    async def commit(self) -> tuple[Any, Manifest]:
        lease = (await self.worker.ask_lease(version=0)).lease
        assert lease is not None
        rollouts = (RolloutEntry(hash="1" * 64, tokens=5),) * lease.count
        manifest = Manifest(
            lease=lease.lease, fence=lease.fence, blob=BLOB, size=len(DATA), version=0, rollouts=rollouts
        )
        (self.folder / "file").write_bytes(DATA)
        return await self.worker.commit(manifest), manifest

    async def submit(self) -> str:
        """A submission whose file is uploaded to the place that its commitment named."""
        committed, manifest = await self.commit()
        receipt = (await self.worker.upload(committed, manifest, self.folder / "file")).receipt
        assert (receipt.blob, receipt.size) == (BLOB, len(DATA))
        return receipt.submission

    async def fetch(self, submission: str) -> bytes:
        await self.judge.fetch_blob(submission, BLOB, len(DATA), self.folder / "copy")
        return (self.folder / "copy").read_bytes()


@asynccontextmanager
async def open_swarm(bucket: str, folder: Path) -> AsyncIterator[BucketSwarm]:
    keys = {name: Key.generate() for name in ("worker", "judge")}
    for name, key in keys.items():
        key.save(folder / f"{name}.key")
    judge = keys["judge"].public
    config = ServiceConfig(
        run="demo",
        port=0,
        join_work=16,
        blob_store=bucket,
        params=RunParams(steps=1, group_size=1, max_prompt_tokens=10**6, validators=(judge,), trainers=(judge,)),
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(60))
        service = await stack.enter_async_context(open_service(config, folder / "data"))
        clients = []
        for name, role in (("worker", Role.WORKER), ("judge", Role.VALIDATOR), ("trainer", Role.TRAINER)):
            owner = folder / f"{'worker' if role is Role.WORKER else 'judge'}.key"
            session = open_session(service.url, folder / name, role=role, owner=owner)
            clients.append((await stack.enter_async_context(session)).client)
        swarm = BucketSwarm(service, clients[0], clients[1], folder)
        stack.callback(swarm.undo)
        first = VersionStatement(version=0, root="0" * 64, manifest="0" * 64, batch="")
        await clients[2].publish_version(first)
        service.coordinator.cache._tallies[keys["worker"].public] = 1, 0  # only owners with accepted work get URLs
        yield swarm


def run_swarm(bucket: str, folder: Path, work: Callable[[BucketSwarm], Any]) -> None:
    async def run() -> None:
        async with open_swarm(bucket, folder) as swarm:
            await work(swarm)

    asyncio.run(run())


def list_keys(bucket: str) -> list[str]:
    from shoal.coordinator.blobs.s3 import open_bucket

    return sorted(item["path"] for page in open_bucket(bucket).list() for item in page)


def test_with_a_bucket_no_file_passes_through_the_coordinator(bucket: str, tmp_path: Path) -> None:
    async def check(swarm: BucketSwarm) -> None:
        endpoint, name = bucket.partition("endpoint=")[2], bucket.split("/")[2]
        assert swarm.service.descriptor.stores == (f"{endpoint}/{name}/run/blobs/",)
        submission = await swarm.submit()
        assert list_keys(bucket) == [f"{BLOB[:2]}/{BLOB}"]
        assert (await swarm.judge.claim_jobs()).job is not None
        assert await swarm.fetch(submission) == DATA
        assert swarm.through == []
        assert (swarm.worker.stores.num_used, swarm.judge.stores.num_used) == (1, 1)

    run_swarm(bucket, tmp_path, check)


def test_sending_a_file_again_gets_the_same_receipt(bucket: str, tmp_path: Path) -> None:
    """As after a kill between the store's answer and the receipt, and between the receipt and storing it."""

    async def check(swarm: BucketSwarm) -> None:
        committed, manifest = await swarm.commit()
        await swarm.worker.stores.put(
            committed.upload_url, tmp_path / "file", blob=BLOB, size=len(DATA), timeout_s=10.0
        )
        again = await swarm.worker.commit(manifest)
        receipts = [await swarm.worker.upload(again, manifest, tmp_path / "file") for _ in range(2)]
        assert receipts[0].receipt == receipts[1].receipt
        assert swarm.through == []

    run_swarm(bucket, tmp_path, check)


def test_a_coordinator_that_signs_foreign_urls_gets_the_file_itself_and_no_one_else_does(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(swarm: BucketSwarm) -> None:
        heard: list[bytes] = []

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(await reader.read(100))
            writer.close()

        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        elsewhere = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        real = swarm.service.descriptor.stores[0]

        async def sign_upload(name: str, size: int, expires_s: int) -> str:
            return f"{elsewhere}/{real.partition('://')[2].partition('/')[2]}incoming/{name}.{size}?a=b"

        async def sign_download(reader: DirectReader, expires_s: int) -> str:
            return f"{elsewhere}/{BLOB[:2]}/{BLOB}?a=b"

        monkeypatch.setattr(swarm.service.coordinator.blobs, "sign_upload", sign_upload)
        monkeypatch.setattr(S3Reader, "sign_download", sign_download)
        submission = await swarm.submit()
        await swarm.judge.claim_jobs()
        assert await swarm.fetch(submission) == DATA
        assert (heard, swarm.through) == ([], ["put", "get", "get"])
        server.close()

    run_swarm(bucket, tmp_path, check)


def test_a_store_that_is_away_costs_nothing_but_the_way_through_the_coordinator(bucket: str, tmp_path: Path) -> None:
    async def check(swarm: BucketSwarm) -> None:
        for client in (swarm.worker, swarm.judge):
            for store in client.stores._stores:
                store.link._endpoint = type(store.link._endpoint)(type(store.link._endpoint.url)("127.0.0.1", 1), None)
        submission = await swarm.submit()
        await swarm.judge.claim_jobs()
        assert await swarm.fetch(submission) == DATA
        assert swarm.through == ["put", "get", "get"]
        assert not swarm.worker.stores.is_ready

    run_swarm(bucket, tmp_path, check)


def test_a_store_that_kept_other_bytes_is_found_out_and_the_coordinator_takes_the_file(
    bucket: str, tmp_path: Path, ask_url: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(swarm: BucketSwarm) -> None:
        put = swarm.worker.stores.put

        async def put_and_spoil(url: str, path: Path, **options: Any) -> None:
            await put(url, path, **options)
            await asyncio.to_thread(ask_url, "PUT", url, DATA[:-1] + b"x")

        monkeypatch.setattr(swarm.worker.stores, "put", put_and_spoil)
        await swarm.submit()
        assert swarm.through == ["put"]
        assert list_keys(bucket) == [f"{BLOB[:2]}/{BLOB}"]

    run_swarm(bucket, tmp_path, check)


def test_a_file_that_the_bucket_changed_is_read_by_nobody(bucket: str, tmp_path: Path) -> None:
    from shoal.coordinator.blobs.s3 import open_bucket

    async def check(swarm: BucketSwarm) -> None:
        submission = await swarm.submit()
        await swarm.judge.claim_jobs()
        await asyncio.to_thread(open_bucket(bucket).put, f"{BLOB[:2]}/{BLOB}", DATA[:-1] + b"x")
        with pytest.raises(RefusedError, match="the blob is damaged"):
            await swarm.fetch(submission)
        assert list(tmp_path.glob("*copy*")) == []
        assert swarm.judge.stores.num_failed == 1

    run_swarm(bucket, tmp_path, check)
