"""A whole coordinator: real decisions, real files, real processes, killed and restarted."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.commands import common
from shoal.commands.ledger import verify_database
from shoal.commands.node import join_run
from shoal.commands.query import ask_explanation, ask_status
from shoal.coordinator.blobs.disk import DiskLimits
from shoal.coordinator.service import CoordinatorService, ServiceConfig, open_service
from shoal.errors import ConfigError, UnreachableError
from shoal.identity.delegation import Grant, Scope, sign_delegation
from shoal.identity.documents import DocumentError
from shoal.identity.keys import Key
from shoal.net.client import parse_endpoint
from shoal.net.retry import RefusedError, RetryingClient, RetryPolicy
from shoal.node.client import NodeClient
from shoal.protocol.descriptor import Descriptor, open_descriptor, sign_descriptor
from shoal.protocol.messages import (
    Action,
    Command,
    CommandAnswer,
    GroupFinding,
    Heartbeat,
    Lease,
    Manifest,
    RolloutEntry,
    SignedCommand,
    SubmissionState,
    Verdict,
    VerdictStatement,
    VersionStatement,
    sign_message,
)
from shoal.protocol.params import RunParams
from shoal.util.clock import read_clock

OPERATOR, OWNER, JUDGE = Key.generate(), Key.generate(), Key.generate()
DATA = os.urandom(3_000_000)


def make_config(**changes: Any) -> ServiceConfig:
    params = RunParams(
        steps=1,
        async_level=0,
        groups_per_batch=1,
        group_size=2,
        max_tokens=8192,
        max_prompt_tokens=10**6,
        validators=(JUDGE.public,),
        trainers=(JUDGE.public,),
    )
    values = {"run": "demo", "operator": OPERATOR.public, "port": 0, "join_work": 16, "params": params, **changes}
    return ServiceConfig(**values)


@asynccontextmanager
async def node_of(
    service_url: str, coordinator: str, owner: Key, folder: Path, *scopes: Scope
) -> AsyncIterator[NodeClient]:
    """A joined node of an owner."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "node.key"
    if not path.exists():
        Key.generate().save(path)
    key = Key.load(path)
    now_ms = read_clock()
    grant = Grant(key.public, "demo", now_ms - 1000, now_ms + 10**8, frozenset(scopes), 16)
    asker = RetryingClient(RetryPolicy(tries=12, first_s=0.1, longest_s=0.5))
    client = NodeClient(
        parse_endpoint(service_url), key, run="demo", coordinator=coordinator, folder=folder, asker=asker
    )
    await client.join(sign_delegation(owner, grant))
    yield client
    client.close()


def make_manifest(lease: Lease, data: bytes) -> Manifest:
    count = lease.count * lease.group_size
    hashes = [hashlib.sha256(b"%s %d" % (lease.lease.encode(), number)).hexdigest() for number in range(count)]
    rollouts = tuple(RolloutEntry(hash=text, tokens=6000) for text in hashes)
    blob = hashlib.sha256(data).hexdigest()
    return Manifest(lease=lease.lease, fence=lease.fence, blob=blob, size=len(data), version=0, rollouts=rollouts)


@asynccontextmanager
async def running(data: Path, **changes: Any) -> AsyncIterator[CoordinatorService]:
    async with asyncio.timeout(60), open_service(make_config(**changes), data) as service:
        yield service


