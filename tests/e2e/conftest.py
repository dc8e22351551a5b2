"""Processes of `shoal`, honest or not, in a folder of their own that is monitored while they run.

    <root>/sentinel, home, temp, cwd     only the test may touch these
    <root>/made                          what is published; the same
    <root>/data/<name>                   one folder for each process, and nothing else
    <root>/log/<name>

When it is closed, everything outside of the data folders must be as the test left it, no process may be left, and none
may have printed a traceback.
"""

import contextlib
import hashlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from shoal.identity.keys import Key
from shoal.launch.process import MODULES

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from warm import SHARDCAST, SWARM, Running, Warm  # noqa: E402

SOURCE = Path(__file__).parents[2] / "src"
PATIENCE_S = 90.0
MB = 1_000_000
RUN = "test"
HASH_LIMIT = 64 * MB
"""Larger files are compared by size and times."""
COMMANDS = {"pull": ("weights", "pull"), "relay": ("relay",), "publish": ("weights", "publish")}
EXIT_STOPPED = (0, 130, -signal.SIGTERM)
"""Exit codes of a stopped server and a stopped client, also if it had just started or was just done."""
Spawn = Callable[[list[str], Path], "Running | subprocess.Popen[bytes]"]
"""starts a command with its output in a file"""


class ChildProcess:
    """One process and its output."""

    def __init__(self, log: Path, command: list[str], spawn: Spawn) -> None:
        self.log = log
        self._command = command
        self._spawn = spawn
        self.start()

    def start(self, *flags: str) -> None:
        """Start it, or start it again with additional flags; the last value of a flag wins."""
        self._command += flags
        self.log.touch()
        self._begun = self.log.stat().st_size
        self.process = self._spawn(self._command, self.log)

    @property
    def text(self) -> str:
        """Its output since the last start."""
        return self.log.read_bytes()[self._begun :].decode()

    @property
    def url(self) -> str:
        """Its address, once it serves."""
        self.await_text("serving run")
        return re.findall(r"serving run \S+ at (http://\S+?)(?:,|$)", self.text, re.MULTILINE)[-1]

    @property
    def address(self) -> str:
        """The address that it will serve at."""
        return self._command[len(self._command) - self._command[::-1].index("--listen")]

    def await_text(self, text: str, times: int = 1) -> None:
        await_true(lambda: self.text.count(text) >= times, lambda: f"{text!r} in {self.log.name}:\n{self.text}")

    def await_complete(self, version: int) -> None:
        """Wait until it serves all of a version."""
        text = f'"complete":{version},'
        await_true(lambda: text in self.ask("/healthz").replace(" ", "").replace("}", ","), lambda: f"{text}")

    def finish(self, code: int = 0) -> str:
        """Wait until it ends, with this code; returns its output."""
        await_true(lambda: self.process.poll() is not None, lambda: f"end of {self.log.name}:\n{self.text}")
        assert self.process.poll() == code, self.text
        return self.text

    def fail(self, code: int) -> str:
        """The one-line error with which it ended."""
        lines = [line for line in self.finish(code).splitlines() if line.startswith("shoal: ")]
        assert len(lines) == 1 and self.text.endswith(lines[0] + "\n"), self.text
        return lines[0]

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(PATIENCE_S)

    def ask(self, target: str) -> str:
        with urllib.request.urlopen(self.url + target, timeout=PATIENCE_S) as answer:
            text: str = answer.read().decode()
        return text

    def read_metric(self, name: str) -> int:
        return sum(
            int(float(value))
            for value in re.findall(rf"^{name}(?:{{.*}})? ([\d.e+]+)$", self.ask("/metrics"), re.MULTILINE)
        )

    def await_sent(self, num_bytes: int) -> None:
        """Wait until it has sent that many bytes."""
        await_true(lambda: self.read_metric("shoal_sent_bytes_total") >= num_bytes, lambda: f"{num_bytes} bytes sent")

    @property
    def sent_bytes(self) -> int:
        return self.read_metric("shoal_sent_bytes_total")


