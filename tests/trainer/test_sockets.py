"""A trainer with a real coordinator, a real origin, a worker and a validator, all over sockets on this machine."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_swarm import hash_state, make_config, train_reference

from shoal.config.run import RunConfig
from shoal.coordinator.service import CoordinatorService, ServiceConfig, open_service
from shoal.engine.torch import TorchEngine
from shoal.group import GroupShape, generate_groups, plan_leased
from shoal.identity.keys import Key
from shoal.learner.filter import has_signal
from shoal.node.session import Role, Session, open_session
from shoal.policy.model import open_policy
from shoal.protocol.beacon import read_seeds
from shoal.protocol.messages import GroupFinding, Heartbeat, Lease, Manifest, Verdict, VerdictStatement
from shoal.protocol.params import RunParams
from shoal.shardcast.client import ShardcastClient
from shoal.shardcast.origin_service import open_origin
from shoal.submission.limits import SubmissionLimits
from shoal.submission.parse import parse_submission
from shoal.submission.read import read_claims
from shoal.submission.write import write_submission
from shoal.tasks.registry import load_family
from shoal.trainer.run import TrainerPaths, count_most, run_trainer

OPERATOR, TRAINER, JUDGE, PUBLISHER = (Key.generate() for _ in range(4))
BOUNDS = SubmissionLimits(max_rollouts=8, group_size=4, max_tokens=8, vocab_size=1 << 16)


def make_service(config: RunConfig) -> ServiceConfig:
    params = RunParams(
        steps=config.steps,
        async_level=config.async_level,
        groups_per_batch=config.batch.groups,
        group_size=config.batch.group_size,
        max_tokens=config.engine.max_tokens,
        groups_per_lease=2,
        duplicate_tokens=0,
        max_groups=count_most(config),
        heartbeat_s=1,
        trainers=(TRAINER.public,),
        validators=(JUDGE.public,),
    )
    return ServiceConfig(run="demo", operator=OPERATOR.public, port=0, join_work=16, params=params)


class Worker:
    """Generates its leases with the newest version, and judges them itself under another key."""

    def __init__(self, config: RunConfig, folder: Path, origin: str) -> None:
        self.config, self.folder, self.origin = config, folder, origin
        self.family = load_family(config.tasks.name, config.tasks.options)
        self.num_leases = 0

    async def run(self, service: CoordinatorService) -> None:
        async with (
            open_session(service.url, self.folder / "worker", role=Role.WORKER) as worker,
            open_session(
                service.url, self.folder / "judge", role=Role.VALIDATOR, owner=self.folder / "judge.key"
            ) as judge,
            await ShardcastClient.open(
                self.folder / "pulled", [self.origin], run="demo", publisher=PUBLISHER.public, keep=4
            ) as puller,
        ):
            while True:
                newest = (await worker.client.send_heartbeat(Heartbeat(role="worker"))).newest_version
                answer = await worker.client.ask_lease(version=max(0, newest))
                if answer.lease is None:
                    if answer.code == "finished":
                        return
                    await asyncio.sleep(0.05)
                    continue
                version = answer.lease.version
                path = await puller.pull(version)
                await self.deliver(worker, answer.lease, version, path)
                await self.judge(judge)
                self.num_leases += 1

    async def deliver(self, worker: Session, lease: Lease, version: int, weights: Path) -> None:
        groups = await asyncio.to_thread(self.generate, lease, version, weights)
        path = self.folder / lease.lease
        proofs = {rollout.id: () for group in groups for rollout in group.rollouts}
        written = write_submission(path, groups, proofs)
        manifest = Manifest(
            lease=lease.lease,
            fence=lease.fence,
            blob=written.sha256,
            size=written.size,
            version=version,
            rollouts=written.entries,
        )
        await worker.client.submit(manifest, path)

    def generate(self, lease: Lease, version: int, weights: Path) -> Any:
        policy = open_policy(weights)
        engine = TorchEngine(policy.model, eos_id=policy.eos_id, slots=16, version=version)
        shape = GroupShape(size=lease.group_size, max_tokens=lease.max_tokens, temperature=1.0)
        seeds = [read_seeds(text) for text in lease.seeds]
        plans = plan_leased(self.family, policy.tokenizer, shape, step=lease.step, first=lease.first, seeds=seeds)
        return generate_groups(engine, self.family, policy.tokenizer, plans)

    async def judge(self, judge: Session) -> None:
        job = (await judge.client.claim_jobs()).job
        assert job is not None
        path = self.folder / f"{job.submission}.copy"
        await judge.client.fetch_blob(job.submission, job.manifest.blob, job.manifest.size, path)
        groups = read_claims(parse_submission(path.read_bytes(), BOUNDS), BOUNDS).groups
        found = tuple(GroupFinding(index=group.index, signal=has_signal(group.rewards)) for group in groups)
        tokens = sum(group.num_tokens for group in groups)
        await judge.client.send_verdict(
            VerdictStatement(
                submission=job.submission, round=job.round, verdict=Verdict.ACCEPTED, tokens=tokens, groups=found
            )
        )


class Core:
    """A coordinator and an origin, which can be stopped and started again."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder, self.url = config, folder, ""
        self._origin: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[CoordinatorService]:
        TRAINER.save(self.folder / "trainer.key")
        JUDGE.save(self.folder / "judge.key")
        await self.start_origin()
        try:
            async with open_service(make_service(self.config), self.folder / "coordinator") as service:
                chores = asyncio.create_task(service.run())
                yield service
                chores.cancel()
                await asyncio.gather(chores, return_exceptions=True)
        finally:
            await self.stop_origin()

    async def start_origin(self) -> None:
        served: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def serve(port: int) -> None:
            async with open_origin(self.folder / "origin", run="demo", key=PUBLISHER, port=port) as service:
                served.set_result(str(service.server.url))
                await service.run()

        self._origin = asyncio.create_task(serve(int(self.url.rpartition(":")[2]) if self.url else 0))
        self.url = await served

    async def stop_origin(self) -> None:
        if self._origin is not None:
            self._origin.cancel()
            await asyncio.gather(self._origin, return_exceptions=True)

    @property
    def place(self) -> TrainerPaths:
        descriptor = self.folder / "coordinator" / "descriptor.json"
        return TrainerPaths(
            coordinator=str(descriptor), origin=self.folder / "origin", owner=self.folder / "trainer.key"
        )


