"""What a process takes from itself before it looks at a stranger's file. Nothing here can be undone.

    whole reader  no network (a namespace with nothing in it), first to go when memory is short, no root, no new
                  privileges, killed with its parent
    one file      memory, CPU time, no files written or opened, no processes, and the few system calls that are left

All but the limits is Linux. What a machine does not permit is left out and said: `guards` names what holds.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

NOBODY = 65534
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SECCOMP_MODE_FILTER = 2
_FIRST_TO_GO = "1000"
_BPF_LOAD, _BPF_EQUAL, _BPF_RETURN = 0x20, 0x15, 0x06
_REFUSE, _ALLOW, _KILL = 0x00050001, 0x7FFF0000, 0x80000000
"""refuse: the call returns EPERM"""

CALLS = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "getpid": (39, 172),
    "exit": (60, 93),
    "gettid": (186, 178),
    "futex": (202, 98),
    "clock_gettime": (228, 113),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
}
"""System calls that reading needs, by number on x86-64 and on ARM64."""
_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def close_network() -> bool:
    """Leave the network, first of all: a process with threads may not, where it takes a namespace of users."""
    if sys.platform != "linux":
        return False
    return _call_libc("unshare", _CLONE_NEWNET) or _call_libc("unshare", _CLONE_NEWUSER | _CLONE_NEWNET)


def offer_first() -> bool:
    """Be the one that the kernel ends when memory runs out, with our children, and not who judges by us.

    Anybody may offer itself; but only before a change of user, after which our own files there are not ours.
    """
    try:
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    except OSError:
        return False
    return True


def drop_root() -> bool:
    """Be nobody, if we are root. What is still to be opened must be open to all."""
    if os.geteuid() != 0:
        return True
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:
        return False
    return True


def die_with_parent(parent: int) -> bool:
    """Be killed when the parent's thread that made us ends. Forgotten by a change of user, so called after it."""
    if sys.platform != "linux":
        return False
    done = _call_libc("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)
    return done


def refuse_privileges() -> bool:
    """No program we could start would have more rights than we have."""
    return sys.platform == "linux" and _call_libc("prctl", _PR_SET_NO_NEW_PRIVS, 1)


def set_limits(*, memory_bytes: int, cpu_s: int, held_bytes: int | None = None) -> None:
    """Limits of this process; `memory_bytes` is what it may take beyond `held_bytes`, which is what it has."""
    memory = (count_memory() if held_bytes is None else held_bytes) + memory_bytes
    for kind, soft, hard in (
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),  # at the soft one it is ended by SIGXCPU, which says why
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_NOFILE, 0, 0),
        (resource.RLIMIT_NPROC, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        most = resource.getrlimit(kind)[1]
        most = hard if most == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(kind, (min(soft, most), most))


def filter_calls() -> bool:
    """Refuse all system calls but `CALLS`; False where their numbers are not known or filters not permitted."""
    found = load_filter()
    return found is not None and _call_libc("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(found[0]))


@cache
def load_filter() -> "tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]] | None":
    """The filter as the kernel takes it, header and program; built once, by whoever forks those that need it."""
    arch = _ARCHES.get(platform.machine())
    if sys.platform != "linux" or arch is None or sys.maxsize < 2**32:
        return None
    column, audit = arch
    program = _build_filter(audit, [numbers[column] for numbers in CALLS.values()])
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    return ctypes.create_string_buffer(header), buffer


def _build_filter(audit: int, numbers: Sequence[int]) -> bytes:
    """A BPF program over (number, architecture, ...) of a call."""
    lines = [(_BPF_LOAD, 0, 0, 4), (_BPF_EQUAL, 1, 0, audit), (_BPF_RETURN, 0, 0, _KILL), (_BPF_LOAD, 0, 0, 0)]
    for place, number in enumerate(numbers):
        lines.append((_BPF_EQUAL, len(numbers) - place, 0, number))
    lines += [(_BPF_RETURN, 0, 0, _REFUSE), (_BPF_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def count_memory() -> int:
    """The address space we have, in bytes."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 1 << 30
    return pages * resource.getpagesize()


@cache
def _load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _call_libc(name: str, *arguments: int) -> bool:
    function = getattr(_load_libc(), name)
    return bool(function(*(ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:5])) == 0)
