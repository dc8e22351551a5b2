"""Parts that end for good, are killed at once, and leave their last words."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from shoal.launch.process import Part, Process, read_last_line
from shoal.launch.supervisor import Supervisor

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _plain_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parts are small programs here: `python -m shoal` finds a module of that name in the working folder."""
    (tmp_path / "shoal.py").write_text("import sys, signal, time\nexec(sys.argv[1])\n")
    monkeypatch.chdir(tmp_path)


def supervise(tmp_path: Path, *parts: Part) -> Supervisor:
    return Supervisor(parts, tmp_path / "logs", os.environ | {"PYTHONPATH": str(tmp_path)})


def test_who_ends_with_its_last_code_is_not_started_again_and_nobody_waits_for_it(tmp_path: Path, log) -> None:
    cheat = Part(name="cheat", arguments=("print('banned'); sys.exit(3)",), rank=0, last=(0, 3))
    idle = Part(name="idle", arguments=("time.sleep(600)",), rank=0, last=(0, 3))

    async def go() -> Supervisor:
        supervisor = supervise(tmp_path, cheat, idle)
        async with asyncio.timeout(PATIENCE_S):
            assert await supervisor.run(lambda: any("ended" in text for text in log.messages), asyncio.Event())
        return supervisor

    states = asyncio.run(go()).states
    assert [text for text in log.messages if "runs, pid" not in text] == ["cheat ended and is not restarted: banned"]
    assert states["cheat"].finished and states["cheat"].describe(0.0) == "ended, exit code 3"
    assert not states["idle"].finished


def test_one_that_is_awaited_and_cannot_go_on_ends_the_run(tmp_path: Path) -> None:
    trainer = Part(name="trainer", arguments=("sys.exit(3)",), rank=0, ends=True, last=(3,))
    idle = Part(name="idle", arguments=("time.sleep(600)",), rank=1)

    async def go() -> tuple[bool, Supervisor]:
        supervisor = supervise(tmp_path, trainer, idle)
        async with asyncio.timeout(PATIENCE_S):
            return await supervisor.run(lambda: True, asyncio.Event()), supervisor

    finished, supervisor = asyncio.run(go())
    assert not finished and supervisor.states["trainer"].last_code == 3
    assert supervisor.states["idle"].process is None


def test_the_last_words_of_who_died_are_told(tmp_path: Path) -> None:
    part = Part(name="a", arguments=("print('first'); print('the disk is full\\n\\n'); sys.exit(1)",), rank=0)

    async def go() -> Supervisor:
        supervisor = supervise(tmp_path, part)
        async with asyncio.timeout(PATIENCE_S):
            await supervisor.run(lambda: bool(supervisor.events), asyncio.Event())
        return supervisor

    assert asyncio.run(go()).events[0].endswith("; its last line: the disk is full")


def test_a_second_signal_ends_even_the_deaf_at_once(tmp_path: Path) -> None:
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); open(NAME, 'w'); time.sleep(600)"
    parts = [Part(name=name, arguments=(f"NAME = '{name}'\n{code}",), rank=rank) for rank, name in enumerate("ab")]

    async def go() -> Supervisor:
        supervisor = supervise(tmp_path, *parts)
        stop = asyncio.Event()
        running = asyncio.create_task(supervisor.run(lambda: False, stop))
        async with asyncio.timeout(PATIENCE_S):
            while not all((tmp_path / name).exists() for name in "ab"):
                await asyncio.sleep(0.02)
            stop.set()
            await asyncio.sleep(0)
            supervisor.kill_all()
            await running
        return supervisor

    states = asyncio.run(go()).states
    assert [states[name].last_code for name in "ab"] == [-signal.SIGKILL] * 2


def test_a_signal_to_one_that_has_just_died_leaves_its_exit_code_to_who_waits() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its code was not taken
    Process(cast(asyncio.subprocess.Process, child)).signal(signal.SIGTERM)
    assert os.waitpid(child.pid, 0) == (child.pid, signal.SIGKILL)
    child.wait()


@pytest.mark.parametrize(
    ("content", "line"),
    [(b"", ""), (b"\n \n", ""), (b"one\ntwo", "two"), (b"x" * 9000 + b"\nend\n", "end"), (b"\xff\n", "\ufffd")],
)
def test_the_last_line_of_a_log_is_found_whatever_is_in_it(tmp_path: Path, content: bytes, line: str) -> None:
    (tmp_path / "a.log").write_bytes(content)
    assert read_last_line(tmp_path, "a") == line
    assert read_last_line(tmp_path, "b") == ""
