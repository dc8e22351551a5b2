"""The process that jobs are forked from, and its protocol with the caller. Standard library only.

    server   import the programs -> isolate itself -> prove the isolation -> "ready" -> (job -> fork -> report)*
    job      read its input -> isolate itself -> "isolated" -> run its program -> end

Invariants:
- the input of a job passes through the server as a descriptor. The server never reads it, so a job leaves nothing
  behind for the next. Everything the server itself holds is public: this program and its libraries;
- one job runs at a time. With `has_files` its first process is the first of its namespace, so killing it kills all of
  them;
- a job holds /dev/null as descriptors 0, 1 and 2, its channel as 3, its file as 4 if it has one, and no others. The
  server moves its control socket to a low number first: a caller with many open files passes a high one;
- the server enforces the time limits: the wall-clock limit, the caller's "end" and the caller's death all end the job.
"""

import errno
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.sandbox import isolate, linux
from shoal.sandbox.frames import HEAD_BYTES, receive_frame, send_frame
from shoal.sandbox.isolate import Isolation, Profile, SandboxLimits

END = {"end": True}
ISOLATED = {"isolated": True}
"""the first frame of a job"""
CHANNEL, FILE = 3, 4
CONTROL = 3
_ASIDE = 254
_MAX_DESCRIPTORS = 4096
"""how far the proof looks for descriptors that a job should not hold"""
_PROOF = SandboxLimits(cpu_s=5, wall_s=10.0, memory_bytes=256 << 20)
_POLL_S = 0.02
"""polling interval on systems without process descriptors"""