def test_a_run_of_one_step_goes_from_the_first_join_to_the_last_version(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path / "data") as service:
            where = service.url, service.coordinator.public
            async with (
                node_of(*where, OWNER, tmp_path / "worker", Scope.WORK) as worker,
                node_of(*where, JUDGE, tmp_path / "judge", Scope.VALIDATE, Scope.TRAIN) as judge,
            ):
                await judge.publish_version(VersionStatement(version=0, root="0" * 64, manifest="0" * 64, batch=""))
                assert (await worker.send_heartbeat(Heartbeat())).newest_version == 0
                lease = (await worker.ask_lease(version=0)).lease
                assert lease is not None and (lease.step, lease.count) == (1, 1)
                path = tmp_path / "file"
                path.write_bytes(DATA)
                manifest = make_manifest(lease, DATA)
                receipt = (await worker.submit(manifest, path)).receipt
                with pytest.raises(RefusedError):
                    await worker.fetch_blob(receipt.submission, manifest.blob, manifest.size, tmp_path / "stolen")
                job = (await judge.claim_jobs()).job
                assert job is not None and job.submission == receipt.submission
                await judge.fetch_blob(job.submission, manifest.blob, manifest.size, tmp_path / "copy")
                assert (tmp_path / "copy").read_bytes() == DATA
                found = VerdictStatement(
                    submission=job.submission,
                    round=job.round,
                    verdict=Verdict.ACCEPTED,
                    tokens=200,
                    groups=(GroupFinding(index=job.first, signal=True),),
                )
                assert (await judge.send_verdict(found)).record.state is SubmissionState.ACCEPTED
                batch = (await judge.cut_batch(1)).batch
                assert batch is not None and [entry.blob for entry in batch.groups] == [manifest.blob]
                assert (await judge.read_batch(1)).batch == batch
                last = VersionStatement(version=1, root="1" * 64, manifest="1" * 64, batch=batch.hash)
                assert (await judge.publish_version(last)).finished
                assert (await worker.send_heartbeat(Heartbeat())).finished
                assert receipt.submission in (await ask_explanation(service.url, receipt.submission)).text
                assert "finished" in (await ask_status(service.url)).text
                leaders = (await worker.read_leaders()).leaders
                assert [line.owner for line in leaders if line.tokens] == [OWNER.public]
                await service.coordinator.ledger.sign_head()
                await worker.send_heartbeat(Heartbeat())
                assert worker.heads.held is not None

    asyncio.run(check())
    assert verify_database(f"sqlite:///{tmp_path}/data/ledger.db").code == 0


def test_an_operators_ban_reaches_every_later_request(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path / "data") as service:
            where = service.url, service.coordinator.public
            async with node_of(*where, OWNER, tmp_path / "worker", Scope.WORK) as worker:
                await worker.send_heartbeat(Heartbeat())
                command = Command(nonce="0" * 32, action=Action.BAN, target=OWNER.public, reason="test")
                signed = SignedCommand(command=command, signature=sign_message(OWNER, "demo", command))
                with pytest.raises(RefusedError):
                    await worker.bring("/v1/commands", signed, CommandAnswer)  # by its own key
                signed = SignedCommand(command=command, signature=sign_message(OPERATOR, "demo", command))
                await worker.bring("/v1/commands", signed, CommandAnswer)
                for attempt in (worker.send_heartbeat(Heartbeat()), worker.ask_lease(version=0), worker.leave()):
                    with pytest.raises(RefusedError, match="banned"):
                        await attempt

    asyncio.run(check())


def test_the_commands_join_and_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "quick_retries", lambda: RetryPolicy(tries=1))

    async def check() -> None:
        OWNER.save(tmp_path / "owner.key")
        async with running(tmp_path / "data") as service:
            outcome = await join_run(service.url, folder=tmp_path / "node", owner=tmp_path / "owner.key")
            assert outcome.code == 0 and OWNER.public in outcome.text
            again = await join_run(
                str(tmp_path / "data" / "descriptor.json"),
                folder=tmp_path / "node",
                delegation=tmp_path / "node" / "delegation.json",
                coordinator=service.coordinator.public,
            )
            assert again.code == 0
            with pytest.raises(ConfigError, match=service.coordinator.public):
                await join_run(
                    service.url, folder=tmp_path / "node", owner=tmp_path / "owner.key", coordinator=JUDGE.public
                )
            assert (await ask_status(service.url)).text.startswith("run demo: running")
            with pytest.raises(RefusedError, match=r"no such submission \(not_found\)"):
                await ask_explanation(service.url, "s99")
        with pytest.raises(UnreachableError, match="no connection"):
            await join_run(service.url, folder=tmp_path / "node", owner=tmp_path / "owner.key")

    asyncio.run(check())


def test_a_ledger_without_its_keys_is_not_opened(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path):
            assert (tmp_path / "coordinator.key").stat().st_mode & 0o077 == 0
            assert (tmp_path / "beacon.secret").stat().st_mode & 0o077 == 0
        for name in ("coordinator.key", "beacon.secret"):
            (tmp_path / name).rename(tmp_path / "away")
            with pytest.raises(ConfigError, match="restore it"):
                async with running(tmp_path):
                    pass
            (tmp_path / "away").rename(tmp_path / name)
        async with running(tmp_path):
            pass

    asyncio.run(check())


def test_an_invalid_secret_or_one_that_others_may_read_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path):
            pass
        secret = tmp_path / "beacon.secret"
        secret.chmod(0o644)
        with pytest.raises(ConfigError, match="readable by others"):
            async with running(tmp_path):
                pass
        secret.chmod(0o600)
        secret.write_text("no hex")
        with pytest.raises(ConfigError, match="not a beacon secret"):
            async with running(tmp_path):
                pass

    asyncio.run(check())


