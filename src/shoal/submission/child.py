"""The process that reads strangers' files, and a child of it for each file.

    reader      leave the network, import, try itself, become nobody -> "ready" -> for each file: fork, wait, report
    its child   limits, filter of system calls -> read, parse -> frame to the parent -> end

Invariants:
- the reader itself never looks at a byte of a file: what a file does to the process that reads it ends with that
  process, and no later file is read by it. A fork is cheap where an import is not;
- a file's child holds /dev/null as 0, 1 and 2, the file, and the way its answer goes; no other descriptor;
- nothing that reading does not need is imported here, torch least of all.
"""

import gc
import json
import os
import socket
from collections.abc import Callable

from shoal.submission import sandbox
from shoal.submission.bounds import Bounds, FormError
from shoal.submission.frame import Columns, encode_columns, encode_error

MAX_JOB_BYTES = 1024
_READ_BYTES = 1 << 20
_TRIAL_BOUNDS = Bounds(max_rollouts=2, group_size=2, max_tokens=32, vocab_size=100)
_TRIAL_MEMORY_BYTES, _TRIAL_CPU_S = 1 << 28, 10

Parse = Callable[[bytes, Bounds], Columns]


def run_reader(control: int, parent: int, parse: Parse | None = None) -> None:
    """Serve files until the parent closes `control`; `parse` is for tests of how a reader dies."""
    guards = ["network"] if sandbox.close_network() else []  # needs a process without threads, so before the imports
    from shoal.submission.layout import make_sample
    from shoal.submission.parse import parse_submission

    channel, sample = socket.socket(fileno=control), make_sample()
    _warm_up(sample, parse_submission)
    steps = {
        "user": sandbox.drop_root,
        "parent": lambda: sandbox.die_with_parent(parent),
        "privileges": sandbox.refuse_privileges,
        "calls": lambda: _can_filter(sample, parse_submission),
    }
    guards += [name for name, step in steps.items() if step()]
    os.dup2(0, 2)  # until here it may say why it cannot start
    sandbox.load_filter()
    gc.disable()
    gc.freeze()  # or every child would copy what a collection touches, and a page that is copied costs microseconds
    channel.sendall(json.dumps({"guards": guards}).encode() + b"\n")
    _serve_files(channel, parse or parse_submission, filtered="calls" in guards)


def _serve_files(channel: socket.socket, parse: Parse, *, filtered: bool) -> None:
    held_bytes = sandbox.count_memory()  # a child's is that of its reader, which takes no more from here on
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MAX_JOB_BYTES, 2)
        if not message:
            return
        file, answer = descriptors

        def read_file(message: bytes = message, file: int = file, answer: int = answer) -> None:
            channel.close()
            _read_file(json.loads(message) | {"held_bytes": held_bytes}, file, answer, parse, filtered)

        code = _run_child(read_file)
        os.close(file)
        os.close(answer)
        channel.sendall(json.dumps({"code": code}).encode() + b"\n")


def _read_file(job: dict[str, int], file: int, answer: int, parse: Parse, filtered: bool) -> None:
    limits = {name: job.pop(name) for name in ("memory_bytes", "cpu_s", "held_bytes")}
    bounds = Bounds(**job)
    sandbox.set_limits(**limits)
    if filtered and not sandbox.filter_calls():
        os._exit(1)
    try:
        pieces = encode_columns(parse(_read_all(file, bounds.file_bytes), bounds))
    except FormError as error:
        pieces = encode_error(str(error))
    for piece in pieces:
        view = memoryview(piece)
        while view:
            view = view[os.write(answer, view) :]


def _run_child(work: Callable[[], None]) -> int | None:
    """Exit code of a child that does some work, minus the number of the signal that ended it, or None: no fork."""
    reader = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        return None
    if pid == 0:
        code = 1
        try:
            sandbox.die_with_parent(reader)
            work()
            code = 0
        finally:
            os._exit(code)  # whatever was raised: nothing of the reader may run on in its child
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _warm_up(sample: bytes, parse: Parse) -> None:
    """Import what is imported at first use: a file's child can open nothing."""
    encode_columns(parse(sample, _TRIAL_BOUNDS))
    for broken in (sample[:-1], sample[:40] + sample[60:]):
        try:
            parse(broken, _TRIAL_BOUNDS)
        except FormError as error:
            encode_error(str(error))


def _can_filter(sample: bytes, parse: Parse) -> bool:
    """Whether reading works with the filter on: another C library may need another call."""

    def read_sample() -> None:
        sandbox.set_limits(memory_bytes=_TRIAL_MEMORY_BYTES, cpu_s=_TRIAL_CPU_S)
        if not sandbox.filter_calls():
            os._exit(1)
        encode_columns(parse(sample, _TRIAL_BOUNDS))

    return _run_child(read_sample) == 0


def _read_all(file: int, most: int) -> bytes:
    pieces, total = [], 0
    while piece := os.pread(file, _READ_BYTES, total):
        total += len(piece)
        if total > most:
            raise FormError(f"more than {most} bytes")
        pieces.append(piece)
    return b"".join(pieces)