class ProcessGroup:
    """The processes of one test."""

    def __init__(self, root: Path, warm: Warm) -> None:
        self.root, self._warm = root, warm
        self.data = root / "data"
        self.children: dict[str, ChildProcess] = {}
        self._commands: dict[ChildProcess, str] = {}
        self._folders: set[str] = set()
        for name in ("home", "temp", "cwd", "made", "data", "log", "sentinel"):
            (root / name).mkdir()
        self.key = Key.generate()
        self.key.save(root / "made" / "key")
        (root / "sentinel" / "evil").write_text("untouched\n")
        (root / "sentinel" / "link").symlink_to("evil")
        self._before = self._take_snapshot()

    # Checkpoints.

    def make_checkpoint(self, name: str, size: int, *, seed: object = None, holes: bool = False) -> Path:
        """A folder with random weights, or with as many zeros in a sparse file."""
        path = self.root / "made" / name
        path.mkdir()
        with (path / "model.safetensors").open("wb") as file:
            file.truncate(size)
            if not holes:
                file.write(random.Random(seed or name).randbytes(size))
        (path / "config.json").write_text(f'{{"name": "{name}"}}\n')
        self._before |= self._take_snapshot(path)
        return path

    def change_bytes(self, old: Path, name: str, offset: int, data: bytes) -> Path:
        """A copy of a checkpoint that differs in these bytes."""
        path = old.parent / name
        shutil.copytree(old, path)
        with (path / "model.safetensors").open("r+b") as file:
            file.seek(offset)
            file.write(data)
        self._before |= self._take_snapshot(path)
        return path

    def write_file(self, name: str, data: bytes) -> Path:
        path = self.root / "made" / name
        path.write_bytes(data)
        self._before |= self._take_snapshot(path)
        return path

    # Processes.

    def origin(
        self,
        path: Path,
        version: int = 1,
        *flags: str,
        name: str = "origin",
        data: str | Path = "origin",
        limit: int | None = None,
    ) -> ChildProcess:
        """An origin; `limit`, here and below, is the largest file size that it may write."""
        listen = ["--listen", find_address(), *flags]
        return self._start(name, "publish", *self._publish(path, version, data), *listen, limit=limit)

    def hand_over(self, path: Path, version: int, data: str | Path = "origin") -> ChildProcess:
        """Run the command for one more version, for the running origin."""
        return self._start(f"publish{len(self.children)}", "publish", *self._publish(path, version, data))

    def relay(
        self,
        name: str,
        *upstreams: str,
        flags: tuple[str, ...] = (),
        data: str | Path = "",
        limit: int | None = None,
    ) -> ChildProcess:
        args = ["--publisher", self.key.public, "--data", self._claim(data or name), "--run", RUN]
        return self._start(name, "relay", *upstreams, *args, "--listen", find_address(), *flags, limit=limit)

    def pull(
        self,
        *sources: str,
        out: str | Path = "out",
        name: str = "",
        flags: tuple[str, ...] = (),
        limit: int | None = None,
    ) -> ChildProcess:
        folder = self._claim(out)
        args = ["--publisher", self.key.public, "--run", RUN, "--out", folder, *flags]
        return self._start(name or folder.name, "pull", *sources, *args, limit=limit)

    def script(self, file: str, name: str, *args: object) -> ChildProcess:
        """A process that is not part of shoal."""
        return self._add(name, "", [sys.executable, str(HERE / file), *map(str, args)], self._spawn_program)

    # Checks.

    def check_same(self, path: Path, version: int, out: str | Path = "out") -> None:
        """The version exists and is equal bit for bit, and there is nothing else next to it."""
        folder = self.data / out
        extra = {item.name for item in folder.iterdir()} - {".shardcast", "latest"}
        assert all(re.fullmatch(r"v\d+", name) for name in extra), extra
        found = folder / f"v{version}"
        assert sorted(file.name for file in found.iterdir()) == sorted(file.name for file in path.iterdir())
        for file in path.iterdir():
            assert (found / file.name).read_bytes() == file.read_bytes()
        assert not any(item.is_symlink() for item in found.iterdir())

    def close(self) -> None:
        """Stop all processes in order, then check what they left behind."""
        try:
            for command, number in (("", signal.SIGKILL), *((each, signal.SIGTERM) for each in COMMANDS)):
                self._stop([child for child in self.children.values() if self._commands[child] == command], number)
        finally:
            for child in self.children.values():
                if child.process.poll() is None:
                    child.process.kill()
                    child.process.wait(PATIENCE_S)
        assert find_processes(self.root) == []
        for child in self.children.values():
            text = child.log.read_text()
            assert "Traceback" not in text and "exception" not in text.lower(), text
        self.check_untouched()

    def check_untouched(self) -> None:
        """Nothing outside of the data folders was changed, added or removed."""
        assert self._take_snapshot() == self._before
        assert {path.name for path in self.data.iterdir()} <= self._folders

    def _stop(self, children: list[ChildProcess], number: int) -> None:
        running = [child for child in children if child.process.poll() is None]
        for child in running:
            child.kill(signal.SIGCONT)
            child.kill(number)
        for child in running if number == signal.SIGTERM else ():
            assert child.process.wait(PATIENCE_S) in EXIT_STOPPED, child.text

    def _publish(self, path: Path, version: int, data: str | Path) -> list[object]:
        key = self.root / "made" / "key"
        return [path, "--version", version, "--key", key, "--data", self._claim(data), "--run", RUN]

    def _claim(self, folder: str | Path) -> Path:
        path = self.data / folder
        if path.parent == self.data:
            self._folders.add(path.name)
        return path

    def _start(self, name: str, command: str, *args: object, limit: int | None = None) -> ChildProcess:
        spawn = partial(self._spawn_command, limit)
        return self._add(name, command, [*COMMANDS[command], *map(str, args)], spawn)

    def _spawn_command(self, limit: int | None, command: list[str], log: Path) -> Running:
        own = {"HOME": str(self.root / "home"), "TMPDIR": str(self.root / "temp")}
        cwd = self.root / "cwd"
        return self._warm.start(*command, out=log, err=log, max_bytes=limit or 0, cwd=cwd, environment=own)

    def _spawn_program(self, command: list[str], log: Path) -> "subprocess.Popen[bytes]":
        own = {"HOME": str(self.root / "home"), "TMPDIR": str(self.root / "temp"), "PYTHONPATH": str(SOURCE)}
        with log.open("ab") as file:
            return subprocess.Popen(
                command,
                env=os.environ | own,
                cwd=self.root / "cwd",
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
            )

    def _add(self, name: str, command: str, line: list[str], spawn: Spawn) -> ChildProcess:
        assert name not in self.children or self.children[name].process.poll() is not None, f"{name} is still running"
        child = ChildProcess(self.root / "log" / f"{name}.log", line, spawn)
        self._commands[child] = command
        self.children[name] = child
        return child

    def _take_snapshot(self, folder: Path | None = None) -> dict[str, object]:
        """Everything below a folder, by path relative to the root, except data and logs."""
        top = folder or self.root
        ours = {self.data, self.root / "log"}
        paths = (
            [top] if top.is_file() else [top, *(path for path in top.rglob("*") if not ours & {path, *path.parents})]
        )
        return {str(path.relative_to(self.root)): describe_path(path) for path in paths if path != self.root}