def test_files_that_the_store_does_not_take_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    large = make_config().params.model_copy(update={"blob_max_bytes": 2**27})

    async def check() -> None:
        with pytest.raises(ConfigError, match=r"params.blob_max_bytes=134217728: more than the store accepts"):
            async with running(tmp_path / "data", params=large):
                pass
        assert not (tmp_path / "data").exists()
        async with running(tmp_path / "data", params=large, blobs=DiskLimits(max_blob_bytes=2**27)):
            pass
        with pytest.raises(ConfigError, match="more than the store accepts"):  # the run keeps its own parameters
            async with running(tmp_path / "data"):
                pass

    asyncio.run(check())


def test_a_restart_makes_joining_no_cheaper(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path) as service:
            now_ms = read_clock()
            for _ in range(40):
                key = Key.generate()
                grant = Grant(key.public, "demo", now_ms - 1000, now_ms + 10**8, frozenset({Scope.WORK}), 1)
                await service.coordinator.join(key.public, sign_delegation(OWNER, grant))
        async with running(tmp_path) as service:
            assert service.context.gate.rate.find_work(read_clock() / 1000) >= 2 * 16

    asyncio.run(check())


def test_a_descriptor_is_believed_only_under_one_of_its_own_keys() -> None:
    key, operator = Key.generate(), Key.generate()
    descriptor = Descriptor("demo", key.public, operator.public, ("http://a:1",), "0" * 64)
    for signer in (key, operator):
        assert open_descriptor(sign_descriptor(signer, descriptor)) == descriptor
    with pytest.raises(DocumentError, match="not signed by either"):
        open_descriptor(sign_descriptor(Key.generate(), descriptor))
    stores = (
        "https://s3.example.org/bucket/run/blobs/",
        "https://bucket.s3.example.org:8443/",
        "http://127.0.0.1:9/b/",
    )
    named = replace(descriptor, stores=stores)
    assert open_descriptor(sign_descriptor(key, named)) == named
    for store in (
        "http://s3.example.org/bucket/",  # no TLS, and not on this machine
        "https://s3.example.org/bucket",
        "https://user@s3.example.org/bucket/",
        "https://s3.example.org/bucket/?a=b/",
        "s3://bucket/",
        "https:///bucket/",
    ):
        with pytest.raises(ValueError, match="stores"):
            replace(descriptor, stores=(store,))
    for changes in ({"urls": ("ftp://a",)}, {"urls": ("http://a/b",)}, {"genesis": "x"}, {"run": "A B"}):
        with pytest.raises(ValueError):
            replace(descriptor, **changes)
    for data in (b"", b"{}", sign_descriptor(key, descriptor).replace(b"demo", b"dema")):
        with pytest.raises(DocumentError):
            open_descriptor(data)


_PROCESS = """
import asyncio, sys
from pathlib import Path
from shoal.coordinator.run import serve_run
from shoal.coordinator.service import ServiceConfig
from shoal.util.logs import log_to_stderr

config = ServiceConfig.model_validate_json(sys.argv[2], strict=True)
with log_to_stderr("coordinator", as_json=True):
    asyncio.run(serve_run(config, Path(sys.argv[1])))
"""


