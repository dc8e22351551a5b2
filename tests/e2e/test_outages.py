"""`shoal status` reports what is unavailable or full, and the run continues by itself when it is back.

One tiny swarm of real processes, started by hand: what is killed here stays down until it is started again. A full disk
is simulated by a limit on the size of files, set on a process from outside and lifted again.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fixtures.paths import TINY, WIDE

from shoal.audit.verify import verify_ledger
from shoal.cli import main
from shoal.coordinator.state import PROJECTIONS
from shoal.launch.layout import SwarmPaths
from shoal.launch.parts import list_parts
from shoal.launch.prepare import PreparedSwarm, prepare_swarm
from shoal.launch.process import Part
from shoal.launch.settings import load_launch
from shoal.ledger.db import open_database

sys.path.insert(0, str(Path(__file__).parent))

from warm import Running, Warm

PATIENCE_S = 300.0
FULL = "room on its disk: disk"


class Processes:
    """The processes of a swarm, and its coordinator's status."""

    def __init__(self, prepared: PreparedSwarm, warm: Warm) -> None:
        self.prepared, self.root, self._warm = prepared, prepared.layout.root, warm
        self.parts = {part.name: part for part in list_parts(prepared)}
        self.processes: dict[str, Running] = {}
        self.logs = self.root / "logs"
        self.logs.mkdir()
        for part in self.parts.values():
            self.start(part)

    def start(self, part: Part) -> None:
        log = self.logs / f"{part.name}.log"
        self.processes[part.name] = self._warm.start(*part.arguments, out=log, err=log)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def limit(self, *names: str, num_bytes: int = 0) -> None:
        """Prevent files of these processes from growing; -1 lifts the limit."""
        for name in names:
            resource.prlimit(self.processes[name].pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    def mend(self) -> None:
        """Restore everything: after any test, the next one finds all processes running and no disk full."""
        for name, process in self.processes.items():
            if process.poll() is None:
                self.limit(name, num_bytes=-1)
            else:
                self.start(self.parts[name])

    def name_node(self, name: str) -> str:
        """The coordinator's name for a part."""
        role = name.rpartition("-")[0] or name
        return f"{role} {self.prepared.identities[name].key.public[:8]}"

    def read_log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text()

    def count_steps(self) -> int:
        path = self.root / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def await_progress(self, steps: int = 2) -> None:
        """Wait until that many more steps are trained; no process may have died."""
        wanted = self.count_steps() + steps
        await_true(lambda: self.count_steps() >= wanted, lambda: self.describe(f"step {wanted}"))
        assert [name for name, process in self.processes.items() if process.poll() is not None] == []

    def describe(self, what: str) -> str:
        ends = {name: self.read_log(name)[-600:] for name in self.parts}
        return f"{what} is not there\n" + "\n".join(f"--- {name}\n{text}" for name, text in ends.items())

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()


@pytest.fixture(scope="module")
def processes(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """A running swarm; killed processes are not restarted."""
    out = tmp_path_factory.mktemp("runs")
    few = ["swarm.calibration=64", "steps=5000", "eval.every=0"]
    small = ["swarm.workers=1", "swarm.validators=1", "swarm.heartbeat_s=1", "async_level=1", WIDE]
    config = load_launch(TINY, [f"out={out}", *few, *small])
    prepared = prepare_swarm(config, SwarmPaths.of(config))
    processes = Processes(prepared, warm)
    try:
        processes.await_progress()
        yield processes
    finally:
        processes.stop()


@pytest.fixture
def status(processes: Processes, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Runs `shoal status` until it contains all of these texts; returns its output."""

    def ask(*texts: str, code: int = 0) -> str:
        said = ""

        def is_said() -> bool:
            nonlocal said
            capsys.readouterr()
            found = main(["status", processes.prepared.url])
            shown = capsys.readouterr()
            said = shown.out + shown.err
            return found == code and all(text in said for text in texts)

        await_true(is_said, lambda: processes.describe(f"{texts} in {said}"))
        return said

    yield ask
    processes.mend()


def await_true(is_so: Callable[[], bool], explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)


def test_a_coordinator_that_is_away(processes: Processes, status: Callable[..., str]) -> None:
    processes.kill("coordinator")
    said = status("the coordinator does not answer", code=1)
    assert said.startswith("shoal: ") and said.count("\n") == 1
    for name in ("worker-1", "validator-1", "trainer"):
        await_true(
            lambda name=name: "no connection" in processes.read_log(name), lambda: processes.describe("a word of it")
        )
    processes.start(processes.parts["coordinator"])
    processes.await_progress()


def test_a_coordinator_whose_disk_is_full(processes: Processes, status: Callable[..., str]) -> None:
    processes.limit("coordinator")
    said = status("the coordinator's disk is full", code=1)
    assert said.startswith("shoal: ") and said.count("\n") == 1
    processes.limit("coordinator", num_bytes=-1)
    processes.await_progress()
    assert "the disk has free space again" in processes.read_log("coordinator")


@pytest.mark.parametrize("name", ["trainer", "validator-1", "worker-1"])
def test_a_node_whose_disk_is_full(processes: Processes, status: Callable[..., str], name: str) -> None:
    processes.limit(name)
    status(f"{processes.name_node(name)} waits for {FULL}", "cannot be written (File too large)")
    processes.limit(name, num_bytes=-1)
    processes.await_progress()


def test_an_origin_whose_disk_is_full(processes: Processes, status: Callable[..., str]) -> None:
    processes.limit("origin")
    status(f"{processes.name_node('trainer')} waits for the origin: hand-over")
    processes.limit("origin", num_bytes=-1)
    processes.await_progress()


def test_relays_that_are_away(processes: Processes, status: Callable[..., str]) -> None:
    processes.kill("relay-1")
    status("waits for the relays: weights")  # whichever needs a new version first, worker or validator
    processes.start(processes.parts["relay-1"])
    processes.await_progress()


def test_validators_that_are_away(processes: Processes, status: Callable[..., str]) -> None:
    processes.kill("validator-1")
    status("the queue waits for validators to judge", "the run waits for a heartbeat from any validator")
    processes.start(processes.parts["validator-1"])
    processes.await_progress()


def test_nothing_was_lost_by_all_that(processes: Processes) -> None:
    processes.stop()
    engine = open_database(str(processes.prepared.layout.ledger))
    try:
        report = verify_ledger(engine, projections=PROJECTIONS)
    finally:
        engine.dispose()
    assert not report.findings, "nothing is wrong, although the coordinator was killed before it signed the last events"
    lines = [json.loads(line) for line in (processes.root / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert not any(line["batch/left_out"] for line in lines)