def describe_path(path: Path) -> object:
    status = path.lstat()
    if path.is_symlink():
        return str(path.readlink())
    if path.is_dir():
        return oct(status.st_mode)
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if status.st_size <= HASH_LIMIT else ""
    return status.st_mode, status.st_size, status.st_mtime_ns, digest


def find_processes(root: Path) -> list[int]:
    """Processes of this root that are still running: their working directory is there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # ended in the meantime, or not ours
            found += [int(path.parent.name)] if path.readlink() == root / "cwd" else []
    return found


def find_address() -> str:
    """A free address that stays free while its server is dead: such a port is not used for outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"


def await_true(holds: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"within {PATIENCE_S:.0f} s no {what()}"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def shardcast_parent() -> Iterator[Warm]:
    """Origins, relays and clients are forks of this process."""
    with closing(Warm(*SHARDCAST)) as warm:
        yield warm


@pytest.fixture(scope="session")
def torch_parent() -> Iterator[Warm]:
    """All other commands are forks of this process."""
    with closing(
        Warm(*SWARM, *MODULES, "shoal.redteam.workers", "shoal.redteam.scripted", "shoal.diloco.site")
    ) as warm:
        yield warm


@pytest.fixture(scope="module")
def warm(torch_parent: Warm) -> Iterator[Warm]:
    """Starts commands that need torch; those that still run after the last test of a file are stopped."""
    yield torch_parent
    torch_parent.stop_all()


@pytest.fixture
def processes(tmp_path: Path, shardcast_parent: Warm) -> Iterator[ProcessGroup]:
    """Processes of one test."""
    yield from open_processes(tmp_path, shardcast_parent)


@pytest.fixture(scope="module")
def shared_processes(tmp_path_factory: pytest.TempPathFactory, shardcast_parent: Warm) -> Iterator[ProcessGroup]:
    """Processes shared by all tests of a file."""
    yield from open_processes(tmp_path_factory.mktemp("shared_processes"), shardcast_parent)


def open_processes(root: Path, warm: Warm) -> Iterator[ProcessGroup]:
    processes = ProcessGroup(root, warm)
    try:
        yield processes
    finally:
        processes.close()


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], bool], Callable[[], str]], None]:
    """Waits until a condition holds, and fails with its description on timeout."""
    return await_true
