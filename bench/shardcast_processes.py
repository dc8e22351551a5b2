"""Processes of one measurement: started, observed through /proc, and always stopped by their ids.

Invariants:
- leaving the block stops every process started in it, and their children;
- if a process dies while it is waited for, the benchmark ends with the tail of its log, never with a wrong figure;
- processes are not reaped before the block ends, so the CPU time of finished ones can still be read.

Ballast: the host of a virtual machine may reclaim memory that is free here, and then the first write to each page
waits for the host (measured: 2.3 s instead of 0.3 s per GiB written to a file, after three idle seconds). So a run
allocates as much memory as it is going to fill, and frees it when its clock starts.
"""

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

SAMPLE_S = 0.05
POLL_S = 0.003
END_S = 5.0
POPULATE_WRITE = 23
"""madvise flag to make all pages writable now; missing from the mmap module"""
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Reading:
    """One run: its duration, and the CPU time of each of its processes."""

    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    anon_mb: float = 0.0
    """largest anonymous memory of any process so far, including those started earlier"""


class Processes:
    """The processes of one measurement, each with its own log in the folder."""

    def __init__(self, folder: Path, ballast_bytes: int = 0) -> None:
        self.folder = folder
        self._ballast = _hold_memory(ballast_bytes) if ballast_bytes else None
        self.anon_kb: dict[str, int] = {}
        self._members: dict[str, subprocess.Popen[bytes]] = {}
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample_members, daemon=True)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._sampler.join()
        for member in self._members.values():
            _signal_group(member, signal.SIGTERM)
        for member in self._members.values():
            _end_group(member)

    def start(self, name: str, command: Sequence[str | Path], **environment: str) -> subprocess.Popen[bytes]:
        """Start a process in its own group, with a pipe for its input."""
        assert name not in self._members
        with (self.folder / f"{name}.log").open("wb") as log:
            self._members[name] = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "no_proxy": "*"} | environment,
                cwd=self.folder,
                start_new_session=True,
            )
        return self._members[name]

    def stop(self, name: str) -> None:
        """Stop one process before the others."""
        _end_group(self._members.pop(name))

    def wait_until(self, check: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
        """Wait until a condition holds, while all processes are alive."""
        limit = time.monotonic() + seconds
        while not check():
            for name, member in self._members.items():
                if failed := _peek_status(member):
                    raise SystemExit(f"{name} ended with {failed} before {what}\n{self.read_log(name)}")
            if time.monotonic() > limit:
                logs = "\n".join(f"{name}: {self.read_log(name)}" for name in self._members)
                raise SystemExit(f"{what}: not within {seconds:.0f} s\n{logs}")
            time.sleep(POLL_S)

    def wait_port(self, port: int) -> None:
        """Wait until the port accepts connections."""
        self.wait_until(lambda: _is_open(port), f"port {port} was open", 30.0)

    def has_ended(self, name: str) -> bool:
        """Whether a process has ended successfully."""
        return _peek_status(self._members[name]) == 0

    def read_log(self, name: str) -> str:
        """The end of a process's output."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]

    def read_cpu(self) -> dict[str, float]:
        """CPU seconds of each process so far, including its children."""
        return {name: sum_cpu(member.pid) for name, member in self._members.items()}

    @contextmanager
    def measure(self) -> Iterator[Reading]:
        """Time a block. Processes started inside count from their start."""
        if self._ballast is not None:
            self._ballast.close()
        reading = Reading()
        before = self.read_cpu()
        started = time.perf_counter()
        yield reading
        reading.seconds = time.perf_counter() - started
        reading.cpu_s |= {name: cpu - before.get(name, 0.0) for name, cpu in self.read_cpu().items()}
        reading.anon_mb = max(self.anon_kb.values(), default=0) / 1024

    def _sample_members(self) -> None:
        while not self._over.wait(SAMPLE_S):
            for name, member in list(self._members.items()):
                self.anon_kb[name] = max(self.anon_kb.get(name, 0), read_anon(member.pid))


def _hold_memory(num_bytes: int) -> mmap.mmap:
    """Allocate memory and touch all of it."""
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE)
    block.madvise(POPULATE_WRITE)
    return block


def end_on_signal() -> None:
    """Turn SIGTERM into SystemExit, so that blocks are left in order."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))


def find_port() -> int:
    """A free port on loopback."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def read_anon(pid: int) -> int:
    """Anonymous memory of a process in KiB; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1])
    return 0


def sum_cpu(pid: int) -> float:
    """CPU seconds of a process and its children, both ended and live."""
    try:
        seconds = parse_stat(Path(f"/proc/{pid}/stat").read_text())
        children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return 0.0
    return seconds + sum(sum_cpu(int(child)) for group in children for child in group)


def parse_stat(text: str) -> float:
    """CPU seconds in a line of /proc/PID/stat: user and system, its own and of children that were waited for."""
    fields = text.rpartition(")")[2].split()  # the name before it may contain anything
    return sum(map(int, fields[11:15])) / TICKS


def _peek_status(member: subprocess.Popen[bytes]) -> int | None:
    """The exit code of an ended process (or the signal that killed it); it is not reaped."""
    done = os.waitid(os.P_PID, member.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None if done is None else int(done.si_status)


def _end_group(member: subprocess.Popen[bytes]) -> None:
    """Stop a process and all its children, by force if necessary."""
    _signal_group(member, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        member.wait(END_S)
    _signal_group(member, signal.SIGKILL)  # including children it left behind
    member.wait()


def _signal_group(member: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(member.pid, number)


def _is_open(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex(("127.0.0.1", port)) == 0
