"""A submission whose file goes directly into a bucket and out of it, by URLs from the coordinator."""

import asyncio
import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator.api.context import ApiContext
from shoal.coordinator.coordinator import Coordinator, open_run
from shoal.coordinator.service import build_app
from shoal.identity.delegation import Grant, Scope, sign_delegation
from shoal.identity.keys import Key
from shoal.identity.nonces import NonceStore
from shoal.identity.proof_of_work import JoinRate, WorkGate
from shoal.identity.signer import RequestSigner
from shoal.net.api_error import ApiError
from shoal.net.server import HttpServer
from shoal.protocol.messages import (
    BlobLink,
    CommitAnswer,
    LeaseAnswer,
    Manifest,
    ReceiptAnswer,
    RolloutEntry,
    SignedManifest,
    SignedVersion,
    VersionStatement,
    sign_message,
)
from shoal.protocol.params import RunParams
from shoal.util.clock import read_clock

DATA = os.urandom(120_000)
SECRET = bytes(32)


class Run:
    """A coordinator with a store, a worker, and a validator that is also the trainer."""

    def __init__(self, folder: Path, store: Any) -> None:
        self.key, self.worker, self.judge = Key.generate(), Key.generate(), Key.generate()
        judges = {"validators": (self.judge.public,), "trainers": (self.judge.public,)}
        params = RunParams(steps=1, group_size=1, max_prompt_tokens=10**6, **judges)
        self.ledger = open_run(
            f"sqlite:///{folder}/ledger.db",
            run="demo",
            key=self.key,
            operator=self.key.public,
            secret=SECRET,
            params=params,
        )
        self.core = Coordinator(self.ledger, run="demo", key=self.key, secret=SECRET, blobs=store)
        self.nonces = NonceStore(folder / "nonces.db")
        gate = WorkGate(bytes(16), "demo", JoinRate(base_work=16))
        self.server = HttpServer(build_app(ApiContext(self.core, gate=gate, nonces=self.nonces)))

    async def prepare(self) -> None:
        await self.core.start()
        now_ms = read_clock()
        for key, scopes in ((self.worker, {Scope.WORK}), (self.judge, {Scope.WORK, Scope.VALIDATE, Scope.TRAIN})):
            grant = Grant(key.public, "demo", now_ms - 1000, now_ms + 10**8, frozenset(scopes), 4)
            await self.core.join(key.public, sign_delegation(key, grant))
        version = VersionStatement(version=0, root="0" * 64, manifest="0" * 64, batch="")
        signed = SignedVersion(version=version, signature=sign_message(self.judge, "demo", version))
        await self.core.publish_version(self.judge.public, signed)
        self.core.cache._tallies[self.worker.public] = 1, 0  # only owners with accepted work get URLs
        await self.server.start()

    async def ask(self, key: Key, method: str, target: str, body: bytes = b"") -> bytes:
        headers = dict(RequestSigner(key, "demo", self.key.public).sign_request(method, target, body))
        host, port = self.server.address
        request = urllib.request.Request(
            f"http://{host}:{port}{target}", data=body or None, method=method, headers=headers
        )
        return await asyncio.to_thread(open_request, request)

    async def commit(self, data: bytes) -> CommitAnswer:
        """Get a lease for the worker and commit a file."""
        answer = await self.ask(self.worker, "POST", "/v1/leases", b'{"request_key":"%s","version":0}' % (b"1" * 32))
        lease = LeaseAnswer.model_validate_json(answer).lease
        assert lease is not None
        manifest = Manifest(
            lease=lease.lease,
            fence=lease.fence,
            blob=hashlib.sha256(data).hexdigest(),
            size=len(data),
            version=0,
            rollouts=(RolloutEntry(hash="1" * 64, tokens=5),) * lease.count,
        )
        signed = SignedManifest(manifest=manifest, signature=sign_message(self.worker, "demo", manifest))
        body = signed.model_dump_json().encode()
        return CommitAnswer.model_validate_json(await self.ask(self.worker, "POST", "/v1/submissions", body))

    async def close(self) -> None:
        await self.server.close()
        self.nonces.close()
        self.ledger.close()


