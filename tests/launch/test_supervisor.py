"""Real child processes: died and started again, finished, stopped in order, none left."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.launch.process import Part
from shoal.launch.supervisor import MAX_MISTAKES, PartState, Supervisor, describe_code

PATIENCE_S = 60.0
pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes in /proc")


@pytest.fixture(autouse=True)
def _plain_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parts are small programs here: `python -m shoal` finds a module of that name in the working folder."""
    (tmp_path / "shoal.py").write_text("import sys, os, signal, time\nprint('begun', flush=True)\nexec(sys.argv[1])\n")
    monkeypatch.chdir(tmp_path)


def script(name: str, code: str, **fields: object) -> Part:
    return Part(name=name, arguments=(code,), **({"rank": 0} | fields))  # type: ignore[arg-type]


def run(tmp_path: Path, parts: Sequence[Part], until=lambda: True, stop_when=None) -> tuple[Supervisor, bool]:
    async def go() -> tuple[Supervisor, bool]:
        supervisor = Supervisor(parts, tmp_path / "logs", os.environ | {"PYTHONPATH": str(tmp_path)})
        stop = asyncio.Event()

        async def watch() -> None:
            while not (stop_when and stop_when(supervisor)):
                await asyncio.sleep(0.02)
            stop.set()

        watching = asyncio.create_task(watch())
        async with asyncio.timeout(PATIENCE_S):
            finished = await supervisor.run(until, stop)
        watching.cancel()
        return supervisor, finished

    return asyncio.run(go())


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pid: int) -> None:
    """A kill takes its time to arrive."""
    deadline = time.monotonic() + PATIENCE_S
    while is_alive(pid):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.02)


def test_the_run_ends_when_all_that_end_have_and_the_others_are_stopped(tmp_path: Path) -> None:
    pids: dict[str, int] = {}

    def note(supervisor: Supervisor) -> bool:
        pids.update({name: state.process.pid for name, state in supervisor.states.items() if state.process})
        return False

    parts = [
        script("trainer", "time.sleep(0.5)", ends=True),
        script("server", "time.sleep(600)", rank=1),
    ]
    supervisor, finished = run(tmp_path, parts, stop_when=note)
    assert finished
    assert supervisor.states["trainer"].finished and not supervisor.states["server"].finished
    assert supervisor.states["server"].last_code == -signal.SIGTERM
    assert not any(is_alive(pid) for pid in pids.values())
    assert (tmp_path / "logs" / "server.log").read_text() == "begun\n"


def test_what_dies_is_started_again(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; path = Path('count'); n = int(path.read_text()) if path.exists() else 0\n"
        "path.write_text(str(n + 1))\n"
        "os.kill(os.getpid(), signal.SIGKILL) if n == 0 else sys.exit(0 if n == 2 else 3)"
    )
    supervisor, finished = run(tmp_path, [script("worker", code, ends=True)])
    assert finished and (tmp_path / "count").read_text() == "3"
    ends = ["worker ended with SIGKILL", "worker ended with exit code 3"]
    assert [event.split(",")[0] for event in supervisor.events] == ends
    assert supervisor.states["worker"].num_deaths == 2
    assert (tmp_path / "logs" / "worker.log").read_text() == "begun\n" * 3


def test_wrong_settings_end_the_run_after_a_few_tries(tmp_path: Path) -> None:
    parts = [script("server", "time.sleep(600)"), script("worker", "print('shoal: no such file'); sys.exit(2)")]
    supervisor, finished = run(tmp_path, parts, until=lambda: False)
    state = supervisor.states["worker"]
    assert not finished and state.failed and not supervisor.states["server"].failed
    assert (tmp_path / "logs" / "worker.log").read_text() == "begun\nshoal: no such file\n" * MAX_MISTAKES
    assert supervisor.events[-1] == "worker ended and is not restarted: shoal: no such file"
    assert state.describe(0.0) == "ended, exit code 2"


def test_mistakes_that_are_not_in_a_row_are_started_again(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; path = Path('count'); n = int(path.read_text()) if path.exists() else 0\n"
        "path.write_text(str(n + 1))\n"
        f"sys.exit(([2] * {MAX_MISTAKES - 1} + [1, 2, 0])[n])"
    )
    supervisor, finished = run(tmp_path, [script("worker", code, ends=True)])
    assert finished and supervisor.states["worker"].num_deaths == MAX_MISTAKES + 1


def test_a_part_that_does_not_end_by_itself_is_started_again_even_if_it_ended_well(tmp_path: Path) -> None:
    supervisor, finished = run(
        tmp_path, [script("relay", "sys.exit(0)")], until=lambda: False, stop_when=lambda s: len(s.events) >= 2
    )
    assert not finished
    assert supervisor.states["relay"].num_deaths >= 2


def test_parts_are_stopped_in_order_of_rank(tmp_path: Path) -> None:
    code = (
        "def end(*_):\n    open('order', 'a').write(NAME); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); open(NAME, 'w'); time.sleep(600)"
    )
    parts = [script(name, f"NAME = '{name}'\n{code}", rank=rank) for name, rank in (("c", 2), ("a", 0), ("b", 1))]
    _, finished = run(
        tmp_path,
        parts,
        until=lambda: False,
        stop_when=lambda _: all((tmp_path / name).exists() for name in "abc"),
    )
    assert not finished
    assert (tmp_path / "order").read_text() == "abc"


def test_who_does_not_listen_is_killed_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.launch.supervisor.SHUTDOWN_GRACE_S", 0.2)
    code = (
        "import subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('child', 'w').write(str(child.pid)); time.sleep(600)"
    )

    def ready(_: Supervisor) -> bool:
        path = tmp_path / "child"
        return path.exists() and bool(path.read_text())

    supervisor, _ = run(tmp_path, [script("deaf", code)], until=lambda: False, stop_when=ready)
    assert supervisor.states["deaf"].last_code == -signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    wait_gone(child)


def test_parts_do_not_outlive_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, sys\nfrom pathlib import Path\nfrom shoal.launch.process import Part\n"
        "from shoal.launch.supervisor import Supervisor\n"
        "async def go():\n"
        '    body = \'open("pid", "w").write(str(os.getpid())); time.sleep(600)\'\n'
        "    part = Part(name='a', arguments=(body,), rank=0)\n"
        f"    environment = dict(os.environ, PYTHONPATH={str(tmp_path)!r})\n"
        f"    await Supervisor([part], Path({str(tmp_path)!r}), environment).run(lambda: False, asyncio.Event())\n"
        "asyncio.run(go())\n"
    )

    async def go() -> int:
        import sys

        process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-c", code, cwd=tmp_path)
        async with asyncio.timeout(PATIENCE_S):
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                await asyncio.sleep(0.02)
            process.kill()
            await process.wait()
            return int((tmp_path / "pid").read_text())

    wait_gone(asyncio.run(go()))


def test_codes_are_told_in_words() -> None:
    assert [describe_code(code) for code in (0, 3, -9, -200, None)] == [
        "exit code 0",
        "exit code 3",
        "SIGKILL",
        "signal 200",
        "no code",
    ]


def test_one_that_was_stopped_is_not_called_one_that_never_ran() -> None:
    state = PartState(Part(name="relay-1", arguments=(), rank=0))
    assert state.describe(0.0) == "not started"
    state.last_code = 0
    assert state.describe(0.0) == "stopped"
