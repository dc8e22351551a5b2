"""A run in one process, with a clock that is set by hand: owners, workers, validators, a trainer, an operator."""

import asyncio
import hashlib
import itertools
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.keys import Key
from shoal.swarm.balances import read_balances
from shoal.swarm.blobs.base import WrongBlobError
from shoal.swarm.coordinator import Coordinator, open_run
from shoal.swarm.db import open_engine
from shoal.swarm.delegation import Grant, Scope, sign_delegation
from shoal.swarm.messages import (
    Action,
    AppealAnswer,
    AppealStatement,
    BatchAnswer,
    CanaryReveal,
    ClaimAnswer,
    Command,
    CommandAnswer,
    CommitAnswer,
    DriftCount,
    Finding,
    GroupFinding,
    GroupNumbers,
    Job,
    Lease,
    LeaseAnswer,
    Manifest,
    ReceiptAnswer,
    RedeemAnswer,
    RedeemStatement,
    RolloutEntry,
    SignedAppeal,
    SignedCommand,
    SignedManifest,
    SignedRedeem,
    SignedUnbond,
    SignedVerdict,
    SignedVersion,
    UnbondAnswer,
    UnbondStatement,
    Verdict,
    VerdictAnswer,
    VerdictStatement,
    VersionAnswer,
    VersionStatement,
    sign_message,
)
from shoal.swarm.params import RunParams, dump_params
from shoal.swarm.seals import make_seal, sign_seal
from shoal.swarm.state import PROJECTIONS
from shoal.swarm.verify import Report, verify_ledger

START_MS = 1_700_000_000_000
SECRET = bytes(range(32))
SMALL: dict[str, Any] = {
    "steps": 3,
    "async_level": 1,
    "groups_per_batch": 2,
    "group_size": 2,
    "max_tokens": 200,
    "price": 10,
    "stake_submissions": 1,
    "challenge_s": 100,
    "hold_submissions": 0,
    "hold_max_s": 1000,
    "unbond_s": 500,
    "good_after": 3,
    "appeal_every_s": 0,
    "second_share": 0,
    "reject_share": 0,
}


