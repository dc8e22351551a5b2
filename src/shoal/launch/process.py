"""The processes of a swarm: how a part is started, how it ends, what is known of it.

A part that needs torch is a fork of one process, the fork server, that has imported it: importing torch takes seconds
of a core, and a swarm has eight parts that need it; a fork takes milliseconds and shares the memory.

    launcher -> fork server: imports -> "ready" -> (arguments, log -> fork -> process id)* -> killed with the launcher

Invariants:
- the fork server computes nothing, so it has no threads that a fork would lack; it knows no file and no key of a run;
- a part is a child of the launcher, forked or executed: it has a session of its own, is stopped when the launcher is
  gone, whatever becomes of the fork server, and is listed under its own command line;
- a fork server that cannot start or that died is no failure of a part: then the part is executed.

Why not `multiprocessing`'s fork server: its forks are its own children, so they lose their exit codes and their parent
when it dies, are not stopped with the launcher, and are all listed under one command line. Only Linux can hand a child
over to its grandparent (`PR_SET_CHILD_SUBREAPER`); elsewhere parts are executed.
"""

import asyncio
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

from shoal.sandbox import linux

START_TIMEOUT_S, FORK_TIMEOUT_S = 120.0, 20.0
MODULES = (
    "shoal.trainer.evaluator",
    "shoal.trainer.run",
    "shoal.validator.validator",
    "shoal.worker.worker",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
NO_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Whether there is a GPU may be asked while importing: without the driver, whose state no fork can use."""
_MAX_REQUEST_BYTES = 1 << 16
_PID_BYTES = 8
_TITLE_CHARS = 1024
"""reserved for a part's command line, in that of the fork server"""
_ARG_START, _ARG_END = 45, 46
"""of /proc/self/stat, fields after the name: where the command line is in memory"""
_LAST_BYTES, _LAST_CHARS = 4096, 300
"""read of the end of a log; shown of its last line"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is started."""

    name: str
    """of this process: `worker-1`"""
    arguments: tuple[str, ...]
    """of the command `shoal`"""
    rank: int
    """parts are stopped in this order, those of equal rank together"""
    ends: bool = False
    """whether the run is not over before it has ended by itself, with exit code 0"""
    last: tuple[int, ...] = ()
    """exit codes after which it is not started again, though nobody waits for them"""
    has_model: bool = False
    """whether it needs torch, which the fork server has imported already"""


class Process:
    """A part that runs, in a process group of its own; it does not outlive the one that started it."""

    def __init__(self, process: "asyncio.subprocess.Process | ForkedProcess") -> None:
        self._process = process

    @classmethod
    async def start(cls, part: Part, log: IO[bytes], environment: dict[str, str]) -> "Process":
        """Start it, with all that it prints in its log."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "shoal", *part.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=bind_to_parent(),
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code, negative for a signal."""
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, and a kill to all that it started; one that has ended is no error."""
        if self._process.returncode is not None:
            return
        # Not by `subprocess`, which first polls the child, and so takes the exit code away from the waiting task.
        send = os.killpg if number == signal.SIGKILL else os.kill
        with suppress(ProcessLookupError):
            send(self.pid, number)


def open_log(folder: Path, name: str) -> IO[bytes]:
    """The log of a part, to which its restarts append."""
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{name}.log").open("ab", buffering=0)


def read_last_line(folder: Path, name: str) -> str:
    """The last line that a part printed, cut to `_LAST_CHARS`; empty if it printed none."""
    try:
        with (folder / f"{name}.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_LAST_CHARS]


def bind_to_parent() -> Callable[[], None] | None:
    """For a child, before it becomes the command: ask the kernel to stop it when its parent is gone."""
    if sys.platform != "linux":
        return None
    linux.load_libc()  # not in the child: other threads of ours may hold a lock of the loader
    return partial(linux.die_with_parent, os.getpid(), signal.SIGTERM)


class ForkServerError(Exception):
    """There is no fork server, or none any more: parts are to be executed."""


class ForkServer:
    """The launcher's side. Started when it is first needed."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = MODULES) -> None:
        self._environment, self._modules = environment, modules
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._ready: asyncio.Task[None] | None = None

    async def wait_ready(self) -> None:
        """Until it has imported everything; `ForkServerError` if it cannot."""
        if self._ready is None:
            self._ready = asyncio.create_task(self._start())
        await asyncio.shield(self._ready)

    def fork(self, arguments: Sequence[str], log: IO[bytes]) -> int:
        """The process id of a new part, a child of ours. Does not await, so it cannot be cancelled half-way."""
        assert self._channel is not None, "it is ready"
        request = json.dumps({"arguments": list(arguments), "parent": os.getpid()}).encode()
        if len(request) > _MAX_REQUEST_BYTES:
            raise ForkServerError("the command line is too long")
        try:
            with _adopt():
                socket.send_fds(self._channel, [request], [log.fileno()])
                answer = self._channel.recv(64)
        except OSError as error:
            raise ForkServerError(f"the fork server does not answer ({error})") from error
        if not answer or answer == b"0":
            raise ForkServerError("the fork server has ended, or this machine cannot start another process")
        return int(answer)

    async def close(self) -> None:
        """End it; its forks live on."""
        if self._ready is not None:
            self._ready.cancel()
            await asyncio.gather(self._ready, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def _start(self) -> None:
        if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
            raise ForkServerError("forks need Linux")
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = (str(theirs.fileno()), *self._modules, "." * _TITLE_CHARS)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal.launch.process", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**self._environment, **NO_DRIVER},
                start_new_session=True,
                preexec_fn=bind_to_parent(),  # noqa: PLW1509 - it calls the kernel and nothing else
            )
        self._channel.setblocking(False)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await asyncio.get_running_loop().sock_recv(self._channel, 64)
        except (TimeoutError, OSError) as error:
            raise ForkServerError(f"the fork server was not ready after {START_TIMEOUT_S:g} s") from error
        if answer != b"ready":
            raise ForkServerError("the imports of the fork server failed")
        self._channel.settimeout(FORK_TIMEOUT_S)


class ForkedProcess:
    """A forked part, with the interface of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._loop, self._descriptor = asyncio.get_running_loop(), os.pidfd_open(pid)
        self._loop.add_reader(self._descriptor, self._read_exit_code)

    async def wait(self) -> int:
        """Its exit code, negative for a signal."""
        await self._ended.wait()
        assert self.returncode is not None, "it has ended"
        return self.returncode

    def _read_exit_code(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


@contextmanager
def _adopt() -> Iterator[None]:
    """While inside, a grandchild whose parent ends becomes our child; only briefly, or we would have to reap others."""
    linux.adopt_orphans(True)
    try:
        yield
    finally:
        linux.adopt_orphans(False)


def run_fork_server(channel: socket.socket, modules: Sequence[str]) -> None:
    """Import, then fork a part for each request until the launcher closes the channel."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # shared memory stays shared: no collection of a fork touches it
    channel.send(b"ready")
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, _MAX_REQUEST_BYTES, 1)
        if not request:
            return
        pid = _fork_twice(channel, descriptors[0], **json.loads(request))
        os.close(descriptors[0])
        channel.send(str(pid).encode())


