"""One process of a swarm: how it is started, how it ends, what is known of it."""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

NUM_PDEATHSIG = 1
"""of prctl: the signal that a process gets when its parent is gone"""
_LAST_BYTES, _LAST_CHARS = 4096, 300


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
    """whether it needs torch and all that comes with it, which the nursery has imported already"""


class Child(Protocol):
    """A process of ours."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...


class Process:
    """A part that runs, in a process group of its own; it does not outlive the one that started it."""

    def __init__(self, part: Part, process: Child) -> None:
        self.part = part
        self._process = process

    @classmethod
    async def start(cls, part: Part, log: IO[bytes], environment: dict[str, str]) -> "Process":
        """Start it, with all that it prints in its log."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "shoal",
            *part.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=bind_to_parent(),
        )
        return cls(part, process)

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
        # By number: the signal of `subprocess` first asks whether the child has ended, and that takes the exit code
        # away from the one who waits for it.
        send = os.killpg if number == signal.SIGKILL else os.kill
        try:
            send(self.pid, number)
        except ProcessLookupError:
            return


def open_log(folder: Path, name: str) -> IO[bytes]:
    """The log of a part, which its restarts go on with."""
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
    """What a child does before it becomes the command: it asks the kernel to be stopped when its parent is gone."""
    if sys.platform != "linux":
        return None
    parent, prctl = os.getpid(), ctypes.CDLL(None, use_errno=True).prctl

    def bind() -> None:
        prctl(NUM_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)  # it was gone before that

    return bind
