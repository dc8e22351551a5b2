"""A whole submission: leased, written, packed, and the job that a validator gets for it."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.fixtures.benches import load_bench

from shoal.policy.model import Policy
from shoal.protocol.messages import Job, Manifest
from shoal.recipe import Recipe
from shoal.rollout import Group
from shoal.submission.read import ParserPool
from shoal.submission.write import write_submission
from shoal.toploc.calibration import Calibration
from shoal.validator.finding import Assessment
from shoal.validator.judge import Judge
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour
from shoal.worker.orders import WorkLimits, take_order

OfflineGenerator = load_bench("offline_work").OfflineGenerator


@pytest.fixture(scope="session")
def calibration(tiny_calibration: Calibration) -> Calibration:
    return tiny_calibration


@pytest.fixture(scope="session")
def judge_runner(recipe: Recipe, calibration: Calibration) -> Iterator[tuple[asyncio.Runner, Judge]]:
    """A judge with one parser for all tests: starting one takes longer than judging."""
    with asyncio.Runner() as runner:
        jail = runner.run(ParserPool().__aenter__())
        yield runner, Judge(recipe, calibration, jail)
        runner.run(jail.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def run_judge(judge_runner: tuple[asyncio.Runner, Judge]) -> Callable[["Case"], Assessment]:
    """Judges one case."""
    runner, judge = judge_runner
    return lambda case: runner.run(judge.judge(case.job, case.path, case.policy))


@pytest.fixture(scope="session")
def judge_together(judge_runner: tuple[asyncio.Runner, Judge]) -> Callable[[Sequence["Case"]], list[Assessment]]:
    """Judges several cases of one version at once."""
    runner, judge = judge_runner
    return lambda cases: runner.run(judge.judge_all([(case.job, case.path) for case in cases], cases[0].policy))


@dataclass
class Case:
    """A submission, and the job for it."""

    job: Job
    path: Path
    policy: Policy
    judge: Callable[["Case"], Assessment]

    def opinion(self) -> Assessment:
        return self.judge(self)


@pytest.fixture
def hand_in(
    tmp_path: Path, recipe: Recipe, versions: dict[int, Path], policies: dict[int, Policy], run_judge, make_lease
) -> Callable[..., Case]:
    """Does the work of a lease with a behaviour, and lets it be changed before it is packed."""

    def make(
        author: type[WorkerBehaviour] = WorkerBehaviour,
        *,
        version: int = 0,
        edit: Callable[[Sequence[Group]], Sequence[Group]] = lambda groups: groups,
        edit_proofs: Callable[[dict[str, list[bytes]]], dict[str, list[bytes]]] = lambda proofs: proofs,
        **changes: object,
    ) -> Case:
        lease = make_lease(step=version + 1, version=version)
        work = write_work(author(recipe), versions, version, take_order(lease, recipe, WorkLimits()))
        groups, path = edit(work.groups), tmp_path / "work.parquet"
        written = write_submission(path, groups, edit_proofs(dict(work.proofs)))
        manifest = Manifest(
            lease=lease.lease,
            fence=1,
            blob=written.sha256,
            size=written.size,
            version=version,
            rollouts=written.entries,
        )
        job = Job(
            submission="s1",
            round=1,
            step=lease.step,
            first=lease.first,
            count=lease.count,
            group_size=lease.group_size,
            max_tokens=lease.max_tokens,
            seeds=lease.seeds,
            bounded=False,
            version=version,
            manifest=manifest,
            check_ppm=1_000_000,
            check_seed="cd" * 32,
            duplicates=(),
            deadline_ms=60_000,
        )
        return Case(job.model_copy(update=changes), path, policies[version], run_judge)

    return make


def write_work(author: WorkerBehaviour, versions: dict[int, Path], version: int, order) -> FinishedWork:
    """Does what the worker's generator does, in one call."""
    generator = OfflineGenerator(author, slots=8)
    for number in sorted({0, version}):
        generator.load(number, versions[number])
    return generator.write(order)
