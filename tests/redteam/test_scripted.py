"""Scripted attacks against a real coordinator: refused, or without gain, and honest nodes are not harmed.

Earnings are read from the ledger, refusals from the responses.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.audit.verify import verify_ledger
from shoal.coordinator.api.context import ApiLimits
from shoal.coordinator.blobs.disk import DiskLimits
from shoal.coordinator.rules.storage import MIN_FILES, POOL_PART, limit_lease_file
from shoal.coordinator.service import CoordinatorService, ServiceConfig, open_service
from shoal.coordinator.state import PROJECTIONS
from shoal.coordinator.state.members import OwnerRow, find_node, find_owner
from shoal.errors import ConfigError
from shoal.identity.authenticator import AuthLimits
from shoal.identity.delegation import Grant, Scope, sign_delegation
from shoal.identity.keys import Key
from shoal.ledger.db import open_database
from shoal.ledger.reader import read_events
from shoal.net.client import HttpResponse, parse_endpoint
from shoal.net.limits import HttpLimits
from shoal.node.client import NodeClient
from shoal.protocol.messages import GroupFinding, Standing, Verdict, VerdictStatement, VersionStatement
from shoal.protocol.params import RunParams
from shoal.recipe import Recipe, dump_recipe
from shoal.redteam.raw_requests import Budget, BudgetError, BudgetMeter
from shoal.redteam.registry import Expected, list_attacks
from shoal.redteam.scripted import AttackerIdentity, AttackEvidence, AttackSession, open_attack_session, run_script
from shoal.shardcast.origin import Origin
from shoal.shardcast.serve.server import ShardServer
from shoal.shardcast.store.store import VersionStore
from shoal.util.clock import read_clock
from shoal.util.metrics import render_metrics

RUN, PRICE = "demo", 3
OPERATOR, TRUSTED, PUBLISHER = (Key.generate() for _ in range(3))
SETTINGS: dict[str, Any] = {
    "steps": 2,
    "async_level": 0,
    "groups_per_batch": 400,
    "group_size": 4,
    "max_tokens": 8,
    "groups_per_lease": 2,
    "heartbeat_s": 1,
    "price": PRICE,
    "stake_submissions": 0,
    "duplicate_tokens": 0,
    "probation_leases": 4,
}


class ScriptedRun:
    """A coordinator, weights to fetch, and a validator that reads what it accepts."""

    def __init__(self, service: CoordinatorService, trusted: NodeClient, folder: Path) -> None:
        self.service, self.trusted, self.folder = service, trusted, folder
        self.num_judged = 0

    @asynccontextmanager
    async def open_session(self, name: str = "session", **budget: Any) -> AsyncIterator[AttackSession]:
        limits = Budget(**{"seconds": 20.0, **budget})
        async with open_attack_session(self.service.url, self.folder / name, budget=limits) as session:
            yield session

    async def judge_all(self) -> None:
        """Accept everything that is waiting: all of it is honest work, otherwise it would have been refused."""
        while (job := (await self.trusted.claim_jobs()).job) is not None:
            tokens = sum(entry.tokens for entry in job.manifest.rollouts)
            groups = tuple(GroupFinding(index=job.first + place, signal=True) for place in range(job.count))
            verdict = VerdictStatement(
                submission=job.submission, round=job.round, verdict=Verdict.ACCEPTED, tokens=tokens, groups=groups
            )
            await self.trusted.send_verdict(verdict)
            self.num_judged += 1

    def owner(self, public: str) -> OwnerRow:
        with self.service.coordinator.ledger.read() as connection:
            row = find_owner(connection, public)
        assert row is not None
        return row

    def width(self, attacker: AttackerIdentity) -> int:
        with self.service.coordinator.ledger.read() as connection:
            row = find_node(connection, attacker.key.public)
        assert row is not None
        return row.width

    def check_pay(self, owners: Iterable[str]) -> int:
        """Check that no owner earned more than the price of its accepted tokens; returns the accepted tokens of all."""
        rows = [self.owner(public) for public in owners if self.knows(public)]
        for row in rows:
            assert row.earned == PRICE * row.tokens and row.standing == Standing.PROBATION
        return sum(row.tokens for row in rows)

    def knows(self, public: str) -> bool:
        with self.service.coordinator.ledger.read() as connection:
            return find_owner(connection, public) is not None

    async def work_honestly(self, session: AttackSession, worker: AttackerIdentity, number: int) -> None:
        """Do that many leases; all must be accepted and paid."""
        before = self.owner(worker.owner.public).accepted
        for _ in range(number):
            lease = await session.take_lease(worker)
            assert lease is not None
            assert await session.submit(worker, await session.write_work(worker, lease)) is not None
            await self.judge_all()
        assert self.owner(worker.owner.public).accepted == before + number


@asynccontextmanager
async def open_origin(data: Path, weights: Path) -> AsyncIterator[str]:
    store = await VersionStore.open(data, run=RUN, publisher=PUBLISHER.public, keep=2, role="origin")
    server = ShardServer(store, role="origin")
    try:
        await server.start("127.0.0.1", 0)
        await Origin(store, PUBLISHER).publish(weights, 0)
        yield str(server.url)
    finally:
        await server.close()
        await store.close()


async def join_trusted(service: CoordinatorService, folder: Path) -> NodeClient:
    key, now_ms = Key.generate(), read_clock()
    scopes = frozenset({Scope.VALIDATE, Scope.TRAIN})
    grant = Grant(key.public, RUN, now_ms - 1000, now_ms + 10**8, scopes, 4)
    coordinator = service.coordinator.public
    client = NodeClient(parse_endpoint(service.url), key, run=RUN, coordinator=coordinator, folder=folder)
    await client.join(sign_delegation(TRUSTED, grant))
    await client.publish_version(VersionStatement(version=0, root="0" * 64, manifest="0" * 64, batch=""))
    return client


@pytest.fixture
def run_on(tmp_path: Path, versions: dict[int, Path], recipe: Recipe) -> Callable[..., None]:
    """Runs a check on its own coordinator; afterwards its ledger must hold."""

    async def run(check: Callable[[ScriptedRun], Any], limits: dict[str, Any], changes: dict[str, Any]) -> None:
        (tmp_path / "recipe.json").write_bytes(dump_recipe(recipe))
        people = {"trainers": (TRUSTED.public,), "validators": (TRUSTED.public,)}
        params = RunParams(**{**SETTINGS, **people, **changes})
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(asyncio.timeout(60))
            relay = await stack.enter_async_context(open_origin(tmp_path / "origin", versions[0]))
            config = ServiceConfig(
                run=RUN,
                operator=OPERATOR.public,
                port=0,
                join_work=16,
                params=params,
                publisher=PUBLISHER.public,
                relays=(relay,),
                recipe=str(tmp_path / "recipe.json"),
                **limits,
            )
            service = await stack.enter_async_context(open_service(config, tmp_path / "coordinator"))
            chores = asyncio.create_task(service.run())
            stack.callback(chores.cancel)
            trusted = await join_trusted(service, tmp_path / "trusted")
            stack.callback(trusted.close)
            await check(ScriptedRun(service, trusted, tmp_path))
        engine = open_database(str(tmp_path / "coordinator" / "ledger.db"))
        report = verify_ledger(engine, projections=PROJECTIONS)
        engine.dispose()
        assert report.holds, report.findings

    free = AuthLimits(address_rate=1e5, node_rate=1e5, owner_rate=1e5, fresh_rate=1e5)
    usual = {"auth": free, "api": ApiLimits(read_rate=1e5, stranger_rate=1e5)}

    def start(check: Callable[[ScriptedRun], Any], limits: dict[str, Any] | None = None, **changes: Any) -> None:
        asyncio.run(run(check, {**usual, **(limits or {})}, changes))

    return start


def assert_refused(session: AttackSession, *codes: str) -> None:
    """Everything that must be refused was refused for the right reason, and these reasons are among them."""
    assert session.evidence.trials and session.evidence.failures == []
    assert {trial.code for trial in session.evidence.trials} >= set(codes)


# The attack session


def test_a_session_attacks_only_this_machine_unless_allowed_otherwise(tmp_path: Path) -> None:
    async def check(source: str) -> None:
        async with open_attack_session(source, tmp_path / "session"):
            raise AssertionError("it was opened")

    for source in ("http://192.0.2.7:8700", "https://run.example.org"):
        with pytest.raises(ConfigError, match="not this machine"):
            asyncio.run(check(source))
    assert not (tmp_path / "session").exists()


def test_nothing_goes_beyond_the_budget() -> None:
    now_s = 0.0
    meter = BudgetMeter(Budget(identities=2, requests=3, seconds=5.0), clock=lambda: now_s)
    meter.spend_identity()
    meter.spend_identity()
    with pytest.raises(BudgetError, match="2 identities"):
        meter.spend_identity()
    meter.spend_request(2)
    with pytest.raises(BudgetError, match="3 requests"):
        meter.spend_request(2)
    assert (meter.num_identities, meter.num_requests, meter.left_requests) == (2, 2, 1)
    now_s = 6.0
    with pytest.raises(BudgetError, match="5 s used up"):
        meter.spend_request()
    assert meter.left_s == 0.0


def test_all_that_a_camp_sends_is_counted_and_no_more_is_sent(run_on: Any) -> None:
    async def check(scripted_run: ScriptedRun) -> None:
        async with scripted_run.open_session(requests=20, identities=3) as session:
            before, served = session.budget.num_requests, count_requests(scripted_run)
            worker = await session.join()
            await session.send(["GET /v1/head HTTP/1.1"])
            await session.send_many([(["GET /v1/head HTTP/1.1"], b"")] * 5)
            sent = session.budget.num_requests - before
            assert sent == count_requests(scripted_run) - served == 8
            with pytest.raises(BudgetError):
                await ask_for_ever(session, worker)
            assert session.budget.num_requests == 20 and count_requests(scripted_run) - served == 20 - before
            session.make_identity()
            with pytest.raises(BudgetError):
                session.make_identity()

    run_on(check)


async def ask_for_ever(session: AttackSession, worker: AttackerIdentity) -> None:
    while True:
        await session.ask_lease(worker)


def count_requests(scripted_run: ScriptedRun) -> int:
    text = render_metrics(scripted_run.service.context.registry).decode()
    lines = [line for line in text.splitlines() if line.startswith("shoal_requests_total{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def test_what_is_taken_or_refused_for_another_reason_is_a_failure() -> None:
    evidence = AttackEvidence()
    evidence.record("taken", ("replay",), HttpResponse(200, b"{}", None))
    evidence.record("otherwise", ("replay",), HttpResponse(401, b'{"code":"clock","text":"late"}', None))
    evidence.record("as it must be", ("replay",), HttpResponse(401, b'{"code":"replay","text":"again"}', None))
    evidence.record("nothing", ("replay",), HttpResponse(0, b"", None))
    with evidence.refused("fence", what="not even refused"):
        pass
    assert [trial.what for trial in evidence.failures] == ["taken", "otherwise", "nothing", "not even refused"]
    assert [trial.code for trial in evidence.trials] == ["", "clock", "replay", "closed", ""]


def test_every_script_of_the_registry_is_tried_here() -> None:
    scripted = {name for name, attack in list_attacks().items() if attack.scripted}
    assert scripted == set(re.findall(r'run_script\(session, "(\w+)"\)', Path(__file__).read_text()))
    assert {list_attacks()[name].expect for name in scripted} == {Expected.REFUSED, Expected.FRUITLESS}


# Fruitless


def test_who_returns_hard_tasks_meets_them_again_rests_and_gains_nothing(run_on: Any) -> None:
    async def check(scripted_run: ScriptedRun) -> None:
        async with scripted_run.open_session(seconds=30.0) as session:
            worker = await session.join()
            await run_script(session, "cherry_leases")
            figures = session.evidence.figures
            assert (figures["returned"], figures["met_again"], figures["no_lease_resting"]) == (3, 2, 1)
            await scripted_run.judge_all()
            await scripted_run.work_honestly(session, worker, 2)
            picker = scripted_run.owner(session.owners[1])
            assert picker.failures == (0 if picker.accepted else 3)
            scripted_run.check_pay(session.owners)

    run_on(check)


def test_who_asks_until_it_fits_is_offered_the_same(run_on: Any) -> None:
    async def check(scripted_run: ScriptedRun) -> None:
        async with scripted_run.open_session() as session:
            worker = await session.join()
            await run_script(session, "grinding")
            figures = session.evidence.figures
            assert 3 <= figures["tries"] <= 9 and figures["distinct"] == 3, "one each, whatever it tries"
            assert figures["other_by_same_key"] == 0
            await scripted_run.work_honestly(session, worker, 2)
            assert scripted_run.check_pay(session.owners[1:]) == 0

    run_on(check)


def test_a_worker_that_hoards_leases_delays_no_other_worker(run_on: Any) -> None:
    async def check(scripted_run: ScriptedRun) -> None:
        async with scripted_run.open_session("honest") as honest, scripted_run.open_session(seconds=4.0) as session:
            worker = await honest.join()
            await scripted_run.work_honestly(honest, worker, 1)
            hoarding = asyncio.create_task(run_script(session, "hoarding"))
            while session.evidence.figures.get("leases", 0) < 3:
                await asyncio.sleep(0.05)
            await scripted_run.work_honestly(honest, worker, 3)
            batch = (await scripted_run.trusted.cut_batch(1)).batch
            assert batch is not None and len(batch.groups) == 8
            await hoarding
            assert scripted_run.check_pay(session.owners) == 0 and session.evidence.figures["held_most"] <= 4
            assert scripted_run.check_pay(honest.owners) > 0

    run_on(check, groups_per_batch=8, lease_min_s=1, lease_first_s=3)


def test_many_names_earn_what_one_machine_earns_and_cannot_take_it_away(run_on: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("shoal.redteam.attacks.leases.NUM_SYBILS", 12)

    async def check(scripted_run: ScriptedRun) -> None:
        async with scripted_run.open_session(seconds=4.0) as session, scripted_run.open_session("honest") as honest:
            await asyncio.gather(run_script(session, "sybil"), judge_meanwhile(scripted_run, session))
            await scripted_run.judge_all()
            rows = [scripted_run.owner(public) for public in session.owners]
            assert len(rows) == 12 and session.evidence.figures["joins"] == 12
            number, counted = sum(row.accepted for row in rows), session.evidence.figures["handed_in"]
            assert number - counted in (0, 1) and counted > 2, "time may end before the last receipt arrives"
            assert not any(row.rejected for row in rows)
            assert scripted_run.check_pay(session.owners) > 0
            worker = await honest.join()
            await scripted_run.work_honestly(honest, worker, 3)
            assert scripted_run.owner(worker.owner.public).staked == 2
            assert sum(row.staked for row in rows) > 2, "each identity has to earn its own bond"

    run_on(check, stake_submissions=2)


def test_rubbish_earns_nothing_and_its_owners_are_shut_out(run_on: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("shoal.redteam.attacks.leases.NUM_RUBBISH", 8)

    async def reject_meanwhile(scripted_run: ScriptedRun, session: AttackSession) -> None:
        while session.left_s:
            while (job := (await scripted_run.trusted.claim_jobs()).job) is not None:
                assert job.bounded
                said = VerdictStatement(submission=job.submission, round=job.round, verdict=Verdict.FORM, cpu_ms=20)
                await scripted_run.trusted.send_verdict(said)
            await asyncio.sleep(0.05)

    async def check(scripted_run: ScriptedRun) -> None:
        async with scripted_run.open_session("honest") as honest, scripted_run.open_session(seconds=6.0) as session:
            worker = await honest.join()
            await scripted_run.work_honestly(honest, worker, 1)
            await asyncio.gather(run_script(session, "rubbish"), reject_meanwhile(scripted_run, session))
            rows = [scripted_run.owner(public) for public in session.owners if scripted_run.knows(public)]
            assert len(rows) >= 8 and not any(row.accepted or row.earned for row in rows)
            assert session.evidence.figures["no_lease_trial"] > 0, "while trials fail there are few"
            assert sum(row.rejected for row in rows) <= 8 + 6
            await scripted_run.work_honestly(honest, worker, 2)

    run_on(check)


async def judge_meanwhile(scripted_run: ScriptedRun, session: AttackSession) -> None:
    while session.left_s:
        await scripted_run.judge_all()
        await asyncio.sleep(0.1)


# Refused


def test_a_second_manifest_is_refused_and_the_first_is_paid_once(run_on: Any) -> None:
    async def check(scripted_run: ScriptedRun) -> None:
        async with scripted_run.open_session() as session:
            worker = await session.join()
            await run_script(session, "two_manifests")
            assert_refused(session, "committed", "body")
            assert [trial.code for trial in session.evidence.trials] == 4 * ["committed"] + ["body", "committed"]
            assert session.evidence.figures["same_again_same_answer"] == 1
            await scripted_run.judge_all()
            liar = scripted_run.owner(session.owners[1])
            assert (liar.accepted, liar.rejected) == (1, 0)
            await scripted_run.work_honestly(session, worker, 1)
            scripted_run.check_pay(session.owners)

    run_on(check)


def test_late_work_is_refused_and_its_groups_are_paid_once(run_on: Any) -> None:
    async def check(scripted_run: ScriptedRun) -> None:
        async with scripted_run.open_session() as session:
            worker = await session.join()
            await scripted_run.work_honestly(session, worker, 1)  # warms up the engine
            await run_script(session, "late")
            wanted = ["fence", "fence", "lease_ended", "unknown_lease", "superseded", "fence"]
            assert [trial.code for trial in session.evidence.trials] == [*wanted, "lease_ended", "superseded"]
            assert_refused(session)
            await scripted_run.judge_all()
            rows = [scripted_run.owner(public) for public in session.owners[1:]]
            assert [(row.accepted, row.rejected) for row in rows] == [(1, 0), (1, 0)]
            await scripted_run.work_honestly(session, worker, 1)
            scripted_run.check_pay(session.owners)

    run_on(check, lease_min_s=1, lease_first_s=3, late_s=0)


def test_what_was_signed_by_others_or_for_something_else_is_refused(run_on: Any) -> None:
    async def check(scripted_run: ScriptedRun) -> None:
        async with scripted_run.open_session() as session:
            worker = await session.join()
            events = scripted_run.service.coordinator.ledger.size
            await run_script(session, "signatures")
            assert_refused(session, "signature", "unsigned", "malformed", "statement", "scope", "delegation", "revoked")
            assert_refused(session, "unknown_node", "other_audience", "other_run", "other_owner", "body", "replay")
            kinds = list_kinds(scripted_run, events)
            # Two joined, one got a lease and returned it, one was revoked by its owner: all allowed.
            assert kinds == ["node.join", "node.join", "lease.grant", "lease.end", "node.revoke"]
            await scripted_run.work_honestly(session, worker, 1)
            scripted_run.check_pay(session.owners)

    run_on(check)


def list_kinds(scripted_run: ScriptedRun, first: int) -> list[str]:
    ledger = scripted_run.service.coordinator.ledger
    with ledger.read() as connection:
        return [event.kind for event in read_events(connection, first, ledger.size)]


def test_a_request_counts_once_whenever_and_wherever_it_comes_again(run_on: Any) -> None:
    async def check(scripted_run: ScriptedRun) -> None:
        async with scripted_run.open_session() as session:
            worker = await session.join()
            events = scripted_run.service.coordinator.ledger.size
            await run_script(session, "nonces")
            assert_refused(session, "replay", "clock", "signature")
            assert session.evidence.figures["good"] == 3 and "good_but_refused" not in session.evidence.figures
            assert list_kinds(scripted_run, events) == ["node.join"]
            await scripted_run.work_honestly(session, worker, 1)
            scripted_run.check_pay(session.owners)

    run_on(check)


def test_a_flood_is_refused_and_an_honest_node_is_answered_all_the_while(run_on: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("shoal.redteam.attacks.requests.MAX_OFFERED", 1000)
    monkeypatch.setattr("shoal.redteam.attacks.requests.CALM_S", 0.2)
    limits = {"auth": AuthLimits(), "api": ApiLimits(), "http": HttpLimits(window_seconds=0.5)}

    async def check(scripted_run: ScriptedRun) -> None:
        async with scripted_run.open_session() as session:
            worker = await session.join()
            await run_script(session, "flood")
            assert_refused(session, "too_many", "http", "too_large")
            figures = session.evidence.figures
            assert figures["requests_200"] + figures["requests_429"] == 1000
            assert figures["requests_200"] <= 200 + 100 * figures["requests_s"] + 1
            assert figures["questions_429"] > 0 and figures["statements_429"] > 0 and figures["promised"] <= 8
            assert figures["flood_answered"] > 0 and figures["flood_unanswered"] == 0
            await scripted_run.work_honestly(session, worker, 1)
            scripted_run.check_pay(session.owners)

    run_on(check, limits)


def test_several_owners_without_a_record_cannot_fill_the_store(run_on: Any, monkeypatch: Any) -> None:
    """With the smallest store, an owner with accepted work delivers before, meanwhile and afterwards."""
    monkeypatch.setattr("shoal.redteam.attacks.requests.NUM_FILLERS", 6)
    wide = {"groups_per_batch": 60, "max_pending_per_owner": 64, "limited_s": 1}
    room = MIN_FILES * limit_lease_file(RunParams(**{**SETTINGS, **wide}), SETTINGS["groups_per_lease"])
    limits = {"blobs": DiskLimits(max_bytes=room)}

    async def check(scripted_run: ScriptedRun) -> None:
        async with scripted_run.open_session() as session:
            worker = await session.join()
            await scripted_run.work_honestly(session, worker, 1)
            await run_script(session, "fill_store")
            assert_refused(session, "too_large")
            assert 0 < session.evidence.figures["stored_bytes"] <= room / POOL_PART
            assert session.evidence.figures["filling_unanswered"] == 0
            await scripted_run.work_honestly(session, worker, 2)

    run_on(check, limits, **wide)


def test_a_proof_of_work_pays_for_one_join(run_on: Any) -> None:
    async def check(scripted_run: ScriptedRun) -> None:
        async with scripted_run.open_session() as session:
            before = scripted_run.service.coordinator.ledger.size
            await run_script(session, "churn")
            assert_refused(session, "work")
            assert session.evidence.figures["joins"] == 1
            assert list_kinds(scripted_run, before) == ["node.join", "node.leave"]

    run_on(check)


def test_forged_requests_from_a_shared_address_silence_nobody(run_on: Any) -> None:
    limits = {"auth": AuthLimits(), "api": ApiLimits()}

    async def check(scripted_run: ScriptedRun) -> None:
        async with scripted_run.open_session() as session:
            await run_script(session, "neighbour")
            assert_refused(session)
            figures = session.evidence.figures
            assert figures["neighbour_answered"] > 0 and figures["neighbour_unanswered"] == 0
            assert figures["forged_429"] > 0

    run_on(check, limits)
