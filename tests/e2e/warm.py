"""`shoal` commands that start immediately: each is a fork of a process that has imported everything.

From `main` on, a command does the same as `python -m shoal`; only the seconds for importing torch are saved. The parts
of a swarm are forks as well, of the process of `shoal run`. This works as long as nothing here has computed a gradient,
for which torch starts threads that a fork does not have. So a swarm that starts here was prepared before.

A command is requested by a line of JSON on standard input. Standard output has `ready`, then for each command `up PID`
and later `end PID STATUS`. Arguments are modules to import.
"""

import asyncio
import gc
import importlib
import itertools
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from shoal.cli import build_parser, main
from shoal.launch.process import ForkServer, ForkServerError, Part, Process, bind_to_parent

SOURCE = Path(__file__).parents[2] / "src"
FDS = Path("/proc/self/fd")
PATIENCE_S = 300.0
TORCH = ("shoal.train.loop", "transformers.models.qwen3.modeling_qwen3", "matplotlib.pyplot", "pyarrow.parquet")
SWARM = (
    *TORCH,
    "shoal.launch.run",
    "shoal.launch.prepare",
    "shoal.redteam.registry",
    "shoal.coordinator.service",
    "shoal.trainer.evaluator",
    "shoal.trainer.run",
    "shoal.validator.validator",
    "shoal.worker.worker",
)
"""imports needed by `shoal train` and by the parts of a swarm"""
SHARDCAST = ("shoal.shardcast.client", "shoal.shardcast.origin_service", "shoal.shardcast.relay")
"""imports needed by origins, relays and their clients; without torch, whose memory would count as theirs"""


class Running:
    """A started command, with part of the interface of `subprocess.Popen`."""

    def __init__(self, warm: "Warm", pid: int) -> None:
        self._warm, self.pid = warm, pid

    def poll(self) -> int | None:
        """Its exit code if it has ended, negative for a signal."""
        self._warm.hear_all(0.0)
        return self._warm.codes.get(self.pid)

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Wait for its end and return its exit code."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, f"process {self.pid} did not end in {timeout:.0f} s"
            self._warm.hear_all(0.1)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and that was not reported yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """The process from which all commands are forked."""

    def __init__(self, *modules: str) -> None:
        self.codes: dict[int, int] = {}
        """exit codes of ended processes"""
        self._ready = False
        self._started: list[int] = []
        self._heard = b""
        bind = bind_to_parent()
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "TERM": "dumb"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=bind,  # noqa: PLW1509 - it calls the kernel and nothing else
        )
        self._await(lambda: self._ready, "the imports did not finish")

    def start(
        self,
        *words: object,
        out: Path | None = None,
        err: Path,
        dies_at: int = 0,
        max_bytes: int = 0,
        machine: Sequence[str] = (),
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Running:
        """Start a command.

        Its output is appended to these files. It is killed at its `dies_at`-th fsync or rename, and can write at most
        that many bytes to a file. `machine` is its host, see `netns`. Its environment has these variables in addition.
        """
        order: dict[str, Any] = {"words": [str(word) for word in words], "out": str(out or os.devnull), "err": str(err)}
        order |= {"dies_at": dies_at, "max_bytes": max_bytes, "machine": list(machine)}
        order |= {"cwd": str(cwd or ""), "environment": dict(environment or {})}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        count = len(self._started) + 1
        self._await(lambda: len(self._started) == count, "the command did not start")
        return Running(self, self._started[-1])

    def hear_all(self, patience_s: float) -> None:
        """Process the messages that arrive within that time, or the first of them."""
        assert self._process.stdout is not None
        number = self._process.stdout.fileno()
        ready, _, _ = select.select([number], [], [], patience_s)
        if not ready:
            return
        data = os.read(number, 4096)
        assert data, "the parent process has ended"
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            word, *numbers = line.decode().split()
            self._ready |= word == "ready"
            if word == "up":
                self._started.append(int(numbers[0]))
            elif word == "end":
                self.codes[int(numbers[0])] = os.waitstatus_to_exitcode(int(numbers[1]))

    def stop_all(self) -> None:
        """Stop every command that still runs."""
        for running in [Running(self, pid) for pid in self._started]:
            running.send_signal(signal.SIGINT)
            running.wait()

    def close(self) -> None:
        """Stop everything that is left."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self.stop_all()
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _await(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, what
            self.hear_all(0.1)


def run_orders() -> None:
    """Start commands as requested, and report their ends."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    build_parser()  # imports the modules of all commands
    Process.start = classmethod(start_part)  # type: ignore[method-assign, assignment]
    ForkServer.wait_ready = refuse_fork_server  # type: ignore[method-assign]
    gc.freeze()
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    tell("ready")
    orders = b""
    while True:
        ready, _, _ = select.select([0, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            tell_ends()
        if 0 in ready:
            if not (data := os.read(0, 1 << 16)):
                return
            *lines, orders = (orders + data).split(b"\n")
            for line in lines:
                start_command(json.loads(line))


def start_command(order: dict[str, Any]) -> None:
    bind = bind_to_parent()
    if os.fork() == 0:
        if bind is not None:
            bind()
        os.setsid()  # before its id is reported: all its children can be killed with it
        tell(f"up {os.getpid()}")
        follow_order(**order)


def tell_ends() -> None:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            tell(f"end {found[0]} {found[1]}")


def follow_order(
    *,
    words: list[str],
    out: str,
    err: str,
    dies_at: int,
    max_bytes: int,
    machine: list[str],
    cwd: str,
    environment: dict[str, str],
) -> NoReturn:
    """In a new process: run the requested command."""
    places = ((0, os.devnull, os.O_RDONLY), *((number, path, os.O_WRONLY) for number, path in ((1, out), (2, err))))
    for number, path, flags in places:
        descriptor = os.open(path, flags | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    if machine:
        from netns import enter_machine  # imports this module

        enter_machine(*machine)
    if cwd:
        os.chdir(cwd)
    os.environ.update(environment)
    if dies_at:
        die_at(dies_at)
    if max_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    become_command(words)


def die_at(point: int) -> None:
    """Kill this process at its n-th fsync or rename."""
    left = itertools.count(point, -1)

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return wrapped

    os.fsync, os.rename, os.replace = wrap(os.fsync), wrap(os.rename), wrap(os.replace)


async def refuse_fork_server(server: ForkServer) -> None:
    """Parts are our own forks."""
    raise ForkServerError("not here")


async def start_part(kind: type[Process], part: Part, log: IO[bytes], environment: dict[str, str]) -> Process:
    """Start a part of a swarm as a fork instead of a new interpreter."""
    bind, known = bind_to_parent(), set(FDS.iterdir())

    def become_part() -> NoReturn:
        if bind is not None:
            bind()
        for path in set(FDS.iterdir()) - known:  # includes the pipe by which subprocess waits for exec
            with suppress(OSError):
                os.close(int(path.name))
        os.environ.update(environment)
        become_command(part.arguments)

    flush_all()
    process = await asyncio.create_subprocess_exec(
        "never",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=become_part,
    )
    return kind(process)


def become_command(words: Sequence[str]) -> NoReturn:
    """In a new process: run that command to its end."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)  # that of the parent's loop
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        gc.freeze()  # objects of the parent are not closed here
        random.seed()
        code = main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        flush_all()
        os._exit(code)


def flush_all() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    run_orders()