class MemoryBlobs:
    """Blobs in memory, with the rules of a real store."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    async def put(self, name: str, size: int, chunks: AsyncIterator[bytes]) -> None:
        data = b"".join([chunk async for chunk in chunks])
        if len(data) != size or hashlib.sha256(data).hexdigest() != name:
            raise WrongBlobError("other bytes than announced")
        self.blobs[name] = data

    async def has(self, name: str) -> bool:
        return name in self.blobs

    async def open(self, name: str) -> Any:
        return self.blobs[name]

    async def remove(self, name: str) -> None:
        self.blobs.pop(name, None)

    async def close(self) -> None:
        pass


class World:
    """Everybody who takes part."""

    def __init__(self, url: str, **changes: Any) -> None:
        self.url, self.now_ms = url, START_MS
        self.key, self.operator = Key.generate(), Key.generate()
        self.blobs = MemoryBlobs()
        self.owners: dict[str, Key] = {}
        self.nodes: dict[str, Key] = {}
        self._numbers = itertools.count(1)
        self._runner = asyncio.Runner()
        judges, trainer = (
            [self._make_owner(name) for name in ("judge-a", "judge-b", "judge-c")],
            self._make_owner("trainer"),
        )
        people = {"validators": tuple(key.public for key in judges), "trainers": (trainer.public,)}
        self.params = RunParams(**{**SMALL, **people, **changes})
        self.reopen()
        for name in ("judge-a", "judge-b", "judge-c"):
            self.join(name, name, scopes={Scope.VALIDATE})
        self.join("trainer", "trainer", scopes={Scope.TRAIN})

    def reopen(self) -> None:
        """As after a kill: everything from disk."""
        ledger = open_run(
            self.url,
            run="demo",
            key=self.key,
            operator=self.operator.public,
            secret=SECRET,
            params=self.params,
            clock=lambda: self.now_ms,
            linger_s=0.0,
        )
        self.coordinator = Coordinator(
            ledger, run="demo", key=self.key, secret=SECRET, blobs=self.blobs, clock=lambda: self.now_ms
        )
        self.run(self.coordinator.start())

    def restart(self) -> None:
        self.coordinator.ledger.close()
        self.reopen()

    def close(self) -> None:
        self.coordinator.ledger.close()
        self._runner.close()

    def run(self, coroutine: Any) -> Any:
        return self._runner.run(coroutine)

    def wait(self, seconds: float) -> None:
        """Let time pass, and the coordinator do what that brings."""
        self.now_ms += round(1000 * seconds)
        self.run(self.coordinator.tick())

    def id(self, node: str) -> str:
        return self.nodes[node].public

    def owner_id(self, owner: str) -> str:
        return self.owners[owner].public

    def join(self, node: str, owner: str, *, scopes: set[Scope] | None = None, max_leases: int = 64) -> Any:
        key = self.nodes.setdefault(node, Key.generate())
        grant = Grant(
            key.public, "demo", START_MS - 1000, START_MS + 10**10, frozenset(scopes or {Scope.WORK}), max_leases
        )
        return self.run(self.coordinator.join(key.public, sign_delegation(self._make_owner(owner), grant)))

    def ask(self, node: str, request_key: str | None = None) -> LeaseAnswer:
        chosen = request_key or f"{next(self._numbers):032x}"
        return self.run(self.coordinator.grant_lease(self.id(node), chosen))

    def lease(self, node: str) -> Lease:
        answer = self.ask(node)
        assert answer.lease is not None, f"{answer.code}: {answer.reason}"
        return answer.lease

    def make_manifest(self, lease: Lease, *, version: int | None = None, salt: str = "", **changes: Any) -> Manifest:
        """Rollouts that follow from the place of the lease, or from `salt` too."""
        number = lease.count * lease.group_size
        names = [f"{lease.step} {lease.first} {sample} {salt}" for sample in range(number)]
        rollouts = tuple(RolloutEntry(hash=hash_text(name), tokens=100) for name in names)
        values = {
            "lease": lease.lease,
            "fence": lease.fence,
            "blob": hash_text(lease.lease + salt),
            "rollouts": rollouts,
        }
        values |= {"size": len(lease.lease + salt), "version": lease.newest_version if version is None else version}
        return Manifest(**{**values, **changes})

    def commit(self, node: str, manifest: Manifest) -> CommitAnswer:
        signed = SignedManifest(manifest=manifest, signature=sign_message(self.nodes[node], "demo", manifest))
        return self.run(self.coordinator.commit_submission(self.id(node), signed))

    def upload(self, node: str, submission: str, data: bytes) -> ReceiptAnswer:
        return self.run(self.coordinator.put_blob(self.id(node), submission, send_bytes(data)))

    def submit(self, node: str, lease: Lease, *, salt: str = "", **changes: Any) -> str:
        answer = self.commit(node, self.make_manifest(lease, salt=salt, **changes))
        self.upload(node, answer.submission, (lease.lease + salt).encode())
        return answer.submission

    def claim(self, judge: str) -> ClaimAnswer:
        return self.run(self.coordinator.claim_jobs(self.id(judge)))

    def take(self, judge: str) -> Job:
        answer = self.claim(judge)
        assert answer.job is not None, "nothing to judge"
        return answer.job

    def describe_verdict(
        self,
        job: Job,
        verdict: Verdict = Verdict.ACCEPTED,
        *,
        signal: bool = True,
        check: str = "toploc",
        statistic: str = "",
        numbers: Sequence[int] = (),
        drift: Sequence[Sequence[int]] = (),
    ) -> VerdictStatement:
        """`numbers` are reward and entropy of each group, `drift` is level, chance, chunks and how many are above."""
        passed = verdict is Verdict.ACCEPTED
        worst = statistic or ("0.1" if passed else "0.5")
        tokens = sum(rollout.tokens for rollout in job.manifest.rollouts)
        own = GroupNumbers(tokens=tokens // job.count, reward=numbers[0], entropy=numbers[1]) if numbers else None
        groups = [GroupFinding(index=job.first + place, signal=signal, numbers=own) for place in range(job.count)]
        counts = [DriftCount(level=row[0], chance=row[1], chunks=row[2], above=row[3]) for row in drift]
        return VerdictStatement(
            submission=job.submission,
            round=job.round,
            verdict=verdict,
            findings=(Finding(check=check, statistic=worst, threshold="0.25", passed=passed, where="rollout 1"),),
            tokens=tokens if passed else 0,
            groups=tuple(groups) if passed else (),
            drift=tuple(counts) if passed else (),
        )

    def post(self, judge: str, statement: VerdictStatement) -> VerdictAnswer:
        signed = SignedVerdict(verdict=statement, signature=sign_message(self.nodes[judge], "demo", statement))
        return self.run(self.coordinator.post_verdict(self.id(judge), signed))

    def judge(self, judge: str, verdict: Verdict = Verdict.ACCEPTED, **changes: Any) -> VerdictAnswer:
        """Claim what is next, and judge it."""
        return self.post(judge, self.describe_verdict(self.take(judge), verdict, **changes))

    def work(self, node: str, verdict: Verdict = Verdict.ACCEPTED, **changes: Any) -> str:
        """One submission from lease to verdict."""
        submission = self.submit(node, self.lease(node))
        self.judge("judge-a", verdict, **changes)
        return submission

    def convict(self, node: str) -> str:
        """A submission that two validators find faked."""
        submission = self.work(node, Verdict.HARD)
        self.judge("judge-b", Verdict.HARD)
        return submission

    def cut(self, step: int) -> BatchAnswer:
        return self.run(self.coordinator.cut_batch(self.id("trainer"), step))

    def publish(self, version: int, batch: str = "", salt: str = "") -> VersionAnswer:
        root = hash_text(f"weights {version}{salt}")
        statement = VersionStatement(version=version, root=root, manifest=hash_text(root), batch=batch)
        signed = SignedVersion(version=statement, signature=sign_message(self.nodes["trainer"], "demo", statement))
        return self.run(self.coordinator.publish_version(self.id("trainer"), signed))

    def train(self, step: int) -> VersionAnswer:
        batch = self.cut(step).batch
        assert batch is not None, "the batch is not complete"
        return self.publish(step, batch.hash)

    def order(
        self, action: Action, *, nonce: str | None = None, key: Key | None = None, **values: Any
    ) -> CommandAnswer:
        command = Command(nonce=nonce or f"{next(self._numbers):032x}", action=action, **values)
        signature = sign_message(key or self.operator, "demo", command)
        return self.run(self.coordinator.command(SignedCommand(command=command, signature=signature)))

    def change(self, **changes: Any) -> CommandAnswer:
        """The operator changes parameters."""
        params = RunParams(**{**self.coordinator.params.model_dump(), **changes})
        return self.order(Action.PARAMS, params=dump_params(params))

    def seal(self, *owners: str) -> CommandAnswer:
        """The operator notes owners that will be canaries."""
        seals = tuple(make_seal(self._make_owner(owner), "demo") for owner in owners)
        return self.order(Action.CANARY_SEAL, seals=seals)

    def reveal(self, owner: str, *submissions: str, good: tuple[str, ...] = (), **values: Any) -> CommandAnswer:
        """The operator names a canary, and what it handed in that is bad, or good."""
        canary = CanaryReveal(signature=sign_seal(self.owners[owner], "demo"), submissions=submissions, good=good)
        return self.order(Action.CANARY_REVEAL, target=self.owner_id(owner), canary=canary, **values)

    def appeal(self, owner: str, submission: str) -> AppealAnswer:
        statement = AppealStatement(submission=submission)
        signature = sign_message(self.owners[owner], "demo", statement)
        signed = SignedAppeal(appeal=statement, owner=self.owner_id(owner), signature=signature)
        return self.run(self.coordinator.appeal(signed))

    def redeem(self, owner: str, amount: int, request: str | None = None, goal: str = "") -> RedeemAnswer:
        return self.run(self.coordinator.redeem(self.describe_redeem(owner, amount, request, goal)))

    def describe_redeem(self, owner: str, amount: int, request: str | None = None, goal: str = "") -> SignedRedeem:
        statement = RedeemStatement(request=request or f"{next(self._numbers):032x}", amount=amount, goal=goal)
        signature = sign_message(self.owners[owner], "demo", statement)
        return SignedRedeem(redeem=statement, owner=self.owner_id(owner), signature=signature)

    def unbond(self, owner: str, request: str | None = None, key: Key | None = None) -> UnbondAnswer:
        """An owner wants its bond back; `key` is whose signature is under it."""
        statement = UnbondStatement(request=request or f"{next(self._numbers):032x}")
        signature = sign_message(key or self.owners[owner], "demo", statement)
        signed = SignedUnbond(unbond=statement, owner=self.owner_id(owner), signature=signature)
        return self.run(self.coordinator.unbond(signed))

    def query(self, read: Callable[..., Any], *args: Any) -> Any:
        """What a function reads from the tables."""
        with self.coordinator.ledger.read() as connection:
            return read(connection, *args)

    def balance(self, purse: str, owner: str) -> int:
        account = f"{purse}:{self.owner_id(owner)}" if owner else purse
        return int(self.query(read_balances, [account])[account])

    def verify(self) -> Report:
        engine = open_engine(self.url)
        try:
            return verify_ledger(engine, projections=PROJECTIONS)
        finally:
            engine.dispose()

    def _make_owner(self, name: str) -> Key:
        return self.owners.setdefault(name, Key.generate())


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def send_bytes(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 3):
        yield data[start : start + 3]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module that says so in `DATABASES` has its worlds on each of them."""
    if "database" in metafunc.fixturenames and (databases := getattr(metafunc.module, "DATABASES", ())):
        metafunc.parametrize("database", databases, indirect=True)


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str:
    """What a world's ledger is in; SHOAL_TEST_DATABASE=postgresql has all of them there."""
    return str(getattr(request, "param", os.environ.get("SHOAL_TEST_DATABASE", "sqlite")))


