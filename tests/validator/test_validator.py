"""The validator's loop: how it handles its claims, and what can delay its end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fixtures.answers import make_heartbeat_answer

from shoal.net.api_error import ApiError
from shoal.net.retry import RefusedError
from shoal.node.session import Session, SessionError
from shoal.node.weights import PolicyCache
from shoal.policy.model import Policy
from shoal.protocol.messages import MAX_JOBS, ClaimAnswer, HeartbeatAnswer, Job, Standing, Verdict, VerdictStatement
from shoal.protocol.params import RunParams
from shoal.shardcast.fetch.upstreams import GoneError
from shoal.util.spans import SpanLog
from shoal.util.waits import RoleWaits
from shoal.validator import validator as loop
from shoal.validator.finding import Assessment, Replayed
from shoal.validator.validator import JudgingTime, Throughput, Validator

PATIENCE_S = 60.0
NEVER_MS = 10**15


class FakeSession:
    """A session whose coordinator hands out what it is given, and then nothing forever."""

    def __init__(self, *answers: ClaimAnswer | ApiError) -> None:
        self.stopping, self.idle = asyncio.Event(), asyncio.Event()
        self.waits, self.spans = RoleWaits("validator"), SpanLog(None, "validator")
        self.client = SimpleNamespace(
            claim_jobs=self._claim_jobs, fetch_blob=self._fetch, send_verdict=self._send, clock_offset_ms=0
        )
        self.params, self.problem = RunParams(), ""
        self.answers, self.missing = list(answers), set[str]()
        self.said: list[VerdictStatement] = []
        self.events: list[str] = []
        self.has_left = False
        self.read_state = self.on_heartbeat = None

    ask_coordinator = Session.ask_coordinator

    async def leave(self) -> None:
        self.has_left = True

    async def _claim_jobs(self, *, wait_s: int, most: int) -> ClaimAnswer:
        self.events.append("claims")
        if self.answers:
            if isinstance(answer := self.answers.pop(0), ApiError):
                raise RefusedError(answer)
            return answer
        self.idle.set()
        if not wait_s:
            return make_answer()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def _fetch(self, submission: str, blob: str, size: int, path: Path) -> None:
        if submission in self.missing:
            raise RefusedError(ApiError(404, "unknown_submission", "no such file"))
        path.write_text(submission)

    async def _send(self, statement: VerdictStatement) -> None:
        self.said.append(statement)


class FakeCache:
    """A cache with given weights."""

    def __init__(self, find: Callable[[int], Awaitable[Any]]) -> None:
        self._find = find

    async def find(self, version: int, *, beside: Collection[int] = ()) -> Any:
        return await self._find(version)


class FakeJudge:
    """Accepts everything, and records what it was given at once."""

    needs_previous = False
    previous: Any = None

    def __init__(self) -> None:
        self.shown: list[list[str]] = []
        self.is_done = asyncio.Event()
        """set when its computation has ended, even if late"""
        self.is_done.set()

    async def finish(self) -> None:
        await self.is_done.wait()

    async def judge_all(self, files: Sequence[tuple[Job, Path]], policy: Any) -> list[Assessment]:
        assert [path.read_text() for _, path in files] == [job.submission for job, _ in files]
        self.shown.append([job.submission for job, _ in files])
        return [Assessment(verdict=Verdict.ACCEPTED, replayed=Replayed(rollouts=2, tokens=20)) for _ in files]


async def have_all(version: int) -> Any:
    return "weights"


def make_job(name: str, *, version: int = 0, deadline_ms: int = NEVER_MS) -> Job:
    manifest = SimpleNamespace(blob="ab" * 32, size=1)
    return Job.model_construct(
        submission=name, round=1, step=1, version=version, manifest=manifest, deadline_ms=deadline_ms
    )


def make_answer(*jobs: Job) -> ClaimAnswer:
    return ClaimAnswer.model_construct(jobs=jobs, retry_after_s=0)


def run_loop(
    tmp_path: Path, session: FakeSession, find: Callable[[int], Awaitable[Any]] = have_all
) -> tuple[Validator, FakeJudge]:
    """Run the loop until there is nothing left to claim."""
    judge = FakeJudge()
    validator = Validator(session, judge, FakeCache(find), tmp_path)  # type: ignore[arg-type]

    async def go() -> None:
        running = asyncio.create_task(validator.run())
        async with asyncio.timeout(PATIENCE_S):
            await session.idle.wait()
            session.stopping.set()
            await running

    handler = logging.Handler()
    handler.emit = lambda record: session.events.append(record.getMessage())  # type: ignore[method-assign]
    loop.logger.addHandler(handler)
    try:
        asyncio.run(go())
    finally:
        loop.logger.removeHandler(handler)
    return validator, judge


@pytest.mark.parametrize("cause", ["stopping", "finished"])
def test_it_ends_while_a_claim_is_waiting(tmp_path: Path, cause: str) -> None:
    async def go() -> FakeSession:
        session = FakeSession()
        validator = Validator(session, FakeJudge(), None, tmp_path)  # type: ignore[arg-type]
        running = asyncio.create_task(validator.run())
        await session.idle.wait()
        if cause == "stopping":
            session.stopping.set()
        else:
            validator._hear(_say_finished())
        async with asyncio.timeout(PATIENCE_S):
            await running
        return session

    assert asyncio.run(go()).has_left is (cause == "stopping")  # who stays can be asked to judge an appeal


def test_what_is_left_when_the_run_is_finished_is_judged(tmp_path: Path) -> None:
    """An appeal after the end: a validator that is started for it hears at once that the run is finished."""

    async def go() -> FakeSession:
        session = FakeSession(make_answer(make_job("s1")), make_answer(make_job("s2")))
        validator = Validator(session, FakeJudge(), FakeCache(have_all), tmp_path)  # type: ignore[arg-type]
        validator._hear(_say_finished())
        async with asyncio.timeout(PATIENCE_S):
            await validator.run()
        return session

    session = asyncio.run(go())
    assert [statement.submission for statement in session.said] == ["s1", "s2"] and not session.has_left


def test_jobs_claimed_together_are_judged_together_and_reported_one_by_one(tmp_path: Path) -> None:
    session = FakeSession(make_answer(*(make_job(name) for name in ("s1", "s2", "s3"))), make_answer(make_job("s4")))
    validator, judge = run_loop(tmp_path, session)
    assert judge.shown == [["s1", "s2", "s3"], ["s4"]]
    assert [statement.submission for statement in session.said] == ["s1", "s2", "s3", "s4"]
    assert validator.verdicts[Verdict.ACCEPTED] == 4
    assert not list((tmp_path / "jobs").iterdir()), "nothing of a file is kept"


def test_a_limited_validator_waits_and_judges_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "POLL_S", 0)
    monkeypatch.setattr(loop, "_PAUSE_S", 0.01)
    limited = ApiError(403, "limited", "not for a while")
    session = FakeSession(limited, limited, make_answer(make_job("s1")))
    _, judge = run_loop(tmp_path, session)
    assert judge.shown == [["s1"]] and session.events.count("not for a while (limited)") == 1


def test_a_banned_validator_ends(tmp_path: Path) -> None:
    session = FakeSession(ApiError(403, "banned", "not any more"))
    validator = Validator(session, FakeJudge(), None, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(SessionError, match="no more jobs: not any more"):
        asyncio.run(validator.run())


def test_jobs_of_several_versions_are_judged_by_their_own(tmp_path: Path) -> None:
    session = FakeSession(make_answer(make_job("s1"), make_job("s2", version=1), make_job("s3")))
    asked: list[int] = []

    async def find(version: int) -> Any:
        asked.append(version)
        return "weights"

    _, judge = run_loop(tmp_path, session, find)
    assert (judge.shown, asked) == ([["s1", "s3"], ["s2"]], [0, 1])


def test_an_unavailable_file_does_not_affect_the_others(tmp_path: Path) -> None:
    session = FakeSession(make_answer(make_job("s1"), make_job("s2")))
    session.missing.add("s1")
    _, judge = run_loop(tmp_path, session)
    assert judge.shown == [["s2"]]
    assert [(said.submission, said.verdict) for said in session.said] == [
        ("s1", Verdict.INCONCLUSIVE),
        ("s2", Verdict.ACCEPTED),
    ]


def test_a_version_that_nobody_has_any_more_makes_a_verdict_inconclusive(tmp_path: Path) -> None:
    async def find(version: int) -> Any:
        return None

    session = FakeSession(make_answer(make_job("s1"), make_job("s2")))
    _, judge = run_loop(tmp_path, session, find)
    assert [said.verdict for said in session.said] == [Verdict.INCONCLUSIVE] * 2 and not judge.shown


def test_relays_that_are_away_cost_one_claim_and_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is dropped when its claim ends, and nothing is claimed until its weights are there."""
    monkeypatch.setattr(loop, "_PAUSE_S", 0.05)
    session = FakeSession(make_answer(make_job("s1", deadline_ms=0)), make_answer(make_job("s1")))
    tries = 0

    async def find(version: int) -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:  # longer than the claim
            await asyncio.Event().wait()
        session.events.append(f"weights of v{version}")
        return "weights"

    _, judge = run_loop(tmp_path, session, find)
    left = next(index for index, event in enumerate(session.events) if "left to other validators" in event)
    assert session.events[left + 1 :][:2] == ["weights of v0", "claims"]
    assert [said.verdict for said in session.said] == [Verdict.ACCEPTED] and judge.shown == [["s1"]]