def open_request(request: urllib.request.Request) -> bytes:
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        with error:
            refusal = ApiError.from_bytes(error.code, error.read())
        assert refusal is not None
        raise refusal from None


@asynccontextmanager
async def running(place: Any, folder: Path) -> AsyncIterator[Run]:
    store = place.open()
    run = Run(folder, store)
    try:
        async with asyncio.timeout(30):
            await run.prepare()
            yield run
    finally:
        await run.close()
        await store.close()


def test_a_file_goes_past_us_and_is_believed_once_it_was_looked_at(s3_place: Any, ask_url: Any, tmp_path: Path) -> None:
    async def check() -> None:
        async with running(s3_place, tmp_path) as run:
            answer = await run.commit(DATA)
            receipt_path = f"/v1/submissions/{answer.submission}/receipt"
            with pytest.raises(ApiError) as early:
                await run.ask(run.worker, "POST", receipt_path)
            assert early.value.code == "no_file"
            await asyncio.to_thread(ask_url, "PUT", answer.upload_url, DATA[:-1] + b"x")
            with pytest.raises(ApiError) as wrong:
                await run.ask(run.worker, "POST", receipt_path)
            assert (wrong.value.status, wrong.value.code) == (400, "blob")
            await asyncio.to_thread(ask_url, "PUT", answer.upload_url, DATA)
            receipt = ReceiptAnswer.model_validate_json(await run.ask(run.worker, "POST", receipt_path)).receipt
            assert (receipt.blob, receipt.size) == (hashlib.sha256(DATA).hexdigest(), len(DATA))

    asyncio.run(check())


def test_an_owner_without_accepted_work_uploads_through_us(s3_place: Any, tmp_path: Path) -> None:
    async def check() -> None:
        async with running(s3_place, tmp_path) as run:
            del run.core.cache._tallies[run.worker.public]
            answer = await run.commit(DATA)
            assert answer.upload_url == ""
            await run.ask(run.worker, "PUT", f"/v1/submissions/{answer.submission}/blob", DATA)

    asyncio.run(check())


def test_a_validator_may_download_a_submission_directly_and_its_worker_may_not(
    s3_place: Any, ask_url: Any, tmp_path: Path
) -> None:
    async def check() -> None:
        async with running(s3_place, tmp_path) as run:
            answer = await run.commit(DATA)
            await run.ask(run.worker, "PUT", f"/v1/submissions/{answer.submission}/blob", DATA)
            link_path = f"/v1/submissions/{answer.submission}/link"
            with pytest.raises(ApiError) as refused:
                await run.ask(run.worker, "GET", link_path)
            assert refused.value.status in (403, 404)
            await run.ask(run.judge, "POST", "/v1/claims", b"{}")
            link = BlobLink.model_validate_json(await run.ask(run.judge, "GET", link_path))
            assert await asyncio.to_thread(ask_url, "GET", link.url) == (200, DATA)
            assert await run.ask(run.judge, "GET", f"/v1/submissions/{answer.submission}/blob") == DATA

    asyncio.run(check())


def test_a_store_on_disk_hands_out_no_urls(tmp_path: Path) -> None:
    class OnDisk:
        def open(self) -> Any:
            from shoal.coordinator.blobs import open_blobs

            return open_blobs("", tmp_path / "blobs")

    async def check() -> None:
        async with running(OnDisk(), tmp_path) as run:
            answer = await run.commit(DATA)
            assert answer.upload_url == ""
            await run.ask(run.worker, "PUT", f"/v1/submissions/{answer.submission}/blob", DATA)
            await run.ask(run.judge, "POST", "/v1/claims", b"{}")
            link = await run.ask(run.judge, "GET", f"/v1/submissions/{answer.submission}/link")
            assert BlobLink.model_validate_json(link).url == ""

    asyncio.run(check())
