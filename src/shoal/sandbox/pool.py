"""The caller's side of fork servers, and a pool of them.

    process   started -> ready -> (job -> frames or bytes -> report)* -> killed
    pool      a fixed number of processes; a caller waits until one is free

Invariants:
- every wait has a deadline. The fork server ends a job at the wall-clock limit. A fork server that does not report this
  within `GRACE_S` is killed with all its jobs, and replaced at the next job;
- the output of a job is bounded as it arrives: `MAX_FRAME_BYTES` for a frame, `SandboxLimits.output_bytes` in total;
- `SandboxError` is a fault of this machine and says nothing about the job.
"""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.sandbox.forkserver import END, ISOLATED
from shoal.sandbox.frames import HEAD_BYTES, ChannelError, clean_sentence, pack_frame, parse_body, read_size
from shoal.sandbox.isolate import SandboxLimits

GRACE_S = 10.0
START_S = 60.0
CLOSE_S = 1.0
MAX_CONTROL_BYTES = 1 << 16
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from shoal.sandbox.forkserver import run_server; "
    "run_server(int(sys.argv[1]), sys.argv[2], namespaces=sys.argv[4] == 'True')"
)
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "TZ": "UTC0",
    # Otherwise the C library reserves 128 MiB for a thread that has to wait for the heap of another, so whether a
    # program with threads meets its memory limit would depend on their timing.
    "MALLOC_ARENA_MAX": "1",
}
"""the same on every machine, so that the order of sets and the local time are too"""
_PIECE_BYTES = 1 << 16


class SandboxError(Exception):
    """The sandbox does not work on this machine at the moment; says nothing about the job."""


class JobEndedError(Exception):
    """A job sends no more, because it ended or was ended."""


class JobOutputError(JobEndedError):
    """A job wrote an invalid frame, or too much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """How a job ended."""

    code: int
    """exit code; minus the signal number if a signal ended it"""
    cpu_s: float
    peak_bytes: int
    late: bool
    """whether it was ended at the wall-clock limit"""


class _CpuTotal:
    """CPU time of jobs, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.cpu_s = 0.0

    def add(self, cpu_s: float) -> None:
        with self._lock:
            self.cpu_s += cpu_s


_JOBS_CPU = _CpuTotal()


def read_jobs_cpu() -> float:
    """CPU time of all jobs of this process that have ended; `time.process_time` does not include it."""
    return _JOBS_CPU.cpu_s