def test_a_validator_stopped_while_the_coordinator_is_away_ends_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SHUTDOWN_GRACE_S", 0.05)
    session = FakeSession(make_answer(make_job("s1")))

    async def send(statement: VerdictStatement) -> None:
        session.idle.set()
        await asyncio.Event().wait()

    session.client.send_verdict = send
    run_loop(tmp_path, session)
    assert session.has_left and session.said == [] and "left to other validators" in session.events[-1]
    assert list((tmp_path / "jobs").iterdir()) == []


def test_its_throughput_is_reported_and_decides_how_much_it_claims(tmp_path: Path) -> None:
    session = FakeSession(make_answer(make_job("s1"), make_job("s2")))
    validator, _ = run_loop(tmp_path, session)
    assert validator._describe_state().tokens_per_s > 0
    assert "tokens/s" in validator.describe()


def test_a_late_validator_finishes_first_and_then_claims_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would delay the next claims too; five late ones in a row limit a validator."""
    monkeypatch.setattr(loop, "_PAUSE_S", 0.05)
    late = [make_job(f"s{number}", deadline_ms=0) for number in range(MAX_JOBS)]
    session, judge = FakeSession(make_answer(make_job("s99")), make_answer(*late)), FakeJudge()
    claim, judge_all = session._claim_jobs, judge.judge_all

    async def claim_jobs(*, wait_s: int, most: int) -> ClaimAnswer:
        claims.append((most, judge.is_done.is_set()))
        return await claim(wait_s=wait_s, most=most)

    async def judge_slowly(files: Sequence[tuple[Job, Path]], policy: Any) -> list[Assessment]:
        if len(files) == 1:
            return await judge_all(files, policy)
        judge.is_done.clear()
        asyncio.get_running_loop().call_later(0.5, judge.is_done.set)  # the thread continues
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def go() -> None:
        running = asyncio.create_task(validator.run())
        async with asyncio.timeout(PATIENCE_S):
            await session.idle.wait()
            session.stopping.set()
            await running

    claims: list[tuple[int, bool]] = []
    monkeypatch.setattr(session.client, "claim_jobs", claim_jobs)
    monkeypatch.setattr(judge, "judge_all", judge_slowly)
    validator = Validator(session, judge, FakeCache(have_all), tmp_path)  # type: ignore[arg-type]
    asyncio.run(go())
    assert claims == [(1, True), (MAX_JOBS, True), (1, True)]
    assert [said.submission for said in session.said] == ["s99"]


def test_after_a_late_judgement_trust_in_the_pace_grows_again() -> None:
    pace, quick = Throughput(), JudgingTime(jobs=1, rollouts=10, tokens=200, seconds=0.1)
    pace.add(quick)
    pace.note_late()
    found = []
    for _ in range(5):
        found.append(pace.choose_most(120))
        pace.add(quick)
    assert found == [1, 2, 4, MAX_JOBS, MAX_JOBS]


@pytest.mark.parametrize(("seconds", "most"), [(100.0, 1), (10.0, 3), (1.0, MAX_JOBS)])
def test_as_much_is_claimed_as_can_be_judged_well_in_time(seconds: float, most: int) -> None:
    pace = Throughput()
    assert pace.choose_most(120) == 1 and pace.describe() == ""
    pace.add(JudgingTime(jobs=1, rollouts=10, tokens=200, seconds=seconds))
    assert pace.choose_most(120) == most
    assert pace.tokens_per_s == pytest.approx(200 / seconds)


def test_weights_in_memory_stay_within_their_bound(
    policies: dict[int, Policy], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy = policies[0]
    size = sum(weight.numel() * weight.element_size() for weight in policy.model.parameters())
    pulled: list[int] = []

    async def pull(version: int) -> Path:
        if version > 5:
            raise GoneError("no source has this version any more")
        pulled.append(version)
        return Path(f"v{version}")

    client = SimpleNamespace(pull=pull, progress=SimpleNamespace(upstreams=()))

    def open_copy(version: int, folder: Path, base: Path | None, *, over: Policy | None) -> Policy:
        return over or deepcopy(policy)

    async def go() -> list[Any]:
        cache = PolicyCache(FakeSession(), client, None, tmp_path, memory_bytes=2 * size)  # type: ignore[arg-type]
        monkeypatch.setattr(cache, "_opener", SimpleNamespace(open=open_copy))
        monkeypatch.setattr(cache, "_find_old", _find_nothing)
        return [await cache.find(version) for version in (1, 2, 1, 3, 1, 2, 9)]

    found = asyncio.run(go())
    assert pulled == [1, 2, 3, 2], "recently used versions are cached, the others are fetched on demand"
    first, second, *_ = found
    assert found == [first, second, first, second, first, second, None], "the memory of one that left is used again"


def test_the_version_beside_which_another_is_requested_stays(
    policies: dict[int, Policy], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def pull(version: int) -> Path:
        return Path(f"v{version}")

    client = SimpleNamespace(pull=pull, progress=SimpleNamespace(upstreams=()))
    opened: list[tuple[int, Policy | None]] = []

    def open_over(version: int, folder: Path, base: Path | None, *, over: Policy | None) -> Policy:
        opened.append((version, over))
        return over or deepcopy(policies[0])

    async def go() -> tuple[Any, ...]:
        cache = PolicyCache(FakeSession(), client, None, tmp_path, memory_bytes=1)  # type: ignore[arg-type]
        monkeypatch.setattr(cache, "_opener", SimpleNamespace(open=open_over))
        previous = await cache.find(0, beside=[1])
        own = await cache.find(1, beside=[0])
        assert (await cache.find(1, beside=[2]), await cache.find(2, beside=[1])) == (own, previous)
        return previous, own

    previous, own = asyncio.run(go())
    assert previous is not own
    assert opened == [(0, None), (1, None), (2, previous)]


async def _find_nothing(version: int, beside: Collection[int]) -> None:
    """No relay has it."""


def _say_finished() -> HeartbeatAnswer:
    return make_heartbeat_answer(newest_version=3, oldest_version=3, standing=Standing.PROBATION, finished=True)
