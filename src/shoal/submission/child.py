"""The process that reads strangers' files, and a child of it for each file.

    reader      leave the network, import, try itself, become nobody -> "ready" -> for each file: fork, wait, report
    its child   limits, filter of system calls -> read, parse -> frame to the parent -> end
    a trial     the same with a file of our own and all the memory taken that a stranger's may take, and no answer

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
EXIT_UNREAD = 3
"""of a child that could not read its file from the disk, which says nothing about the file"""
_READ_BYTES = 1 << 20
_TRIAL_BOUNDS = Bounds(max_rollouts=2, group_size=2, max_tokens=32, vocab_size=100)
_TRIAL_MEMORY_BYTES, _TRIAL_CPU_S = 1 << 28, 10
_TRIAL_ROOM_BYTES = 48 << 20
"""left for reading our own file when all else is taken"""

Parse = Callable[[bytes, Bounds], Columns]


def run_reader(control: int, parent: int, parse: Parse | None = None) -> None:
    """Serve files until the parent closes `control`; `parse` is for tests of how a reader dies."""
    guards = ["network"] if sandbox.close_network() else []  # needs a process without threads, so before the imports
    from shoal.submission.layout import make_sample
    from shoal.submission.parse import parse_submission

    channel, sample = socket.socket(fileno=control), make_sample()
    _warm_up(sample, parse_submission)
    steps = {
        "memory": sandbox.offer_first,
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
    _serve_files(
        channel,
        parse or parse_submission,
        lambda memory_bytes: _try_room(memory_bytes, sample, parse_submission),
        filtered="calls" in guards,
    )


def _serve_files(channel: socket.socket, parse: Parse, try_room: Callable[[int], None], *, filtered: bool) -> None:
    held_bytes = sandbox.count_memory()  # a child's is that of its reader, which takes no more from here on
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MAX_JOB_BYTES, 2)
        if not message:
            return
        file, answer = descriptors

        def do_job(message: bytes = message, file: int = file, answer: int = answer) -> None:
            channel.close()
            job = json.loads(message)
            limits = {name: job.pop(name) for name in ("memory_bytes", "cpu_s")}
            _limit_child(**limits, held_bytes=held_bytes, filtered=filtered)
            if job.pop("trial"):
                try_room(limits["memory_bytes"])
            else:
                _read_file(Bounds(**job), file, answer, parse)

        code = _run_child(do_job)
        os.close(file)
        os.close(answer)
        channel.sendall(json.dumps({"code": code}).encode() + b"\n")


def _limit_child(*, memory_bytes: int, cpu_s: int, held_bytes: int | None = None, filtered: bool) -> None:
    sandbox.set_limits(memory_bytes=memory_bytes, cpu_s=cpu_s, held_bytes=held_bytes)
    if filtered and not sandbox.filter_calls():
        os._exit(1)


def _read_file(bounds: Bounds, file: int, answer: int, parse: Parse) -> None:
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
        _limit_child(memory_bytes=_TRIAL_MEMORY_BYTES, cpu_s=_TRIAL_CPU_S, filtered=True)
        encode_columns(parse(sample, _TRIAL_BOUNDS))

    return _run_child(read_sample) == 0


def _try_room(memory_bytes: int, sample: bytes, parse: Parse) -> None:
    """Read our own file while we hold what a stranger's could have taken: where that fails, this machine is short."""
    block = bytearray(memory_bytes - _TRIAL_ROOM_BYTES)  # promised by the kernel, and not touched
    encode_columns(parse(sample, _TRIAL_BOUNDS))
    del block


def _read_all(file: int, most: int) -> bytes:
    pieces, total = [], 0
    while piece := _read_piece(file, total):
        total += len(piece)
        if total > most:
            raise FormError(f"more than {most} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def _read_piece(file: int, start: int) -> bytes:
    try:
        return os.pread(file, _READ_BYTES, start)
    except OSError:
        os._exit(EXIT_UNREAD)