def _fork_twice(channel: socket.socket, log: int, *, arguments: list[str], parent: int) -> int:
    """Fork a grandchild whose own parent ends, so that the launcher adopts it."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                os.close(writer)
                channel.close()
                become_part(arguments, log, parent)
            os.write(writer, pid.to_bytes(_PID_BYTES, "little"))
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(middle, 0)
    answer = os.read(reader, _PID_BYTES)
    os.close(reader)
    return int.from_bytes(answer, "little")  # 0: no fork


def become_part(arguments: list[str], log: int, parent: int) -> NoReturn:
    """In the new process: run a command to its end."""
    code = 1
    try:
        os.setsid()
        _bind_to_launcher(parent)
        for number in (1, 2):
            os.dup2(log, number)
        os.close(log)
        sys.argv = ["shoal", *arguments]
        set_command_line([sys.executable, "-m", *sys.argv])
        random.seed()
        runpy.run_module("shoal", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - printed as an interpreter does at its end, which this process does not reach
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _bind_to_launcher(parent: int) -> None:
    """Be stopped when the launcher is gone. It adopts us when the process between has ended; wait for that."""
    deadline = time.monotonic() + FORK_TIMEOUT_S
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)
    linux.die_with_parent(parent, signal.SIGTERM)


def set_command_line(words: Sequence[str]) -> None:
    """Be listed under these words: they overwrite the command line that the process began with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    title = b"\0".join(word.encode() for word in words)[: end - start - 1]
    ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    _, _number, *_modules, _room = sys.argv
    with socket.socket(fileno=int(_number)) as _channel:
        run_fork_server(_channel, _modules)