class _Channel:
    """Our end of a socket, with a deadline and a limit on incoming bytes."""

    def __init__(self, end: socket.socket, most_bytes: int) -> None:
        self.end, self.deadline = end, 0.0
        self._most_bytes = self._left_bytes = most_bytes

    def send(self, message: Any, *descriptors: int) -> None:
        data = pack_frame(message)
        self._set_timeout()
        if descriptors:
            data = data[socket.send_fds(self.end, [data], descriptors) :]
        self.end.sendall(data)

    def receive(self) -> Any:
        return parse_body(self.read_exactly(read_size(self.read_exactly(HEAD_BYTES))))

    def read_exactly(self, size: int) -> bytearray:
        """Read exactly `size` bytes; EOFError if fewer arrive."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self.read_into(view)
            if not count:
                raise EOFError("it ended before its answer did" if size > len(view) else "it ended without an answer")
            view = view[count:]
        return data

    def read_into(self, view: memoryview) -> int:
        self._set_timeout()
        count = self.end.recv_into(view)
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise ChannelError(f"it wrote more than {self._most_bytes} bytes")
        return count

    def _set_timeout(self) -> None:
        self.end.settimeout(max(0.001, self.deadline - time.monotonic()))


class SandboxJob:
    """A job in progress."""

    def __init__(self, process: "SandboxProcess", end: socket.socket, limits: SandboxLimits) -> None:
        self._process, self._channel = process, _Channel(end, limits.output_bytes)
        self._channel.deadline = time.monotonic() + limits.wall_s + GRACE_S
        self._report: JobReport | None = None

    def send(self, message: Any) -> None:
        """Send a frame to the job; JobEndedError if it does not read it."""
        try:
            self._channel.send(message)
        except OSError:
            raise JobEndedError("it took no message") from None
        except ChannelError as error:  # a message from one job may be longer when it is forwarded to another
            raise JobOutputError(str(error)) from None

    def receive(self) -> Any:
        """Return the next frame; JobEndedError at the end."""
        with _translate_errors():
            return self._channel.receive()

    def read_exactly(self, size: int) -> bytearray:
        """Read raw bytes that a frame has announced; JobEndedError if fewer arrive."""
        with _translate_errors():
            return self._channel.read_exactly(size)

    def read_output(self, most: int) -> bytes:
        """Read all output until the end of the job, up to one byte more than `most`."""
        pieces, left, piece = [], most + 1, memoryview(bytearray(_PIECE_BYTES))
        with _translate_errors():
            while left and (count := self._channel.read_into(piece[:left])):
                pieces.append(bytes(piece[:count]))
                left -= count
        return b"".join(pieces)

    def finish(self, *, kill: bool = True) -> JobReport:
        """End the job, or wait for its end, and report how it ended."""
        if self._report is None:
            self._report = self._process.end_job(self._channel.deadline, kill=kill)
        return self._report


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except EOFError as error:
        raise JobEndedError(str(error)) from None
    except OSError:
        raise JobEndedError("it was silent") from None
    except ChannelError as error:
        raise JobOutputError(str(error)) from None


class SandboxProcess:
    """A fork server and its jobs, one at a time; started at the first job."""

    def __init__(self, module: str, *, namespaces: bool = True, environment: Mapping[str, str] | None = None) -> None:
        self.isolation = ""
        """`namespaces`; `calls` or `limits` if this machine permits no more"""
        self.num_started = 0
        self._module, self._namespaces, self._environment = module, namespaces, _ENVIRONMENT | dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._control: _Channel | None = None

    def start(self) -> None:
        """Ensure a ready fork server; ConfigError if this machine does not permit enough isolation."""
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        self._launch()
        match self._receive(time.monotonic() + START_S):
            case {"ready": str(isolation)}:
                self.isolation = isolation
            case {"refused": str(reason)}:
                self.kill()
                raise ConfigError(f"cannot run untrusted code safely on this machine: {reason}")
            case _:
                self.kill()
                raise SandboxError("the fork server sent an unknown message")

    @contextmanager
    def open_job(self, program: str, job: Any, limits: SandboxLimits, file: int | None = None) -> Iterator[SandboxJob]:
        """Open a job that has read its input and isolated itself; `file` is a descriptor that it may read."""
        self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._control.deadline = time.monotonic() + GRACE_S
                descriptors = (theirs.fileno(), *(() if file is None else (file,)))
                try:
                    self._control.send({"program": program, "limits": asdict(limits)}, *descriptors)
                except OSError as error:
                    self.kill()
                    raise SandboxError(f"the fork server does not accept a job: {error}") from error
            opened = SandboxJob(self, ours, limits)
            try:
                _send_input(opened, job)
                yield opened
            except SandboxError:
                self.kill()
                raise
            finally:
                if self._control is not None:
                    opened.finish()

    def end_job(self, deadline: float, *, kill: bool) -> JobReport:
        """Return the report of the job; with `kill`, without waiting for the job to end by itself."""
        if self._control is None:  # called again after the fork server was found dead
            raise SandboxError("the fork server has exited")
        if kill:
            try:
                self._control.send(END)
            except OSError as error:
                self.kill()
                raise SandboxError(f"the fork server has exited: {error}") from error
        match self._receive(deadline):
            case {"code": int(code), "cpu_s": float(cpu_s), "peak_bytes": int(peak), "late": bool(late)}:
                _JOBS_CPU.add(cpu_s)
                return JobReport(code=code, cpu_s=cpu_s, peak_bytes=peak, late=late)
            case answer:
                self.kill()
                raise SandboxError(f"a job was lost: {str(answer)[:80]}")

    def close(self) -> None:
        """Disconnect, so that the fork server ends by itself, and kill it if it does not."""
        self._drop_control()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """Kill the fork server and its jobs, and wait until it has exited."""
        self._drop_control()
        self.interrupt()
        if self._process is not None:
            self._process.wait(GRACE_S)
            if self._process.stderr is not None:
                self._process.stderr.close()
            self._process = None

    def interrupt(self) -> None:
        """Kill the fork server and its jobs while another thread waits for them; that thread notices at once."""
        process = self._process
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        paths = json.dumps([str(Path(entry).absolute()) for entry in sys.path])
        arguments = (str(theirs.fileno()), self._module, paths, str(self._namespaces))
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-s", "-S", "-P", "-c", _BOOT, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                    env=self._environment,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise SandboxError(f"cannot start a sandbox process: {error}") from error
        self._control = _Channel(ours, sys.maxsize)
        self.num_started += 1

    def _receive(self, deadline: float) -> Any:
        assert self._control is not None
        self._control.deadline = deadline
        try:
            return self._control.receive()
        except (OSError, EOFError, ChannelError) as error:
            reason = self._read_complaint() or str(error)
            self.kill()
            raise SandboxError(f"the fork server does not respond: {reason}") from error

    def _read_complaint(self) -> str:
        """The last line that the fork server wrote before it failed to start."""
        assert self._process is not None and self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        output = (self._process.stderr.read(MAX_CONTROL_BYTES) or b"").decode(errors="replace").strip()
        return clean_sentence(output.rpartition("\n")[2])

    def _drop_control(self) -> None:
        if self._control is not None:
            self._control.end.close()
            self._control = None


class SandboxPool:
    """A fixed number of processes shared by all callers."""

    def __init__(
        self, module: str, size: int, *, namespaces: bool = True, environment: Mapping[str, str] | None = None
    ) -> None:
        self.processes = [SandboxProcess(module, namespaces=namespaces, environment=environment) for _ in range(size)]
        self._free: queue.SimpleQueue[SandboxProcess] = queue.SimpleQueue()
        for process in self.processes:
            self._free.put(process)

    @contextmanager
    def borrow(self, wait_s: float) -> Iterator[SandboxProcess]:
        """Borrow a process for one job; SandboxError if none becomes free within `wait_s`."""
        try:
            process = self._free.get(timeout=wait_s)
        except queue.Empty:
            raise SandboxError(f"no sandbox was free for {wait_s:g} s") from None
        try:
            yield process
        finally:
            self._free.put(process)

    def close(self) -> None:
        """End all processes; none may be in use."""
        for process in self.processes:
            process.close()


def _send_input(job: SandboxJob, value: Any) -> None:
    try:
        job.send(value)
        first = job.receive()
    except JobEndedError as error:
        raise SandboxError(f"cannot isolate a job: {error}") from error
    if first != ISOLATED:
        raise SandboxError("a job was not isolated")
