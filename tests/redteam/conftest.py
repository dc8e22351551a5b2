"""Workers with any author, what they pack for their leases, and a validator's word on it."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import pytest

from shoal.policy.model import Policy, open_policy
from shoal.recipe import Recipe
from shoal.submission.jail import Jail, Limits
from shoal.submission.reader import BOOT
from shoal.swarm.messages import Job, Lease
from shoal.toploc.calibrate import Plan, calibrate_policy
from shoal.toploc.calibration import Calibration
from shoal.toploc.prompts import Source
from shoal.toploc.variants import Way
from shoal.validator.judge import Judge
from shoal.validator.opinion import Opinion
from shoal.worker.author import Author, Work
from shoal.worker.intake import WorkLimits, take_order
from shoal.worker.mill import Mill
from shoal.worker.outbox import Outbox, Parcel

PATIENCE_S = 60.0
CPU_S = 1
"""that reading one file may take"""

# A reader that notes CPU seconds and largest memory of each child that it had.
_MEASURE = (
    "import os\n"
    "log = os.open({log!r}, os.O_WRONLY | os.O_APPEND)\n"
    "def waitpid(pid, flags):\n"
    "    pid, status, used = os.wait4(pid, flags)\n"
    "    os.write(log, f'{{used.ru_utime + used.ru_stime}} {{used.ru_maxrss << 10}}\\n'.encode())\n"
    "    return pid, status\n"
    "os.waitpid = waitpid\n"
)


@dataclass(frozen=True)
class Usage:
    """Of a process that read a file."""

    cpu_s: float
    memory_bytes: int


class Court:
    """A validator, with readers that keep account of what they use."""

    def __init__(self, recipe: Recipe, calibration: Calibration, folder: Path) -> None:
        self._runner, self._log = asyncio.Runner(), folder / "usage"
        self._log.touch()
        self.jail = Jail(limits=Limits(cpu_s=CPU_S), boot=_MEASURE.format(log=str(self._log)) + BOOT)
        self._judge = Judge(recipe, calibration, self.jail)

    def judge(self, job: Job, path: Path, policy: Policy) -> Opinion:
        return self._runner.run(self._judge.judge(job, path, policy))

    def list_usage(self) -> list[Usage]:
        """Of all processes that read a file so far, a reader's trials of itself among them."""
        pairs = [line.split() for line in self._log.read_text().splitlines()]
        return [Usage(float(cpu_s), int(memory_bytes)) for cpu_s, memory_bytes in pairs]

    def close(self) -> None:
        self._runner.run(self.jail.close())
        self._runner.close()


@dataclass
class Case:
    """What was handed in, and the job that a validator gets for it."""

    job: Job
    path: Path
    policy: Policy
    court: Court

    def opinion(self) -> Opinion:
        return self.court.judge(self.job, self.path, self.policy)


@dataclass(frozen=True)
class Desk:
    """The coordinator's part: leases out, jobs in."""

    make_lease: Callable[..., Lease]
    versions: dict[int, Path]
    policies: dict[int, Policy]
    court: Court

    def open_case(self, lease: Lease, version: int, parcel: Parcel, **of_job: object) -> Case:
        fields = {
            name: getattr(lease, name) for name in ("step", "first", "count", "group_size", "max_tokens", "beacon")
        }
        job = Job(
            submission="s1",
            round=1,
            version=version,
            manifest=parcel.manifest,
            check_ppm=1_000_000,
            check_seed="cd" * 32,
            duplicates=(),
            deadline_ms=60_000,
            **fields,
        )
        return Case(job.model_copy(update=of_job), parcel.path, self.policies[version], self.court)


class Shop:
    """A worker that does one lease after the other as its author wants it."""

    def __init__(self, author: Author, folder: Path, desk: Desk, slots: int = 16) -> None:
        self._author, self._desk = author, desk
        self._done: Queue[Work] = Queue()
        self._mill = Mill(author, self._done.put, limits=WorkLimits(), slots=slots)
        self._outbox = Outbox(folder, author.write)
        self._thread = threading.Thread(target=self._mill.run)
        self._thread.start()

    def hand_in(self, name: str = "l1", *, first: int = 0, version: int = 0, **of_job: object) -> Case:
        """The work of a lease."""
        lease = self._desk.make_lease(name, first=first, step=version + 1, oldest_version=version)
        self._mill.offer(version, self._desk.versions[version])
        self._mill.order(take_order(lease, self._author.recipe, WorkLimits()))
        work = self._done.get(timeout=PATIENCE_S)
        return self._desk.open_case(lease, work.version, self._outbox.pack(work, lease.fence), **of_job)

    def close(self) -> None:
        self._mill.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


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
def court(recipe: Recipe, calibration: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Court]:
    found = Court(recipe, calibration, tmp_path_factory.mktemp("court"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def desk(make_lease, versions: dict[int, Path], policies: dict[int, Policy], court: Court) -> Desk:
    return Desk(make_lease, versions, policies, court)


@pytest.fixture(scope="session")
def open_desk(make_lease, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Desk]]:
    """Opens a desk for another run, with a validator of its own."""
    courts: list[Court] = []

    def open_one(recipe: Recipe, calibration: Calibration, versions: dict[int, Path]) -> Desk:
        courts.append(Court(recipe, calibration, tmp_path_factory.mktemp("court")))
        policies = {version: open_policy(folder) for version, folder in versions.items()}
        return Desk(make_lease, versions, policies, courts[-1])

    yield open_one
    for court in courts:
        court.close()


@pytest.fixture(scope="session")
def honest(recipe: Recipe, desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Honest work. Tests that change it put their own file in its place."""
    shop = Shop(Author(recipe), tmp_path_factory.mktemp("honest"), desk)
    case = shop.hand_in()
    shop.close()
    return case


@pytest.fixture
def open_shops(tmp_path: Path, desk: Desk) -> Iterator[Callable[..., list[Shop]]]:
    """Opens a shop for each author."""
    shops: list[Shop] = []

    def open_all(authors: Sequence[Author], slots: int = 16, at: Desk = desk) -> list[Shop]:
        folders = [tmp_path / f"shop-{len(shops) + place}" for place in range(len(authors))]
        opened = [Shop(author, folder, at, slots) for author, folder in zip(authors, folders, strict=True)]
        shops.extend(opened)
        return opened

    yield open_all
    for shop in shops:
        shop.close()
