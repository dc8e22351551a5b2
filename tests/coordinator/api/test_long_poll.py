"""Long-polling callers are answered when there is work, a job or a batch."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from shoal.coordinator.service import ServiceConfig, open_service
from shoal.identity.delegation import Grant, Scope, sign_delegation
from shoal.identity.keys import Key
from shoal.net.client import parse_endpoint
from shoal.net.retry import RetryingClient, RetryPolicy
from shoal.node.client import NodeClient
from shoal.protocol.messages import (
    GroupFinding,
    Lease,
    Manifest,
    RolloutEntry,
    Verdict,
    VerdictStatement,
    VersionStatement,
)
from shoal.protocol.params import RunParams
from shoal.util.clock import read_clock

OWNER, JUDGE = Key.generate(), Key.generate()
PARAMS = RunParams(
    steps=2,
    async_level=0,
    groups_per_batch=1,
    group_size=2,
    max_tokens=200,
    validators=(JUDGE.public,),
    trainers=(JUDGE.public,),
)
DATA = b"a file"


@asynccontextmanager
async def node_of(service, owner: Key, folder: Path, *scopes: Scope) -> AsyncIterator[NodeClient]:
    folder.mkdir()
    key, now_ms = Key.generate(), read_clock()
    grant = Grant(key.public, "demo", now_ms - 1000, now_ms + 10**8, frozenset(scopes), 16)
    place, asker = parse_endpoint(service.url), RetryingClient(RetryPolicy(tries=3, first_s=0.1, longest_s=0.5))
    client = NodeClient(place, key, run="demo", coordinator=service.coordinator.public, folder=folder, asker=asker)
    await client.join(sign_delegation(owner, grant))
    yield client
    client.close()


async def hand_in(client: NodeClient, lease: Lease, path: Path) -> None:
    hashes = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(2)]
    manifest = Manifest(
        lease=lease.lease,
        fence=lease.fence,
        blob=hashlib.sha256(DATA).hexdigest(),
        size=len(DATA),
        version=0,
        rollouts=tuple(RolloutEntry(hash=text, tokens=100) for text in hashes),
    )
    path.write_bytes(DATA)
    await client.submit(manifest, path)


def test_every_wait_ends_with_what_it_was_for(tmp_path: Path) -> None:
    async def check() -> None:
        config = ServiceConfig(run="demo", port=0, join_work=16, params=PARAMS)
        async with (
            asyncio.timeout(60),
            open_service(config, tmp_path / "data") as service,
            node_of(service, OWNER, tmp_path / "worker", Scope.WORK) as worker,
            node_of(service, JUDGE, tmp_path / "judge", Scope.VALIDATE) as judge,
            node_of(service, JUDGE, tmp_path / "trainer", Scope.TRAIN) as trainer,
        ):
            wants = [
                asyncio.create_task(worker.ask_lease(version=0, wait_s=30)),
                asyncio.create_task(judge.claim_jobs(wait_s=30)),
                asyncio.create_task(trainer.cut_batch(1, wait_s=30)),
            ]
            long_poll = service.context.long_poll
            while long_poll.num_waiting < 3:
                await asyncio.sleep(0.01)
            await trainer.publish_version(VersionStatement(version=0, root="0" * 64, manifest="0" * 64, batch=""))
            lease = (await wants[0]).lease
            assert lease is not None and not wants[1].done() and not wants[2].done()
            await hand_in(worker, lease, tmp_path / "file")
            job = (await wants[1]).job
            assert job is not None and not wants[2].done()
            found = VerdictStatement(
                submission=job.submission,
                round=job.round,
                verdict=Verdict.ACCEPTED,
                tokens=200,
                groups=(GroupFinding(index=job.first, signal=True),),
            )
            await judge.send_verdict(found)
            batch = (await wants[2]).batch
            assert batch is not None and batch.step == 1
            assert long_poll.num_waiting == 0

    asyncio.run(check())


def test_a_long_poll_that_times_out_returns_the_reason(tmp_path: Path) -> None:
    async def check() -> None:
        config = ServiceConfig(run="demo", port=0, join_work=16, params=PARAMS)
        async with (
            asyncio.timeout(60),
            open_service(config, tmp_path / "data") as service,
            node_of(service, OWNER, tmp_path / "worker", Scope.WORK) as worker,
        ):
            assert (await worker.ask_lease(version=0, wait_s=1)).code == "no_version"
            assert (await worker.ask_lease(version=0)).code == "no_version"

    asyncio.run(check())


def test_a_coordinator_that_stops_answers_waiting_callers(tmp_path: Path) -> None:
    async def check() -> None:
        config = ServiceConfig(run="demo", port=0, join_work=16, params=PARAMS)
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            service = await stack.enter_async_context(open_service(config, tmp_path / "data"))
            closing = stack.pop_all()
            async with node_of(service, OWNER, tmp_path / "worker", Scope.WORK) as worker:
                wants = asyncio.create_task(worker.ask_lease(version=0, wait_s=30))
                while not service.context.long_poll.num_waiting:
                    await asyncio.sleep(0.01)
                await closing.aclose()
                assert (await wants).code == "no_version"  # an answer, not a closed connection

    asyncio.run(check())
