"""The process that boxes are forked from, and its conversation with its warden. Standard library only.

    zygote   import what work may need -> walls of the house -> prove the walls -> "ready" -> (job -> fork -> report)*
    cell     private folder -> read the job -> close the walls -> work -> end

Invariants:
- a job passes the zygote as a descriptor: it never sees what a stranger wrote, so nothing of one job is left for the
  next to find. What the zygote itself holds is public: this program, and the standard library;
- one job at a time; the job's first process is the first of its namespace, so killing it kills all of them;
- the zygote keeps the time: the wall-clock limit, the warden's "end" and the warden's death all end the job.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from shoal.box import kernel, walls
from shoal.box.walls import House, Limits
from shoal.box.wire import receive_frame, send_frame
from shoal.submission.sandbox import count_memory

MAX_MESSAGE_BYTES = 1024
END = b"end"
WALLED = {"walled": True}
"""the first frame that comes out of a cell"""
CHANNEL = 3
_ASIDE = 255
_PROOF = Limits(cpu_s=5, wall_s=10.0, memory_bytes=256 << 20)


@dataclass(frozen=True, slots=True)
class Work:
    """What is done in a cell with its channel and its job."""

    run: Callable[[int, Any], None]
    prepare: Callable[[int, Any], None] | None = None
    """what must be done before the walls are closed"""


def run_zygote(control: int, module: str, *, namespaces: bool = True) -> None:
    """Serve jobs until the warden goes away; `module` has PRELOAD (names to import) and WORKS (works by name)."""
    works = _import_works(module)
    gc.disable()
    walls.leave_user()
    bare = House(namespaced=False, held_bytes=count_memory())
    try:
        refusal, house = "not wanted", _build_house(bare.held_bytes) if namespaces else bare
    except OSError as error:
        refusal, house = error.strerror or str(error), bare
    gc.freeze()  # or every cell would copy what a collection touches
    channel = socket.socket(fileno=control)
    if house.filter is None and not house.namespaced:
        channel.send(json.dumps({"refused": f"namespaces: {refusal}; and no filter of system calls"}).encode())
        return
    if (code := _prove_walls(house)) != 0:
        channel.send(json.dumps({"refused": f"the walls do not hold (code {code})"}).encode())
        return
    channel.send(json.dumps({"ready": "namespaces" if house.namespaced else "calls"}).encode())
    _serve_jobs(channel, house, works)


def _import_works(module: str) -> Mapping[str, Work]:
    found = import_module(module)
    for name in found.PRELOAD:
        import_module(name)
    works: Mapping[str, Work] = found.WORKS
    return works


def _build_house(held_bytes: int) -> House:
    """Walls of the house, as far as this machine permits; returns in the process that is to serve."""
    walls.leave_host()
    if pid := os.fork():
        os.waitpid(pid, 0)
        os._exit(0)
    kernel.die_with_parent()
    pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    walls.empty_root()
    return House(namespaced=True, held_bytes=held_bytes, pids=pids)


def _serve_jobs(channel: socket.socket, house: House, works: Mapping[str, Work]) -> None:
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 1)
        if not message:
            return
        if message == END:
            continue  # the job had ended by itself
        report = _run_job(channel, house, works, json.loads(message), descriptors[0])
        if report is None:
            return
        channel.send(json.dumps(report).encode())


def _run_job(
    control: socket.socket, house: House, works: Mapping[str, Work], job: dict[str, Any], channel: int
) -> dict[str, Any] | None:
    """How a job ended; None if the warden is gone."""
    limits = Limits(**job["limits"])
    pid = _fork_cell(house, lambda: _do_job(house, limits, works[job["work"]], channel))
    os.close(channel)  # or its end would be heard only when the job has ended
    if pid is None:
        return {"lost": "it cannot fork"}
    late, gone = _watch_cell(pid, control, limits.wall_s)
    _, status, usage = os.wait4(pid, 0)
    if gone:
        return None
    return {
        "code": os.waitstatus_to_exitcode(status),
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
        "late": late,
    }


def _watch_cell(pid: int, control: socket.socket, wall_s: float) -> tuple[bool, bool]:
    """Wait until a cell has ended, or end it: (it was late, the warden is gone)."""
    watch, process = select.poll(), os.pidfd_open(pid)
    watch.register(process, select.POLLIN)
    watch.register(control, select.POLLIN)
    late = gone = False
    try:
        ready = [descriptor for descriptor, _ in watch.poll(wall_s * 1000)]
        if process not in ready:
            late = not ready
            gone = not late and not control.recv(MAX_MESSAGE_BYTES)
            signal.pidfd_send_signal(process, signal.SIGKILL)
    finally:
        os.close(process)
    return late, gone


def _fork_cell(house: House, work: Callable[[], None]) -> int | None:
    """A process that does some work in a namespace of processes of its own; None if there can be none."""
    try:
        if house.namespaced:
            kernel.unshare(kernel.NEW_PIDS)
        pid = os.fork()
    except OSError:
        pid = None
    if pid == 0:
        _live_in_cell(house, work)
    if house.namespaced:
        kernel.enter(house.pids)  # or the next cell could have no namespace of its own
    return pid


def _live_in_cell(house: House, work: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        if house.namespaced:
            walls.open_folder()
        work()
        code = 0
    except SystemExit as request:  # a script's own way to end
        code = _read_code(request.code)
    finally:
        os._exit(code)  # whatever was raised: nothing of the zygote may run on in its child


def _read_code(code: object) -> int:
    if code is None:
        return 0
    return code & 255 if isinstance(code, int) else 1


def _do_job(house: House, limits: Limits, work: Work, channel: int) -> None:
    os.dup2(channel, _ASIDE)
    for place in (1, 2):
        os.dup2(0, place)
    os.dup2(_ASIDE, CHANNEL)
    os.closerange(CHANNEL + 1, _ASIDE + 1)
    job = receive_frame(CHANNEL)
    if work.prepare is not None:
        work.prepare(CHANNEL, job)
    walls.close_cell(house, limits)
    send_frame(CHANNEL, WALLED)  # from here on all that arrives is a stranger's
    gc.enable()
    work.run(CHANNEL, job)


def _prove_walls(house: House) -> int:
    """Code of a cell that tries what must not be possible."""

    def try_walls() -> None:
        walls.close_cell(house, _PROOF)
        _try_walls(house)

    pid = _fork_cell(house, try_walls)
    return -1 if pid is None else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _try_walls(house: House) -> None:
    for attempt in (_try_file, _try_socket, os.fork):
        try:
            attempt()
        except OSError:
            continue
        os._exit(2)
    seen = [*Path("/").iterdir(), *Path().iterdir()] if house.namespaced else []
    if house.namespaced and (os.getpid() != 1 or seen != [Path(walls.PRIVATE)]):
        os._exit(3)


def _try_file() -> None:
    os.open(sys.executable, os.O_RDONLY)


def _try_socket() -> None:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
