"""A whole submission: leased, written, packed, and the job that a validator gets for it."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.policy.model import Policy, open_policy
from shoal.recipe import Recipe
from shoal.redteam.offline import Scribe
from shoal.rollout import Group
from shoal.submission.jail import Jail
from shoal.submission.write import write_submission
from shoal.swarm.messages import Job, Manifest
from shoal.toploc.calibrate import Plan, calibrate_policy
from shoal.toploc.calibration import Calibration
from shoal.toploc.prompts import Source
from shoal.toploc.variants import Way
from shoal.validator.judge import Judge
from shoal.validator.opinion import Opinion
from shoal.worker.author import Author, Work
from shoal.worker.intake import WorkLimits, take_order


@pytest.fixture(scope="session")
def policies(versions: dict[int, Path]) -> dict[int, Policy]:
    """The trusted weights."""
    return {version: open_policy(folder) for version, folder in versions.items()}


@pytest.fixture(scope="session")
def calibration(policies: dict[int, Policy]) -> Calibration:
    ways = [Way(name="engine"), Way(name="transformers", source="plain", batch=64)]
    plan = Plan(source=Source(tokens=40, temperature=1.0, seed=0), samples=400)
    return calibrate_policy(policies[0], ways, plan, lambda line: None, name="tiny")


@pytest.fixture(scope="session")
def court(recipe: Recipe, calibration: Calibration) -> Iterator[tuple[asyncio.Runner, Judge]]:
    """A judge with one reader for all tests: to start one takes longer than to judge."""
    with asyncio.Runner() as runner:
        jail = runner.run(Jail().__aenter__())
        yield runner, Judge(recipe, calibration, jail)
        runner.run(jail.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def run_judge(court: tuple[asyncio.Runner, Judge]) -> Callable[["Case"], Opinion]:
    """Judges one case."""
    runner, judge = court
    return lambda case: runner.run(judge.judge(case.job, case.path, case.policy))


@pytest.fixture(scope="session")
def judge_together(court: tuple[asyncio.Runner, Judge]) -> Callable[[Sequence["Case"]], list[Opinion]]:
    """Judges several cases of one version at once."""
    runner, judge = court
    return lambda cases: runner.run(judge.judge_all([(case.job, case.path) for case in cases], cases[0].policy))


@dataclass
class Case:
    """What was handed in, and what is asked about it."""

    job: Job
    path: Path
    policy: Policy
    judge: Callable[["Case"], Opinion]

    def opinion(self) -> Opinion:
        return self.judge(self)


@pytest.fixture
def hand_in(
    tmp_path: Path, recipe: Recipe, versions: dict[int, Path], policies: dict[int, Policy], run_judge, make_lease
) -> Callable[..., Case]:
    """Does the work of a lease with an author, and lets it be changed before it is packed."""

    def make(
        author: type[Author] = Author,
        *,
        version: int = 0,
        edit: Callable[[Sequence[Group]], Sequence[Group]] = lambda groups: groups,
        edit_proofs: Callable[[dict[str, list[bytes]]], dict[str, list[bytes]]] = lambda proofs: proofs,
        **changes: object,
    ) -> Case:
        lease = make_lease(step=version + 1, oldest_version=version)
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
            beacon=lease.beacon,
            version=version,
            manifest=manifest,
            check_ppm=1_000_000,
            check_seed="cd" * 32,
            duplicates=(),
            deadline_ms=60_000,
        )
        return Case(job.model_copy(update=changes), path, policies[version], run_judge)

    return make


def write_work(author: Author, versions: dict[int, Path], version: int, order) -> Work:
    """What the worker's mill does, at one go."""
    scribe = Scribe(author, slots=8)
    for number in sorted({0, version}):
        scribe.load(number, versions[number])
    return scribe.write(order)
