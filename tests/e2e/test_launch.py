"""A whole swarm as one command: a cheat is caught, everything is stopped, killed and resumed, and the run ends right.

The final weights are those of `shoal train`, bit for bit, with one worker or three: with async level 0 nothing is
stale.
"""

import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fixtures.paths import TINY, WIDE

from shoal.cli import main
from shoal.identity.keys import Key
from shoal.launch.report import collect_evidence
from shoal.util.files import hash_file

sys.path.insert(0, str(Path(__file__).parent))

from warm import Running, Warm

PATIENCE_S = 300.0
pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")


class CommandRunner:
    """One command at a time, its output, and its descendant processes."""

    def __init__(self, folder: Path, warm: Warm) -> None:
        self.log, self._warm = folder / "printed", warm
        self.process: Running | None = None

    def start(self, *words: str) -> None:
        self.log.write_bytes(b"")
        self.process = self._warm.start(*words, out=self.log, err=self.log)

    def end(self, number: int | None = None) -> int:
        """Send a signal, if given, and wait for the end."""
        assert self.process is not None
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def wait_text(self, text: str) -> None:
        self.wait(lambda: text in self.log.read_text(), f"nobody printed {text!r}")

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, f"{what}: {self.log.read_text()[-2000:]}"
            time.sleep(0.1)

    def list_family(self) -> list[int]:
        """All descendants of the started process."""
        assert self.process is not None
        parents = {pid: parent for pid in _list_pids() if (parent := _find_parent(pid)) is not None}
        family, found = [self.process.pid], [self.process.pid]
        while found:
            found = [pid for pid, parent in parents.items() if parent in found and pid not in family]
            family += found
        return family[1:]


@pytest.fixture
def runner(tmp_path: Path, warm: Warm) -> CommandRunner:
    return CommandRunner(tmp_path, warm)


def type_command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Run a command in this process; returns its exit code and output."""
    capsys.readouterr()
    code = main([*words, "-q"])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_a_swarm_survives_its_cheat_its_user_and_a_kill(
    runner: CommandRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    out = runner.log.parent / "runs"
    root = out / "tiny-seed0"
    settings = [str(TINY), WIDE, f"out={out}", "swarm.calibration=128", 'swarm.cheats=["int8"]']

    runner.start("prepare", *settings)
    assert runner.end() == 0, runner.log.read_text()
    runner.start("run", *settings, "swarm.workers=0", "--fresh")
    runner.wait_text("cheat-1 ended and is not restarted")
    code, said = type_command(capsys, "-q", "run", *settings)
    assert code == 2 and said.startswith("shoal: ") and said.count("\n") == 1 and "in use by process" in said
    family = runner.list_family()
    assert len(family) >= 7
    assert runner.end(signal.SIGINT) == 130
    assert "the same command resumes it, without --fresh" in runner.log.read_text() and not any(map(_is_alive, family))
    assert "to join from this machine: shoal worker http://127.0.0.1:" in runner.log.read_text()
    assert "shoal: stopped; the same command resumes" in (root / "logs" / "validator-1.log").read_text()

    code, said = type_command(capsys, "run", *settings, "steps=4")
    assert code == 2 and "started with another value of steps" in said

    runner.start("run", *settings, "swarm.workers=1")
    runner.wait((root / "versions" / "v000001").exists, "one worker is not enough for a step")
    assert list_paid(root) == {"worker-1"}
    family = runner.list_family()
    assert len(family) >= 8
    runner.end(signal.SIGKILL)
    runner.wait(lambda: not any(map(_is_alive, family)), "processes outlived their supervisor")

    settings += ["swarm.workers=3"]
    runner.start("run", *settings)
    assert runner.end() == 0, runner.log.read_text()
    shown = runner.log.read_text()
    assert "caught cheating: cheat-1" in shown and "the ledger holds" in shown
    assert re.search(r"^checking took \d+% of the CPU that generation took$", shown, re.MULTILINE)
    assert len(list_paid(root)) > 1
    check_report(root)
    check_weights(root, out / "alone")

    code, said = type_command(capsys, "run", *settings)
    assert code == 0 and said.splitlines()[:6] == shown.splitlines()[-6:], "a finished run only prints its report"
    assert "is already finished (3 of 3 steps); nothing was started" in said


def list_paid(root: Path) -> set[str]:
    """The workers whose submissions were accepted."""
    owners = {Key.load(path).public: path.parent.name for path in root.glob("*/owner.key")}
    leaders = collect_evidence(root / "coordinator" / "ledger.db").leaders
    return {owners[line.owner] for line in leaders if line.accepted}


def check_report(root: Path) -> None:
    text = (root / "report.txt").read_text()
    assert "no batch was older than 0 versions" in text and ": verdict rejected_hard" in text
    page = (root / "report.html").read_text()
    assert "cheat-1" in page and "<script" not in page


def check_weights(root: Path, alone: Path) -> None:
    """After every step, the swarm's weights are those of `shoal train` with the same beacons."""
    secret = (root / "coordinator" / "beacon.secret").read_text()
    assert (
        main(["train", str(TINY), WIDE, f"out={alone}", f"beacon={secret}", "checkpoint.every=1", "checkpoint.keep=9"])
        == 0
    )
    for step in (1, 2, 3):
        own = alone / "tiny-seed0" / "checkpoints" / f"step-{step:06d}" / "policy" / "model.safetensors"
        assert hash_file(own) == hash_file(root / "versions" / f"v{step:06d}" / "model.safetensors"), f"step {step}"


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
