"""One zygote as its parent sees it, and the pool of them.

    warden   started -> ready -> (job -> frames or bytes -> report)* -> killed
    pool     a place for each warden; who finds none free waits, and never starts more

Invariants:
- every wait has a deadline: a cell is ended by its zygote at the wall-clock limit, and a zygote that does not say so
  within `GRACE_S` more is killed with all that it holds, and replaced at the next job;
- what comes out of a cell is bounded as it arrives: `MAX_FRAME_BYTES` for a frame, `MAX_TOTAL_BYTES` for all;
- `BoxError` is this machine's fault and says nothing about the work.
"""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.box.walls import Limits
from shoal.box.wire import WireError, pack_frame, parse_body, read_size
from shoal.box.zygote import END, MAX_MESSAGE_BYTES, WALLED
from shoal.errors import ConfigError

GRACE_S = 10.0
START_S = 60.0
CLOSE_S = 1.0
MAX_TOTAL_BYTES = 16 << 20
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from shoal.box.zygote import run_zygote; "
    "run_zygote(int(sys.argv[1]), sys.argv[2], namespaces=sys.argv[4] == 'True')"
)
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1", "TZ": "UTC0"}
"""equal on every machine, the order of sets and the hour of the day with it"""
_PIECE_BYTES = 1 << 16


class BoxError(Exception):
    """Boxes do not work here at the moment; nothing is known about the work."""


class EndedError(Exception):
    """A cell said no more: it ended, was ended, or wrote what is no frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a cell ended."""

    code: int
    """minus the number of the signal that ended it, if one did"""
    cpu_s: float
    peak_bytes: int
    late: bool
    """ended at the wall-clock limit"""


class Cell:
    """A job in progress."""

    def __init__(self, warden: "Warden", channel: socket.socket, limits: Limits) -> None:
        self._warden, self._channel = warden, channel
        self._deadline = time.monotonic() + limits.wall_s + GRACE_S
        self._left_bytes = MAX_TOTAL_BYTES
        self._report: Report | None = None

    def send(self, message: Any) -> None:
        """Hand a frame in; EndedError if nobody takes it."""
        self._set_timeout()
        try:
            self._channel.sendall(pack_frame(message))
        except OSError:
            raise EndedError("it took no message") from None
        except WireError as error:  # what one cell says may be longer when it is said to another
            raise EndedError(str(error)) from None

    def receive(self) -> Any:
        """The next frame; EndedError if there is none."""
        try:
            size = read_size(self._read_exactly(4))
            return parse_body(self._read_exactly(size))
        except WireError as error:
            raise EndedError(str(error)) from None

    def read_output(self, most: int) -> bytes:
        """All that it writes until its end, up to one byte more than `most`."""
        pieces, left = [], most + 1
        while left and (piece := self._read(min(left, _PIECE_BYTES))):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def finish(self, *, kill: bool = True) -> Report:
        """End it, or wait for its end, and say how that came."""
        if self._report is None:
            self._report = self._warden.end_job(self._deadline, kill=kill)
        return self._report

    def _read_exactly(self, size: int) -> bytes:
        pieces, left = [], size
        while left:
            piece = self._read(min(left, _PIECE_BYTES))
            if not piece:
                raise EndedError("it ended")
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def _read(self, most: int) -> bytes:
        self._set_timeout()
        try:
            piece = self._channel.recv(most)
        except OSError:
            raise EndedError("it was silent") from None
        self._left_bytes -= len(piece)
        if self._left_bytes < 0:
            raise EndedError(f"it wrote more than {MAX_TOTAL_BYTES} bytes")
        return piece

    def _set_timeout(self) -> None:
        self._channel.settimeout(max(0.001, self._deadline - time.monotonic()))