@contextmanager
def process_of(data: Path, port: int) -> Iterator[tuple["subprocess.Popen[bytes]", dict[str, Any]]]:
    config = make_config(port=port).model_dump_json()
    with subprocess.Popen([sys.executable, "-c", _PROCESS, str(data), config], stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            yield process, json.loads(process.stderr.readline())
        finally:
            process.kill()


def test_kill_minus_nine_in_the_middle_of_an_upload_costs_a_retry_and_nothing_else(tmp_path: Path) -> None:
    """Half a file is on the coordinator's disk when it dies; after a restart it knows the lease and the commitment."""
    path = tmp_path / "file"
    path.write_bytes(DATA)

    async def prepare(url: str, public: str) -> Manifest:
        async with (
            node_of(url, public, OWNER, tmp_path / "worker", Scope.WORK) as worker,
            node_of(url, public, JUDGE, tmp_path / "judge", Scope.VALIDATE, Scope.TRAIN) as judge,
        ):
            await judge.publish_version(VersionStatement(version=0, root="0" * 64, manifest="0" * 64, batch=""))
            lease = (await worker.ask_lease("a" * 32, version=0)).lease
            assert lease is not None
            manifest = make_manifest(lease, DATA)
            assert (await worker.commit(manifest)).state is SubmissionState.COMMITTED
            return manifest

    async def upload_half(url: str, public: str, manifest: Manifest, process: "subprocess.Popen[bytes]") -> None:
        async with node_of(url, public, OWNER, tmp_path / "worker", Scope.WORK) as worker:
            submission = (await worker.commit(manifest)).submission
            target = f"/v1/submissions/{submission}/blob"
            headers = worker._signer.sign_stream("PUT", target, manifest.size, bytes.fromhex(manifest.blob))
            place = parse_endpoint(url)
            _, writer = await asyncio.open_connection(place.url.host, place.url.port)
            lines = [f"PUT {target} HTTP/1.1", "Host: a", *(f"{name}: {value}" for name, value in headers), "", ""]
            writer.write("\r\n".join(lines).encode() + DATA[: len(DATA) // 2])
            await writer.drain()
            incoming = tmp_path / "data" / "blobs" / "incoming"
            while not list(incoming.iterdir()):
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert len(list(incoming.iterdir())) == 1
            writer.transport.abort()

    async def finish(url: str, public: str, manifest: Manifest) -> None:
        async with node_of(url, public, OWNER, tmp_path / "worker", Scope.WORK) as worker:
            assert (
                await worker.ask_lease("a" * 32, version=0)
            ).lease == first_lease  # the same request, the same answer
            receipt = (await worker.submit(manifest, path)).receipt
            assert (await worker.submit(manifest, path)).receipt == receipt

    with process_of(tmp_path / "data", 0) as (process, started):
        url, public = started["url"], started["coordinator"]
        manifest = asyncio.run(prepare(url, public))
        kept = json.loads((tmp_path / "worker" / "signed_leases" / f"{manifest.lease}.json").read_text())
        first_lease = Lease.model_validate_json(json.dumps(kept["body"]))
        asyncio.run(upload_half(url, public, manifest, process))
    port = int(url.rpartition(":")[2])
    with process_of(tmp_path / "data", port) as (process, started):
        assert started["coordinator"] == public
        asyncio.run(finish(url, public, manifest))
        assert list((tmp_path / "data" / "blobs" / "incoming").iterdir()) == []
        process.send_signal(signal.SIGKILL)
        process.wait()
    code, _, data = verify_database(f"sqlite:///{tmp_path}/data/ledger.db")
    assert code == 1 and data["findings"] == [], "killed before it signed its last events, and nothing else is wrong"


def test_a_new_run_promises_no_more_room_than_its_store_has(tmp_path: Path) -> None:
    async def check() -> None:
        room = 2**31
        async with running(tmp_path / "data", blobs=DiskLimits(max_bytes=room)) as service:
            assert service.coordinator.params.store_bytes == room
        with pytest.raises(ConfigError, match=r"params.store_bytes=2147483648: more than the store accepts"):
            async with running(tmp_path / "data", blobs=DiskLimits(max_bytes=room - 1)):
                pass
        with pytest.raises(ConfigError, match=r"are needed for 128 files of a lease of [0-9]+ groups"):
            async with running(tmp_path / "small", blobs=DiskLimits(max_bytes=2**20)):
                pass
        assert not (tmp_path / "small").exists()

    asyncio.run(check())


def test_leaving_and_joining_again_is_more_expensive_each_time_and_after_a_restart_too(tmp_path: Path) -> None:
    """With 200 joins in a moment, a further one needs 11 times the work; an owner with accepted work pays its own."""

    async def check() -> None:
        async with running(tmp_path / "data") as service:
            where = service.url, service.coordinator.public
            async with node_of(*where, OWNER, tmp_path / "worker", Scope.WORK) as worker:
                rate = service.context.gate.find_rate(worker._key.public)
                size, work = service.coordinator.ledger.size, rate.find_work(read_clock() / 1000)
                for _ in range(200):
                    await worker.leave()
                    await worker.join(sign_again(worker._key))
                assert service.coordinator.ledger.size == size + 400
                assert rate.find_work(read_clock() / 1000) > 10 * work
                risen = rate.find_work(read_clock() / 1000)
        async with running(tmp_path / "data") as service:
            gate, node = service.context.gate, worker._key.public
            assert gate.find_rate(node).find_work(read_clock() / 1000) > risen / 2
            service.coordinator.cache._tallies[OWNER.public] = 1, 0
            assert gate.find_rate(node).find_work(read_clock() / 1000) == work

    asyncio.run(check())


def sign_again(key: Key) -> bytes:
    now_ms = read_clock()
    return sign_delegation(OWNER, Grant(key.public, "demo", now_ms, now_ms + 10**8, frozenset({Scope.WORK}), 16))