def make_run(folder: Path, *overrides: str) -> RunConfig:
    return make_config(folder, "steps=3", *overrides)


def assert_synchronous(folder: Path, *overrides: str) -> None:
    """k = 0: the swarm computed what `shoal train` does with the secret that the ledger reveals at the end."""
    secret = (folder / "coordinator" / "beacon.secret").read_text()
    alone = train_reference(make_run(folder / "alone", *overrides), secret)
    assert hash_state(folder / "swarm" / "tiny-seed0") == hash_state(alone)


@pytest.mark.parametrize(("level", "rank"), [(0, 0), (2, 0), pytest.param(0, 2, marks=pytest.mark.long)])
def test_a_swarm_of_real_parts_trains_to_its_last_version(tmp_path: Path, level: int, rank: int) -> None:
    lora = f"policy.lora.rank={rank}"
    config = make_run(tmp_path / "swarm", f"async_level={level}", lora)
    core = Core(config, tmp_path)

    async def check() -> None:
        async with asyncio.timeout(120), core.open() as service:
            await _both(run_trainer(config, core.place), Worker(config, tmp_path, core.url).run(service))
            status = await asyncio.to_thread(service.coordinator.read_status)
            assert status.finished and status.newest_version == 3

    asyncio.run(check())
    versions = [json.loads(line) for line in (tmp_path / "swarm/tiny-seed0/versions/published.jsonl").open()]
    assert [line["version"] for line in versions] == [0, 1, 2, 3]
    if level == 0:
        assert_synchronous(tmp_path, lora)


def test_origin_and_trainer_may_end_at_any_time_and_the_run_goes_on(tmp_path: Path) -> None:
    config = make_run(tmp_path / "swarm", "checkpoint.every=2")
    core = Core(config, tmp_path)

    async def trouble(service: CoordinatorService) -> None:
        """The origin is down while v1 is written; the trainer ends right after v2, before its next checkpoint."""
        cache = service.coordinator.cache
        training = asyncio.create_task(run_trainer(config, core.place))
        while not (tmp_path / "pulled" / "v0").exists():
            await asyncio.sleep(0.01)
        await core.stop_origin()
        while not (tmp_path / "swarm/tiny-seed0/versions/v000001").exists():
            await asyncio.sleep(0.01)
        await core.start_origin()
        while cache.newest_version < 1:
            await asyncio.sleep(0.01)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await run_trainer(config, core.place)

    async def check() -> None:
        async with asyncio.timeout(120), core.open() as service:
            await _both(trouble(service), Worker(config, tmp_path, core.url).run(service))

    asyncio.run(check())
    assert_synchronous(tmp_path)


async def _both(one: Any, other: Any) -> None:
    await asyncio.gather(one, other)