@dataclass(frozen=True, slots=True)
class Program:
    """A program: what a job does with its channel and its input."""

    run: Callable[[int, Any], None]
    prepare: Callable[[int, Any], None] | None = None
    """runs before the process is isolated"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSet:
    """The value of PROGRAMS in a module of programs."""

    programs: Mapping[str, Program]
    profile: Profile
    warm_up: Callable[[], None]
    """imports everything a job may need, since a job cannot open files; must also work in an isolated process"""


def run_server(control: int, module: str, *, namespaces: bool = True) -> None:
    """Serve jobs until the caller disconnects."""
    linux.fix_addresses()
    if control != CONTROL:
        os.dup2(control, CONTROL)
        os.close(control)
        control = CONTROL
    known: ProgramSet = import_module(module).PROGRAMS
    known.warm_up()
    gc.disable()
    isolation, reason = isolate.isolate_server(known.profile, namespaces=namespaces)
    os.dup2(0, 2)  # until here it may write to stderr why it cannot start
    gc.freeze()  # otherwise every job would copy the pages that a collection touches
    code = _prove_isolation(isolation, known)
    if code != 0 and not known.profile.required:
        isolation, code = replace(isolation, filter=None), 0  # a different C library may need a different call
    if not isolation.is_sufficient:
        send_frame(control, {"refused": f"namespaces: {reason}; system call filter: not available"})
    elif code != 0:
        send_frame(control, {"refused": f"the isolation test failed (code {code})"})
    else:
        if isolation.filter is not None:
            linux.wrap_filter(isolation.filter)
        send_frame(control, {"ready": isolation.name})
        _serve_jobs(socket.socket(fileno=control), isolation, known.programs)


def _serve_jobs(control: socket.socket, isolation: Isolation, programs: Mapping[str, Program]) -> None:
    while True:
        head, descriptors, _, _ = socket.recv_fds(control, HEAD_BYTES, 2)
        order = receive_frame(control.fileno(), head)
        if order is None:
            return
        if order == END:
            continue  # the job had already ended by itself
        report = _run_job(control, isolation, programs[order["program"]], order["limits"], descriptors)
        if report is None:
            return
        send_frame(control.fileno(), report)


def _run_job(
    control: socket.socket, isolation: Isolation, program: Program, limits: dict[str, Any], descriptors: Sequence[int]
) -> dict[str, Any] | None:
    """How a job ended; None if the caller has disconnected."""
    allowed = SandboxLimits(**limits)
    pid = _fork_job(isolation, lambda: _do_job(isolation, allowed, program, descriptors))
    for descriptor in descriptors:
        os.close(descriptor)  # otherwise we would not see the end of the job's channel
    if pid is None:
        return {"lost": "cannot fork"}
    is_late, is_gone = _watch_job(pid, control, allowed.wall_s)
    _, status, usage = os.wait4(pid, 0)
    if is_gone:
        return None
    return {
        "code": os.waitstatus_to_exitcode(status),
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
        "late": is_late,
    }


def _watch_job(pid: int, control: socket.socket, wall_s: float) -> tuple[bool, bool]:
    """Wait until a job has ended, or end it. Returns whether it was late and whether the caller disconnected."""
    deadline, watch = time.monotonic() + wall_s, select.poll()
    watch.register(control, select.POLLIN)
    process = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    if process is not None:
        watch.register(process, select.POLLIN)
    try:
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            left_s = deadline - time.monotonic()
            wait_s = max(0.0, left_s if process is not None else min(left_s, _POLL_S))
            is_heard = any(ready == control.fileno() for ready, _ in watch.poll(1000 * wait_s))
            if is_heard or left_s <= 0:
                is_gone = is_heard and receive_frame(control.fileno()) is None
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so its process id cannot have been reused
                return not is_heard, is_gone
    finally:
        if process is not None:
            os.close(process)
    return False, False


def _fork_job(isolation: Isolation, work: Callable[[], None]) -> int | None:
    """Fork a process that does some work and ends; None if forking is not possible."""
    pid = isolate.fork_job(isolation)
    if pid != 0:
        return pid
    code = 1
    try:
        work()
        code = 0
    except SystemExit as request:  # the usual way for a script to end
        code = 0 if request.code is None else request.code & 255 if isinstance(request.code, int) else 1
    finally:
        os._exit(code)  # whatever was raised: no code of the server may continue in its child


def _do_job(isolation: Isolation, limits: SandboxLimits, program: Program, descriptors: Sequence[int]) -> None:
    _keep_descriptors(descriptors)
    job = receive_frame(CHANNEL)
    if program.prepare is not None:
        program.prepare(CHANNEL, job)
    isolate.isolate_job(isolation, limits)
    send_frame(CHANNEL, ISOLATED)  # from here on everything that arrives is untrusted
    gc.enable()
    program.run(CHANNEL, job)


def _keep_descriptors(descriptors: Sequence[int]) -> None:
    """Move these descriptors to `CHANNEL` and the numbers after it, and close all others."""
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, _ASIDE + place)
    for place in (1, 2):
        os.dup2(0, place)
    for place in range(len(descriptors)):
        os.dup2(_ASIDE + place, CHANNEL + place)
    os.closerange(CHANNEL + len(descriptors), _ASIDE + len(descriptors))


def _prove_isolation(isolation: Isolation, known: ProgramSet) -> int:
    """Run a job that tries forbidden and required operations; returns its exit code."""

    def prove() -> None:
        _keep_descriptors(())
        isolate.isolate_job(isolation, _PROOF)
        known.warm_up()
        _try_escapes(isolation)

    pid = _fork_job(isolation, prove)
    return -1 if pid is None else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _try_escapes(isolation: Isolation) -> None:
    for attempt in (
        lambda: os.open(sys.executable, os.O_RDONLY),
        lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        os.fork,
    ):
        try:
            attempt()
        except OSError:
            continue
        os._exit(2)
    if not all(map(_is_closed, range(CHANNEL, _MAX_DESCRIPTORS))):
        os._exit(4)
    if isolation.has_folder:
        seen = [*Path("/").iterdir(), *Path().iterdir()]
        if os.getpid() != 1 or seen != [Path(isolate.PRIVATE)]:
            os._exit(3)


def _is_closed(descriptor: int) -> bool:
    try:
        os.lseek(descriptor, 0, os.SEEK_CUR)  # the one call about descriptors that every profile allows
    except OSError as error:
        return error.errno == errno.EBADF
    return False