class Warden:
    """A zygote and its jobs, one at a time; started at the first."""

    def __init__(self, module: str, *, namespaces: bool = True) -> None:
        self.walls = ""
        """`namespaces`, or `calls` where this machine permits no more"""
        self._module, self._namespaces = module, namespaces
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Have a zygote that is ready; ConfigError where no walls are possible."""
        if self._process is not None and self._process.poll() is None:
            return
        if sys.platform != "linux":
            raise ConfigError("code that a model wrote cannot be run safely on this machine: boxes need Linux")
        self.kill()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = json.dumps([str(Path(entry).absolute()) for entry in sys.path])
        words = (str(theirs.fileno()), self._module, paths, str(self._namespaces))
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-s", "-S", "-P", "-c", _BOOT, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=_ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                raise BoxError(f"no process can be started: {error}") from error
        match self._receive(time.monotonic() + START_S):
            case {"ready": str(walls)}:
                self.walls = walls
            case {"refused": str(reason)}:
                self.kill()
                raise ConfigError(f"code that a model wrote cannot be run safely on this machine: {reason}")
            case _:
                self.kill()
                raise BoxError("a zygote said nothing that is known")

    @contextmanager
    def open_cell(self, work: str, job: Any, limits: Limits) -> Iterator[Cell]:
        """A cell that has taken its job and closed its walls."""
        self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                message = json.dumps({"work": work, "limits": asdict(limits)}).encode()
                try:
                    socket.send_fds(self._control, [message], [theirs.fileno()])
                except OSError as error:
                    self.kill()
                    raise BoxError(f"a zygote takes no job: {error}") from error
            cell = Cell(self, ours, limits)
            try:
                _enter_cell(cell, job)
                yield cell
            finally:
                cell.finish()

    def end_job(self, deadline: float, *, kill: bool) -> Report:
        """The report of the job; `kill` does not wait for its own end."""
        if self._control is None:  # whoever ends a cell asks twice if the first answer was that the zygote is gone
            raise BoxError("a zygote is gone")
        if kill:
            try:
                self._control.send(END)
            except OSError as error:
                self.kill()
                raise BoxError(f"a zygote is gone: {error}") from error
        match self._receive(deadline):
            case {"code": int(code), "cpu_s": float(cpu_s), "peak_bytes": int(peak), "late": bool(late)}:
                return Report(code=code, cpu_s=cpu_s, peak_bytes=peak, late=late)
            case answer:
                self.kill()
                raise BoxError(f"a job was lost: {str(answer)[:80]}")

    def close(self) -> None:
        """Let the zygote end by itself, which it does when nobody is there any more, and make sure of it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End the zygote and all that it holds, and wait until it is gone."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(GRACE_S)
            self._process = None

    def _receive(self, deadline: float) -> Any:
        assert self._control is not None
        self._control.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            message = self._control.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            self.kill()
            raise BoxError(f"a zygote does not answer: {error}") from error
        if not message:
            self.kill()
            raise BoxError("a zygote died")
        return json.loads(message)


class Pool:
    """A bounded number of wardens for all who ask."""

    def __init__(self, module: str, size: int, *, namespaces: bool = True) -> None:
        self._places: queue.SimpleQueue[Warden] = queue.SimpleQueue()
        self._all = [Warden(module, namespaces=namespaces) for _ in range(size)]
        for warden in self._all:
            self._places.put(warden)

    @property
    def size(self) -> int:
        return len(self._all)

    @contextmanager
    def borrow(self, wait_s: float) -> Iterator[Warden]:
        """A warden for one job; BoxError if none was free for so long."""
        try:
            warden = self._places.get(timeout=wait_s)
        except queue.Empty:
            raise BoxError(f"no box was free for {wait_s:g} s") from None
        try:
            yield warden
        finally:
            self._places.put(warden)

    def close(self) -> None:
        """End all wardens; nobody may be using one."""
        for warden in self._all:
            warden.close()


def _enter_cell(cell: Cell, job: Any) -> None:
    try:
        cell.send(job)
        first = cell.receive()
    except EndedError as error:
        raise BoxError(f"a cell could not be closed: {error}") from error
    if first != WALLED:
        raise BoxError("a cell was not closed")
