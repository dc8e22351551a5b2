"""What is away or full shows in `shoal status` in words, and the run goes on by itself when it is back.

One tiny swarm of real processes, started by hand: what is killed here stays away until it is started again. A full disk
is a limit on the size of files, set on a process from outside and lifted again.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.launch.layout import Layout
from shoal.launch.part import Part
from shoal.launch.prepare import Prepared, prepare_swarm
from shoal.launch.roster import list_parts
from shoal.launch.run import make_environment
from shoal.launch.settings import load_launch
from shoal.swarm.db import open_engine
from shoal.swarm.state import PROJECTIONS
from shoal.swarm.verify import verify_ledger

TINY = Path(__file__).parents[1] / "tiny.toml"
PATIENCE_S = 300.0
FULL = "room on its disk: disk"


class Crew:
    """The processes of a swarm, and what its coordinator says of them."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared, self.root = prepared, prepared.layout.root
        self.parts = {part.name: part for part in list_parts(prepared)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.logs = self.root / "logs"
        self.logs.mkdir()
        for part in self.parts.values():
            self.start(part)

    def start(self, part: Part) -> None:
        command = [sys.executable, "-m", "shoal", *part.arguments]
        with (self.logs / f"{part.name}.log").open("ab") as log:
            self.processes[part.name] = subprocess.Popen(
                command,
                env=make_environment(1),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # as the supervisor does
            )

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def limit(self, *names: str, num_bytes: int = 0) -> None:
        """Let files of these processes grow no more; -1 lifts that."""
        for name in names:
            resource.prlimit(self.processes[name].pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    def mend(self) -> None:
        """Whatever became of a test, the next one finds all there and nothing full."""
        for name, process in self.processes.items():
            if process.poll() is None:
                self.limit(name, num_bytes=-1)
            else:
                self.start(self.parts[name])

    def name_node(self, name: str) -> str:
        """How the coordinator calls a part."""
        role = name.rpartition("-")[0] or name
        return f"{role} {self.prepared.identities[name].key.public[:8]}"

    def read_log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text()

    def count_steps(self) -> int:
        path = self.root / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def await_progress(self, steps: int = 2) -> None:
        """Until so many steps more are trained; nobody may have died for it."""
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
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """A swarm that works; nobody starts again what dies."""
    out = tmp_path_factory.mktemp("runs")
    few = ["swarm.calibration=64", "steps=5000", "eval.every=0"]
    small = ["swarm.workers=1", "swarm.validators=1", "swarm.heartbeat_s=1", "async_level=1"]
    config = load_launch(TINY, [f"out={out}", *few, *small])
    crew = Crew(prepare_swarm(config, Layout.of(config), lambda _: None))
    try:
        crew.await_progress()
        yield crew
    finally:
        crew.stop()


@pytest.fixture
def status(crew: Crew, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Asks `shoal status` until it says all of this; what it said then."""

    def ask(*texts: str, code: int = 0) -> str:
        said = ""

        def is_said() -> bool:
            nonlocal said
            capsys.readouterr()
            found = main(["status", crew.prepared.url])
            shown = capsys.readouterr()
            said = shown.out + shown.err
            return found == code and all(text in said for text in texts)

        await_true(is_said, lambda: crew.describe(f"{texts} in {said}"))
        return said

    yield ask
    crew.mend()


def await_true(is_so: Callable[[], bool], explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)


def test_a_coordinator_that_is_away(crew: Crew, status: Callable[..., str]) -> None:
    crew.kill("coordinator")
    said = status("the coordinator does not answer", code=1)
    assert said.startswith("shoal: ") and said.count("\n") == 1
    for name in ("worker-1", "validator-1", "trainer"):
        await_true(lambda name=name: "no connection" in crew.read_log(name), lambda: crew.describe("a word of it"))
    crew.start(crew.parts["coordinator"])
    crew.await_progress()


def test_a_coordinator_whose_disk_is_full(crew: Crew, status: Callable[..., str]) -> None:
    crew.limit("coordinator")
    said = status("the coordinator waits for room on its disk", code=1)
    assert said.startswith("shoal: ") and said.count("\n") == 1
    crew.limit("coordinator", num_bytes=-1)
    crew.await_progress()
    assert '"event": "room again"' in crew.read_log("coordinator")


@pytest.mark.parametrize("name", ["trainer", "validator-1", "worker-1"])
def test_a_node_whose_disk_is_full(crew: Crew, status: Callable[..., str], name: str) -> None:
    crew.limit(name)
    status(f"{crew.name_node(name)} waits for {FULL}", "cannot be written (File too large)")
    crew.limit(name, num_bytes=-1)
    crew.await_progress()


def test_an_origin_whose_disk_is_full(crew: Crew, status: Callable[..., str]) -> None:
    crew.limit("origin")
    status(f"{crew.name_node('trainer')} waits for the origin: hand-over")
    crew.limit("origin", num_bytes=-1)
    crew.await_progress()


def test_relays_that_are_away(crew: Crew, status: Callable[..., str]) -> None:
    crew.kill("relay-1")
    status("waits for the relays: weights")  # who needs a new version first, the worker or the validator
    crew.start(crew.parts["relay-1"])
    crew.await_progress()


def test_validators_that_are_away(crew: Crew, status: Callable[..., str]) -> None:
    crew.kill("validator-1")
    status("the queue waits for validators to judge", "the run waits for a sign of life of any validator")
    crew.start(crew.parts["validator-1"])
    crew.await_progress()


def test_nothing_was_lost_by_all_that(crew: Crew) -> None:
    crew.stop()
    engine = open_engine(str(crew.prepared.layout.ledger))
    try:
        report = verify_ledger(engine, projections=PROJECTIONS)
    finally:
        engine.dispose()
    assert report.holds, report.findings
    lines = [json.loads(line) for line in (crew.root / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert not any(line["batch/left_out"] for line in lines)
