"""Workers with any behaviour, their submissions, and a validator's assessment of them."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import pytest

from shoal.policy.model import Policy, open_policy
from shoal.protocol.messages import Job, Lease
from shoal.recipe import Recipe
from shoal.sandbox.pool import JobReport, SandboxProcess
from shoal.submission.read import ParserPool
from shoal.toploc.calibration import Calibration
from shoal.validator.finding import Assessment
from shoal.validator.judge import Judge
from shoal.worker.behaviour import FinishedWork, PendingSubmission, WorkerBehaviour, pack_work
from shoal.worker.generator import Generator
from shoal.worker.leases import LeaseTable
from shoal.worker.orders import WorkLimits, take_order

PATIENCE_S = 60.0
CPU_S = 1
"""CPU seconds for reading one file"""


class MeteredValidator:
    """A validator whose parsers record their resource usage."""

    def __init__(self, recipe: Recipe, calibration: Calibration) -> None:
        self._runner = asyncio.Runner()
        self.parsers = ParserPool(cpu_s=CPU_S)
        self.usage: list[JobReport] = []
        """reports of all jobs that parsed a file so far, including trials"""
        for process in self.parsers.sandboxes.processes:
            self._keep_reports(process)
        self._judge = Judge(recipe, calibration, self.parsers)

    def judge(self, job: Job, path: Path, policy: Policy) -> Assessment:
        return self._runner.run(self._judge.judge(job, path, policy))

    def _keep_reports(self, process: SandboxProcess) -> None:
        end_job = process.end_job

        def end_and_keep(deadline: float, *, kill: bool) -> JobReport:
            self.usage.append(end_job(deadline, kill=kill))
            return self.usage[-1]

        process.end_job = end_and_keep  # type: ignore[method-assign]

    def close(self) -> None:
        self._runner.run(self.parsers.close())
        self._runner.close()


@dataclass
class Case:
    """A submission, and the validator's job for it."""

    job: Job
    path: Path
    policy: Policy
    metered_validator: MeteredValidator

    def opinion(self) -> Assessment:
        return self.metered_validator.judge(self.job, self.path, self.policy)


@dataclass(frozen=True)
class LeaseSource:
    """The coordinator's part: creates leases and jobs."""

    make_lease: Callable[..., Lease]
    versions: dict[int, Path]
    policies: dict[int, Policy]
    metered_validator: MeteredValidator

    def open_case(self, lease: Lease, version: int, pending: PendingSubmission, **of_job: object) -> Case:
        fields = {
            name: getattr(lease, name) for name in ("step", "first", "count", "group_size", "max_tokens", "seeds")
        }
        job = Job(
            submission="s1",
            round=1,
            version=version,
            manifest=pending.manifest,
            check_ppm=1_000_000,
            check_seed="cd" * 32,
            bounded=False,
            duplicates=(),
            deadline_ms=60_000,
            **fields,
        )
        return Case(job.model_copy(update=of_job), pending.path, self.policies[version], self.metered_validator)


class LeaseWorker:
    """A worker that does one lease after another with a given behaviour."""

    def __init__(self, author: WorkerBehaviour, folder: Path, lease_source: LeaseSource, slots: int = 16) -> None:
        self._author, self._desk = author, lease_source
        self._done: Queue[FinishedWork] = Queue()
        folder.mkdir(parents=True, exist_ok=True)
        self._leases, self._folder = LeaseTable(), folder
        self._mill = Generator(author, self._leases, self._done.put, limits=WorkLimits(), slots=slots)
        self._thread = threading.Thread(target=self._mill.run)
        self._thread.start()

    def hand_in(self, name: str = "l1", *, first: int = 0, version: int = 0, **of_job: object) -> Case:
        """Do the work of a lease and submit it."""
        lease = self._desk.make_lease(name, first=first, step=version + 1, version=version)
        self._mill.update_weights(version, self._desk.versions[version])
        self._leases.hold(take_order(lease, self._author.recipe, WorkLimits()))
        work = self._done.get(timeout=PATIENCE_S)
        self._leases.end(lease.lease)
        pending = pack_work(self._author, work, lease.fence, self._folder / f"{name}.parquet")
        return self._desk.open_case(lease, work.version, pending, **of_job)

    def close(self) -> None:
        self._mill.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture(scope="session")
def calibration(tiny_calibration: Calibration) -> Calibration:
    return tiny_calibration


@pytest.fixture(scope="session")
def metered_validator(
    recipe: Recipe, calibration: Calibration, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MeteredValidator]:
    found = MeteredValidator(recipe, calibration)
    yield found
    found.close()


@pytest.fixture(scope="session")
def lease_source(
    make_lease, versions: dict[int, Path], policies: dict[int, Policy], metered_validator: MeteredValidator
) -> LeaseSource:
    return LeaseSource(make_lease, versions, policies, metered_validator)


@pytest.fixture(scope="session")
def open_lease_source(make_lease, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LeaseSource]]:
    """Opens a source of leases for another run, with a validator of its own."""
    courts: list[MeteredValidator] = []

    def open_one(recipe: Recipe, calibration: Calibration, versions: dict[int, Path]) -> LeaseSource:
        courts.append(MeteredValidator(recipe, calibration))
        policies = {version: open_policy(folder) for version, folder in versions.items()}
        return LeaseSource(make_lease, versions, policies, courts[-1])

    yield open_one
    for metered_validator in courts:
        metered_validator.close()


@pytest.fixture(scope="session")
def honest(recipe: Recipe, lease_source: LeaseSource, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Honest work. Tests that change it use their own file instead."""
    lease_worker = LeaseWorker(WorkerBehaviour(recipe), tmp_path_factory.mktemp("honest"), lease_source)
    case = lease_worker.hand_in()
    lease_worker.close()
    return case


@pytest.fixture
def open_lease_workers(tmp_path: Path, lease_source: LeaseSource) -> Iterator[Callable[..., list[LeaseWorker]]]:
    """Opens a worker for each author."""
    lease_workers: list[LeaseWorker] = []

    def open_all(
        authors: Sequence[WorkerBehaviour], slots: int = 16, at: LeaseSource = lease_source
    ) -> list[LeaseWorker]:
        folders = [tmp_path / f"lease_worker-{len(lease_workers) + place}" for place in range(len(authors))]
        opened = [LeaseWorker(author, folder, at, slots) for author, folder in zip(authors, folders, strict=True)]
        lease_workers.extend(opened)
        return opened

    yield open_all
    for lease_worker in lease_workers:
        lease_worker.close()
