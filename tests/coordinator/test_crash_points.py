"""kill -9 of a whole coordinator at each of its crash points while all nodes keep working.

At the end: everything that was answered is true, nothing is paid twice, the ledger verifies with all its tables, and
every repeated request gets the first answer, byte for byte. Each time other points are drawn, then all that are left;
SHOAL_CRASH_KILLS sets how many are drawn.
"""

import asyncio
import hashlib
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import text

from shoal.audit.verify import verify_ledger
from shoal.coordinator.api.context import ApiLimits
from shoal.coordinator.decide.credit import MAX_OPEN
from shoal.coordinator.service import ServiceConfig
from shoal.coordinator.state import PROJECTIONS
from shoal.identity.authenticator import AuthLimits
from shoal.identity.delegation import Grant, Scope, sign_delegation
from shoal.identity.keys import Key
from shoal.ledger.db import open_database, read_snapshot
from shoal.ledger.ledger import POINTS
from shoal.net.client import parse_endpoint
from shoal.net.retry import RefusedError, RetryingClient, RetryPolicy
from shoal.node.client import NodeClient
from shoal.protocol.messages import (
    GroupFinding,
    Heartbeat,
    Lease,
    Manifest,
    RedeemAnswer,
    RedeemStatement,
    RolloutEntry,
    SignedRedeem,
    Verdict,
    VerdictStatement,
    VersionStatement,
    sign_message,
)
from shoal.protocol.params import RunParams
from shoal.util.clock import read_clock

PRICE, TOKENS = 10, 100
LONGEST_S = 600
"""for a run that hangs, not for a slow one"""
MOST_AGAIN = 300
POLL_S = 0.02
FAST = {"address_rate": 1e5, "node_rate": 1e5, "owner_rate": 1e5, "fresh_rate": 1e5}
OPEN = {"read_rate": 1e5, "stranger_rate": 1e5}
SUBMISSIONS = text("SELECT submission, state, received_ms, paid, blob, dropped FROM submission")
VERDICTS = text("SELECT submission, round, validator, verdict, state, paid FROM verdict")
BALANCES = text("SELECT account, amount FROM balance")
GROUPS = text("SELECT step, count(*), sum(batched) FROM trained_group GROUP BY step")
REDEEMS = text("SELECT request, amount FROM redeem")