@pytest.fixture
def make_world(
    request: pytest.FixtureRequest, database: str, quick_folder: Path, migrated: Path
) -> Iterator[Callable[..., World]]:
    """Begins a run; its ledger is verified at the end, whatever the test did."""
    worlds: list[World] = []
    # Asked for now, it ends after this one, which still reads what is in it.
    make_database = request.getfixturevalue("make_database") if database == "postgresql" else None

    def make_url() -> str:
        if make_database is not None:
            return str(make_database())
        path = quick_folder / f"run-{len(worlds)}.db"
        shutil.copy(migrated, path)
        return f"sqlite:///{path}"

    def make(**changes: Any) -> World:
        worlds.append(World(make_url(), **changes))
        return worlds[-1]

    yield make
    for world in worlds:
        report = world.verify()
        world.close()
        assert report.holds, report.findings


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A run of 3 steps of 2 groups with k = 1, v0 published; workers w1 of owner ann, w2 of bob, w3 of bob."""
    return settle_world(make_world())


@pytest.fixture
def both_world(url: str) -> Iterator[World]:
    """The same on SQLite and on PostgreSQL."""
    made = settle_world(World(url))
    yield made
    report = made.verify()
    made.close()
    assert report.holds, report.findings


def settle_world(world: World) -> World:
    for node, owner in (("w1", "ann"), ("w2", "bob"), ("w3", "bob")):
        world.join(node, owner)
    world.publish(0)
    return world
