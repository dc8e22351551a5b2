"""A whole swarm as one command: a cheat is caught, all of it stopped, killed and resumed, and the run ends as it must.

What it ends with are the weights of `shoal train`, bit for bit: nothing is late with async level 0.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.files import hash_file

SOURCE, TINY = Path(__file__).parents[2] / "src", Path(__file__).parents[1] / "tiny.toml"
PATIENCE_S = 300.0
CHEAT = 'swarm.cheats=["int8"]'
pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes in /proc")


class Desk:
    """Commands in a folder, what they print, and the processes that they are."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "printed"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *words: str) -> None:
        self.log.write_bytes(b"")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._line(words), cwd=self.folder, env=_environ(), stdout=log, stderr=log)

    def type(self, *words: str) -> tuple[int, str]:
        line = self._line(words)
        done = subprocess.run(line, cwd=self.folder, env=_environ(), capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def wait_text(self, text: str) -> None:
        self.wait(lambda: text in self.log.read_text(), f"nobody printed {text!r}")

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, f"{what}: {self.log.read_text()[-2000:]}"
            time.sleep(0.1)

    def end(self, number: int | None = None) -> int:
        """Send a signal, if one is given, and wait for the end."""
        assert self.process is not None
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def list_family(self) -> list[int]:
        """All processes that descend from the one that was started."""
        assert self.process is not None
        parents = {pid: parent for pid in _list_pids() if (parent := _find_parent(pid)) is not None}
        family, found = [self.process.pid], [self.process.pid]
        while found:
            found = [pid for pid, parent in parents.items() if parent in found and pid not in family]
            family += found
        return family[1:]

    def _line(self, words: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "shoal", *words]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    try:
        yield desk
    finally:
        if desk.process is not None and desk.process.poll() is None:
            desk.end(signal.SIGINT)


def test_a_swarm_survives_its_cheat_its_user_and_a_kill(desk: Desk) -> None:
    settings = [str(TINY), "swarm.calibration=128", CHEAT]
    root = desk.folder / "runs" / "tiny-seed0"

    desk.start("run", *settings, "swarm.workers=0")
    desk.wait_text("cheat-1 ended for good")
    code, said = desk.type("run", *settings)
    assert code == 2 and said.startswith("shoal: ") and said.count("\n") == 1 and "in use by process" in said
    family = desk.list_family()
    assert len(family) >= 7
    assert desk.end(signal.SIGINT) == 130
    assert "the same command goes on" in desk.log.read_text() and not any(map(_is_alive, family))

    code, said = desk.type("run", *settings, "steps=4")
    assert code == 2 and "begun with another steps" in said

    desk.start("run", *settings)
    desk.wait(lambda: len(desk.list_family()) >= 8, "not all parts were started")
    family = desk.list_family()
    desk.end(signal.SIGKILL)
    desk.wait(lambda: not any(map(_is_alive, family)), "processes outlived their supervisor")

    desk.start("run", *settings)
    assert desk.end() == 0, desk.log.read_text()
    shown = desk.log.read_text()
    assert "caught cheating: cheat-1" in shown and "the ledger holds" in shown
    check_report(root)
    check_weights(desk, root)

    code, said = desk.type("run", *settings)
    assert code == 0 and said.splitlines() == shown.splitlines()[-4:], "a finished run has nothing left but its report"


def check_report(root: Path) -> None:
    text = (root / "report.txt").read_text()
    assert "no batch was older than 0 versions" in text and "says rejected_hard" in text
    page = (root / "report.html").read_text()
    assert "cheat-1" in page and "<script" not in page


def check_weights(desk: Desk, root: Path) -> None:
    """The swarm's weights are those of `shoal train` with the same beacons."""
    secret = (root / "coordinator" / "beacon.secret").read_text()
    code, said = desk.type("train", str(TINY), "out=alone", f"beacon={secret}")
    assert code == 0, said
    (alone,) = (desk.folder / "alone").glob("tiny-seed0/checkpoints/step-000003/policy/model.safetensors")
    assert hash_file(alone) == hash_file(root / "versions" / "v000003" / "model.safetensors")


def _environ() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "TERM": "dumb"}


def _list_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _read_stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _find_parent(pid: int) -> int | None:
    stat = _read_stat(pid)
    return None if stat is None else int(stat[1])


def _is_alive(pid: int) -> bool:
    stat = _read_stat(pid)
    return stat is not None and stat[0] != "Z"
