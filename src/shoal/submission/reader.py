"""One reading process as its parent sees it (the process itself: submission/child.py).

It is given an open descriptor, never a path, and one file at a time; it inherits no other descriptor but the socket to
its parent, and no variable of the environment. What is taken from it is bounded by the head of its answer, which is
checked first. The caller sets the deadlines.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.submission.bounds import Bounds, FormError
from shoal.submission.child import EXIT_UNREAD, MAX_JOB_BYTES
from shoal.submission.frame import (
    LENGTH_BYTES,
    MAX_HEAD_BYTES,
    Columns,
    FrameError,
    clean_text,
    count_bytes,
    limit_bytes,
    read_body,
    read_head,
)

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from shoal.submission.child import run_reader; "
    "run_reader(int(sys.argv[1]), int(sys.argv[2]))"
)
_ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # others reserve address space, of which there is little
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # a process with threads cannot be forked safely
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_BASE_BYTES = 64 << 20
_DECODING_FACTOR = 6
"""memory that decoding takes, in sizes of what comes out of it"""
_MAX_LINE_BYTES = 1024
_MAX_COMPLAINT_BYTES = 1 << 16


class ReaderError(Exception):
    """A reader whose child for this file died."""


class LostError(Exception):
    """A reader that somebody else ended, or its child: the kernel when memory runs out, an operator."""


class MeansError(Exception):
    """A reader without the means to read, whatever the file."""


class Reader:
    """A process that reads files."""

    def __init__(self, boot: str = BOOT) -> None:
        self.guards: tuple[str, ...] = ()
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        paths = json.dumps([str(Path(entry).absolute()) for entry in sys.path])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-B", "-c", boot, str(theirs.fileno()), str(os.getpid()), paths],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    async def wait_ready(self) -> None:
        """Return when it has tried itself and serves."""
        match await self._receive_line():
            case {"guards": list(guards)}:
                self.guards = tuple(str(name) for name in guards)
            case _:
                raise FrameError("a report of another kind")

    def read_complaint(self) -> str:
        """The last that it said before it could start."""
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        said = (self.process.stderr.read(_MAX_COMPLAINT_BYTES) or b"").decode(errors="replace").strip()
        return clean_text(said.rpartition("\n")[2])

    async def read(self, file: int, bounds: Bounds, cpu_s: int) -> Columns:
        """Have one file read."""
        job = asdict(bounds) | {"memory_bytes": _limit_memory(file, bounds), "cpu_s": cpu_s, "trial": False}
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                self._send_job(job, file, theirs.fileno())
            answer = await _receive_answer(ours, bounds)
        await self._check_end()
        if answer is None:
            raise FrameError("an answer that ends too early")
        if isinstance(answer, str):
            raise FormError(answer)
        return answer

    async def try_room(self, file: int, bounds: Bounds, cpu_s: int) -> None:
        """Have it read a file of its own within the limits of this one, with all of the memory taken."""
        self._send_job({"memory_bytes": _limit_memory(file, bounds), "cpu_s": cpu_s, "trial": True}, file, file)
        await self._check_end()

    def kill(self) -> None:
        """End it with all its children, at once; `process.wait` returns soon after."""
        self._channel.close()
        if self.process.stderr is not None:
            self.process.stderr.close()
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def _send_job(self, job: dict[str, Any], *descriptors: int) -> None:
        message = json.dumps(job).encode()
        assert len(message) <= MAX_JOB_BYTES, "a job is read in one piece"
        socket.send_fds(self._channel, [message], descriptors)

    async def _check_end(self) -> None:
        """Wait for how the child of this file ended."""
        match await self._receive_line():
            case {"code": 0}:
                return
            case {"code": None}:
                raise MeansError("it cannot fork")
            case {"code": int(code)} if code == EXIT_UNREAD:
                raise MeansError("it cannot read the file from the disk")
            case {"code": int(code)} if code == -signal.SIGKILL:  # no limit of ours ends it so, nor can it itself
                raise LostError(_describe_end(code))
            case {"code": int(code)}:
                raise ReaderError(_describe_end(code))
        raise FrameError("a report of another kind")

    async def _receive_line(self) -> Any:
        loop, line = asyncio.get_running_loop(), b""
        while not line.endswith(b"\n"):
            piece = await loop.sock_recv(self._channel, _MAX_LINE_BYTES)
            if not piece:
                raise LostError("the process that forks readers died, which looks at no file")
            line += piece
            if len(line) > _MAX_LINE_BYTES:
                raise FrameError("a report without an end")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise FrameError("a report that is not JSON") from None


async def _receive_answer(channel: socket.socket, bounds: Bounds) -> Columns | str | None:
    """The columns, the sentence of a refusal, or None if the sender ended before it was done."""
    length = await _receive_exactly(channel, LENGTH_BYTES)
    if length is None:
        return None
    num_bytes = int.from_bytes(length, "little")
    if num_bytes > MAX_HEAD_BYTES:
        raise FrameError(f"a head of {num_bytes} bytes")
    head = await _receive_exactly(channel, num_bytes)
    if head is None:
        return None
    sizes = read_head(bytes(head), bounds)
    body = await _receive_exactly(channel, 0 if isinstance(sizes, str) else count_bytes(sizes))
    if body is None:
        return None
    if await asyncio.get_running_loop().sock_recv(channel, 1):
        raise FrameError("an answer that goes on after its end")
    return sizes if isinstance(sizes, str) else read_body(body, sizes)


async def _receive_exactly(channel: socket.socket, num_bytes: int) -> bytearray | None:
    loop, buffer, filled = asyncio.get_running_loop(), bytearray(num_bytes), 0
    view = memoryview(buffer)
    while filled < num_bytes:
        count = await loop.sock_recv_into(channel, view[filled:])
        if not count:
            return None
        filled += count
    return buffer


def _limit_memory(file: int, bounds: Bounds) -> int:
    """Bytes that reading may take."""
    return _BASE_BYTES + 2 * os.fstat(file).st_size + _DECODING_FACTOR * limit_bytes(bounds)


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"it failed with code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"it was ended by {known.get(-code, f'signal {-code}')}"