class CrashingCoordinator:
    """The coordinator, from one life to the next."""

    def __init__(self, process: asyncio.subprocess.Process, data: Path, config: ServiceConfig, seed: int) -> None:
        self._process, self._data, self._config = process, data, config
        self._random = random.Random(seed)
        self.port = self.pid = 0
        self.hits: Counter[str] = Counter()

    async def run(self, num_kills: int, *, everywhere: bool) -> None:
        """Live and die; at the end, on request, also at each point where it has not died yet."""
        for _ in range(num_kills):
            named = self._random.random() < 0.6
            point, turn = self._random.choice(sorted(POINTS)), self._random.randrange(1, 3)
            await (self.die(point, turn, 80) if named else self.die("", 0, self._random.randrange(1, 40)))
        for point in sorted(POINTS) if everywhere else ():
            while point not in self.hits:  # some are passed at most once in a life
                await self.die(point, 1, 200)

    async def die(self, point: str, turn: int, most: int) -> None:
        self._order(point, turn, most)
        while (line := await self._read())[0] == "up":
            pass
        assert line[0] == "at", f"{line}: the coordinator ended unexpectedly"
        self.hits[line[1]] += 1
        assert await self._read() == ["end", str(int(signal.SIGKILL))]

    async def start(self) -> None:
        """A life without a planned end."""
        self._order("", 0, 0)
        word, port, pid = await self._read()
        assert word == "up"
        self.port, self.pid = int(port), int(pid)

    async def stop(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert (await self._read())[0] == "end"

    def _order(self, point: str, turn: int, most: int) -> None:
        config = self._config.model_dump(mode="json") | {"port": self.port}
        order = {"config": config, "data": str(self._data), "point": point, "turn": turn, "most": most}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _read(self) -> list[str]:
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode().split()


class Nodes:
    """All nodes of the run; each repeats its requests until they are answered, and remembers the answers."""

    def __init__(
        self, lives: CrashingCoordinator, folder: Path, owners: dict[str, Key], public: str, seed: int
    ) -> None:
        self._folder, self._owners = folder, owners
        self._random = random.Random(seed + 1)
        self.clients = {name: self._make_client(lives.port, name, public) for name in owners}
        self.over = False
        self.newest = 0
        """newest version"""
        self.answered: list[tuple[Callable[[], Awaitable[BaseModel]], BaseModel]] = []
        """requests that can be repeated, and the first answer"""
        self.receipts: dict[str, int] = {}
        self.records: dict[tuple[str, int], tuple[str, str, str, int]] = {}
        self.redeems: dict[str, int] = {}

    def _make_client(self, port: int, name: str, public: str) -> NodeClient:
        key = Key.generate()
        scopes = frozenset({{"judge": Scope.VALIDATE, "trainer": Scope.TRAIN}.get(name, Scope.WORK)})
        now_ms = read_clock()
        grant = Grant(key.public, "demo", now_ms - 1000, now_ms + 10**8, scopes, 16)
        client = NodeClient(
            parse_endpoint(f"http://127.0.0.1:{port}"),
            key,
            run="demo",
            coordinator=public,
            folder=self._folder / name,
            asker=RetryingClient(RetryPolicy(tries=2000, first_s=0.01, longest_s=0.03)),
        )
        client.delegation = sign_delegation(self._owners[name], grant)  # type: ignore[attr-defined]
        return client

    async def work_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name in ("ann", "bob"):
                group.create_task(self.deliver(self.clients[name], name))
                group.create_task(self.cash(self.clients[name], name))
            group.create_task(self.judge(self.clients["judge"]))
            group.create_task(self.train(self.clients["trainer"]))

    async def ask(self, question: Callable[[], Awaitable[Any]]) -> Any:
        """Send a request, and sometimes repeat it at once."""
        answer = await question()
        self.answered.append((question, answer))
        if self._random.random() < 0.1:
            assert (await question()).model_dump_json() == answer.model_dump_json()
        return answer

    async def deliver(self, client: NodeClient, name: str) -> None:
        while not self.over:
            question = partial(client.ask_lease, self._random.randbytes(16).hex(), version=self.newest)
            answer = await question()
            if answer.lease is None:
                await asyncio.sleep(POLL_S)
                await client.send_heartbeat(Heartbeat())
                continue
            assert (await question()) == answer
            self.answered.append((question, answer))
            path = self._folder / f"{name}-file"
            path.write_bytes(answer.lease.lease.encode() * 50)
            manifest = make_manifest(answer.lease, path)
            committed = await self.ask(partial(client.commit, manifest))
            receipt = (await client.upload(committed, manifest, path)).receipt
            again = partial(client.ask_receipt, committed.submission, manifest)
            assert (await self.ask(again)).receipt == receipt
            self.receipts[receipt.submission] = receipt.received_ms

    async def judge(self, client: NodeClient) -> None:
        while not self.over:
            job = (await client.claim_jobs()).job
            if job is None:
                await asyncio.sleep(POLL_S)
                continue
            statement = VerdictStatement(
                submission=job.submission,
                round=job.round,
                verdict=Verdict.ACCEPTED,
                tokens=TOKENS,
                groups=(GroupFinding(index=job.first, signal=self._random.random() < 0.8),),
            )
            record = (await self.ask(partial(client.send_verdict, statement))).record
            found = record.validator, record.verdict.value, record.state.value, record.paid
            self.records[record.submission, record.round] = found

    async def train(self, client: NodeClient) -> None:
        step, batch = 0, ""
        while not self.over:
            if step:
                answer = await client.cut_batch(step)
                if answer.batch is None:
                    await asyncio.sleep(POLL_S)
                    continue
                assert (await self.ask(partial(client.cut_batch, step))) == answer
                batch = answer.batch.hash
                for entry in answer.batch.groups:
                    await client.fetch_blob(entry.submission, entry.blob, 1000, self._folder / "group")
            root = hashlib.sha256(f"{step}".encode()).hexdigest()
            version = VersionStatement(version=step, root=root, manifest=root, batch=batch)
            await self.ask(partial(client.publish_version, version))
            self.newest = step
            step += 1

    async def cash(self, client: NodeClient, name: str) -> None:
        owner, made = self._owners[name], list[SignedRedeem]()
        while not self.over:
            statement = RedeemStatement(request=self._random.randbytes(16).hex(), amount=7)
            signed = SignedRedeem(
                redeem=statement, owner=owner.public, signature=sign_message(owner, "demo", statement)
            )
            if len(made) == MAX_OPEN:  # nobody pays them out, so only old ones are answered
                signed = self._random.choice(made)
            try:
                await self.ask(partial(client.bring, "/v1/redeems", signed, RedeemAnswer))
                self.redeems[signed.redeem.request] = 7
                made += [] if signed in made else [signed]
            except RefusedError as error:
                assert error.refusal.code == "credit"  # noqa: PT017
            await asyncio.sleep(0.2)

    async def ask_again(self) -> None:
        """Every repeated request gets the first answer, byte for byte."""
        for question, answer in self._random.sample(self.answered, min(len(self.answered), MOST_AGAIN)):
            assert (await question()).model_dump_json() == answer.model_dump_json()


def make_manifest(lease: Lease, path: Path) -> Manifest:
    data = path.read_bytes()
    return Manifest(
        lease=lease.lease,
        fence=lease.fence,
        blob=hashlib.sha256(data).hexdigest(),
        size=len(data),
        version=lease.version,
        rollouts=(RolloutEntry(hash=hashlib.sha256(lease.lease.encode()).hexdigest(), tokens=TOKENS),),
    )


def make_config(owners: dict[str, Key], url: str) -> ServiceConfig:
    params = RunParams(
        steps=2000,
        async_level=1,
        groups_per_batch=1,
        group_size=1,
        max_tokens=TOKENS,
        price=PRICE,
        stake_submissions=2,
        challenge_s=1,
        hold_submissions=0,
        appeal_s=1,
        validators=(owners["judge"].public,),
        trainers=(owners["trainer"].public,),
    )
    return ServiceConfig(
        run="demo",
        operator=Key.generate().public,
        port=0,
        join_work=1,
        database=url if url.startswith("postgresql") else "",
        params=params,
        auth=AuthLimits(**FAST),
        api=ApiLimits(**OPEN),
    )


async def run_lives(
    folder: Path, url: str, num_kills: int, seed: int, *, everywhere: bool
) -> tuple[Counter[str], Nodes]:
    owners = {name: Key.generate() for name in ("ann", "bob", "judge", "trainer")}
    data = folder / "data"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("crashing.py")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        lives = CrashingCoordinator(process, data, make_config(owners, url), seed)
        await lives.start()
        nodes = Nodes(lives, folder, owners, Key.load(data / "coordinator.key").public, seed)
        for client in nodes.clients.values():
            await client.join(client.delegation)  # type: ignore[attr-defined]
        await lives.stop()
        working = asyncio.create_task(nodes.work_all())
        dying = asyncio.create_task(lives.run(num_kills, everywhere=everywhere))
        await asyncio.wait([working, dying], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()  # raise its error
        await dying
        await lives.start()
        nodes.over = True
        await working
        await nodes.ask_again()
        await lives.stop()
        for client in nodes.clients.values():
            client.close()
    finally:
        process.kill()
        await process.wait()
    return lives.hits, nodes


def check_end(url: str, data: Path, nodes: Nodes) -> None:
    engine = open_database(url)
    report = verify_ledger(engine, projections=PROJECTIONS)
    assert not report.findings, report.findings  # killed at the end, so its last events may lack a head
    with read_snapshot(engine) as connection:
        submissions = {row.submission: row for row in connection.execute(SUBMISSIONS)}
        verdicts = {(row[0], row[1]): tuple(row[2:]) for row in connection.execute(VERDICTS)}
        balances = dict(tuple(row) for row in connection.execute(BALANCES))
        batches = [tuple(row) for row in connection.execute(GROUPS)]
        redeems = dict(tuple(row) for row in connection.execute(REDEEMS))
    engine.dispose()
    assert {name: submissions[name].received_ms for name in nodes.receipts} == nodes.receipts
    assert {key: verdicts[key] for key in nodes.records} == nodes.records
    assert nodes.redeems.items() <= redeems.items()
    accepted = [row for row in submissions.values() if row.state == "accepted"]
    assert all(row.paid == PRICE * TOKENS for row in accepted), "paid once"
    assert sum(row.paid for row in submissions.values()) == PRICE * TOKENS * len(accepted) == -balances["mint"]
    assert sum(amount for account, amount in balances.items() if account.startswith("redeeming")) == sum(
        redeems.values()
    )
    assert all(batched <= 1 for _, _, batched in batches), "a step trains on one group here"
    for row in submissions.values():
        is_there = (data / "blobs" / row.blob[:2] / row.blob).is_file()
        assert is_there or row.dropped or not row.received_ms, "a file that was acknowledged"
    assert any(row.dropped for row in submissions.values())


@pytest.mark.parametrize("url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)], indirect=True)
def test_kills_at_every_point_lose_nothing_and_pay_nothing_twice(url: str, quick_folder: Path) -> None:
    seed = int(os.environ.get("SHOAL_CRASH_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
    print(f"seed {seed}: the same with SHOAL_CRASH_SEED={seed}")
    num_kills = int(os.environ.get("SHOAL_CRASH_KILLS", "50"))
    is_sqlite = url.startswith("sqlite")
    used = f"sqlite:///{quick_folder}/data/ledger.db" if is_sqlite else url

    async def run() -> tuple[Counter[str], Nodes]:
        async with asyncio.timeout(LONGEST_S):
            return await run_lives(quick_folder, used, num_kills if is_sqlite else 25, seed, everywhere=is_sqlite)

    hits, nodes = asyncio.run(run())
    print(f"{hits.total()} kills: {dict(sorted(hits.items()))}; {len(nodes.answered)} answers to repeat")
    assert set(hits) == POINTS if is_sqlite else hits.total() >= 25, "every point was died at"
    check_end(used, quick_folder / "data", nodes)
