"""Parts that start at once: forks of one process, the nursery, that has imported what they all need.

    launcher -> nursery: imports -> "ready" -> (order and log -> fork -> process id)* -> killed with the launcher

To import torch and transformers takes seconds of a core, and a swarm has eight parts that need them; a fork takes
milliseconds and shares their memory.

Invariants:
- the nursery computes nothing, so it has no threads that a fork would lack; it knows no file and no key of a run;
- a part is a child of the launcher, like one that was executed: it has a session of its own, is stopped when the
  launcher is gone, whatever becomes of the nursery, and is listed under its own command line;
- a nursery that cannot be had or that died is no failure of a part: then it is executed.

Only Linux hands a child over to its grandparent (`PR_SET_CHILD_SUBREAPER`).
"""

import asyncio
import ctypes
import gc
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn

from shoal.launch.part import NUM_PDEATHSIG, bind_to_parent

START_S, FORK_S = 120.0, 20.0
MODULES = (
    "shoal.redteam.registry",
    "shoal.trainer.evaluator",
    "shoal.trainer.run",
    "shoal.validator.loop",
    "shoal.worker.loop",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
_NO_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Whether there is a GPU may be asked while importing: without the driver, whose state no fork can use."""
_PR_SET_CHILD_SUBREAPER = 36
_MAX_ORDER_BYTES = 1 << 16
_PID_BYTES = 8
_TITLE_CHARS = 1024
"""room for a part's command line, in that of the nursery"""
_ARG_START, _ARG_END = 45, 46
"""of /proc/self/stat, fields after the name: where the command line is in memory"""


class NurseryError(Exception):
    """No nursery, or none any more: parts are to be executed."""


class Nursery:
    """The launcher's side. Started when it is first needed."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = MODULES) -> None:
        self._environment, self._modules = environment, modules
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._ready: asyncio.Task[None] | None = None

    async def wait_ready(self) -> None:
        """Until it has imported everything; `NurseryError` if it cannot."""
        if self._ready is None:
            self._ready = asyncio.create_task(self._start())
        await asyncio.shield(self._ready)

    def fork(self, arguments: Sequence[str], log: IO[bytes]) -> int:
        """The process id of a new part, a child of ours. Does not wait: nobody can be cancelled half-way."""
        assert self._channel is not None, "it is ready"
        order = json.dumps({"arguments": list(arguments), "parent": os.getpid()}).encode()
        if len(order) > _MAX_ORDER_BYTES:
            raise NurseryError("a command line that is too long")
        try:
            with _adopt():
                socket.send_fds(self._channel, [order], [log.fileno()])
                answer = self._channel.recv(64)
        except OSError as error:
            raise NurseryError(f"it does not answer ({error})") from error
        if not answer or answer == b"0":
            raise NurseryError("it has ended, or this machine has no room for another process")
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
            raise NurseryError("only Linux has what it takes")
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "shoal.launch.nursery",
                    str(theirs.fileno()),
                    *self._modules,
                    "." * _TITLE_CHARS,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**self._environment, **_NO_DRIVER},
                start_new_session=True,
                preexec_fn=bind_to_parent(),  # noqa: PLW1509 - it calls the kernel and nothing else
            )
        self._channel.setblocking(False)
        try:
            async with asyncio.timeout(START_S):
                told = await asyncio.get_running_loop().sock_recv(self._channel, 64)
        except (TimeoutError, OSError) as error:
            raise NurseryError(f"it was not ready after {START_S:g} s") from error
        if told != b"ready":
            raise NurseryError("its imports failed")
        self._channel.settimeout(FORK_S)


class Fork:
    """A part that the nursery made, as `asyncio.subprocess.Process` shows one that was executed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._loop, self._descriptor = asyncio.get_running_loop(), os.pidfd_open(pid)
        self._loop.add_reader(self._descriptor, self._take_code)

    async def wait(self) -> int:
        """Its exit code, negative for a signal."""
        await self._ended.wait()
        assert self.returncode is not None, "it has ended"
        return self.returncode

    def _take_code(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


@contextmanager
def _adopt() -> Iterator[None]:
    """While inside, a grandchild whose parent ends is our child; not longer, or we would have to bury strangers."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise NurseryError("this kernel hands over no children")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def run_nursery(channel: socket.socket, modules: Sequence[str]) -> None:
    """Import, then fork a part for each order until the launcher closes the channel."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what all share stays shared: no collection of a fork touches it
    channel.send(b"ready")
    while True:
        order, descriptors, _, _ = socket.recv_fds(channel, _MAX_ORDER_BYTES, 1)
        if not order:
            return
        pid = _fork_twice(channel, descriptors[0], **json.loads(order))
        os.close(descriptors[0])
        channel.send(str(pid).encode())


def _fork_twice(channel: socket.socket, log: int, *, arguments: list[str], parent: int) -> int:
    """A grandchild whose own parent has ended, so that the launcher has it."""
    known, told = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            pid = os.fork()
            if pid == 0:
                os.close(known)
                os.close(told)
                channel.close()
                become_part(arguments, log, parent)
            os.write(told, pid.to_bytes(_PID_BYTES, "little"))
        finally:
            os._exit(0)
    os.close(told)
    os.waitpid(middle, 0)
    answer = os.read(known, _PID_BYTES)
    os.close(known)
    return int.from_bytes(answer, "little")  # 0: no fork


def become_part(arguments: list[str], log: int, parent: int) -> NoReturn:
    """In the new process: be a command, to its end."""
    code = 1
    try:
        os.setsid()
        _bind_to(parent)
        for number in (1, 2):
            os.dup2(log, number)
        os.close(log)
        sys.argv = ["shoal", *arguments]
        show_title([sys.executable, "-m", *sys.argv])
        random.seed()
        from shoal.cli import main

        code = main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - told as an interpreter tells it at its end, which this process does not reach
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _bind_to(parent: int) -> None:
    """Be stopped when the launcher is gone; once it has us, which is when the process between has ended."""
    deadline = time.monotonic() + FORK_S
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)
    ctypes.CDLL(None).prctl(NUM_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def show_title(words: Sequence[str]) -> None:
    """Be listed under these words: they are written over the command line that the process began with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    title = b"\0".join(word.encode() for word in words)[: end - start - 1]
    ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    _, _number, *_modules, _room = sys.argv
    with socket.socket(fileno=int(_number)) as _channel:
        run_nursery(_channel, _modules)
