"""System calls that Python does not offer. Each raises OSError with its reason. Standard library only."""

import ctypes
import os
import resource
import signal
import struct
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

NOBODY = 65534
NEW_MOUNTS, NEW_HOST, NEW_QUEUES = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_PROGRAMS, REMOUNT = 1, 2, 4, 8, 32
RECURSIVE, PRIVATE = 1 << 14, 1 << 18
_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITIES = 0x20080522
"""version 3 of the kernel's structure: two 32-bit words per set"""
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_UNKNOWN_MEMORY_BYTES = 1 << 30
_ADDR_NO_RANDOMIZE, _ASK_PERSONALITY = 0x0040000, 0xFFFFFFFF


def unshare(flags: int) -> None:
    """Move this process, or its next children, into new namespaces."""
    _call("unshare", ctypes.c_int(flags))


def enter_namespace(descriptor: int) -> None:
    """Create the next children in the namespace of an open descriptor."""
    _call("setns", ctypes.c_int(descriptor), ctypes.c_int(0))


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system."""
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    _call("mount", words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])


def pivot_root_here() -> None:
    """Make the working directory the root, and detach the old root."""
    _call("syscall", ctypes.c_long(_PIVOT_ROOT[os.uname().machine]), b".", b".")
    _call("umount2", b".", ctypes.c_int(_DETACH))
    os.chdir("/")


def drop_root() -> None:
    """Switch to the user nobody if we are root. Files opened later must be readable by everybody."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def drop_capabilities() -> None:
    """Drop all capabilities, also within this user namespace."""
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITIES, 0))
    _call("capset", header, ctypes.create_string_buffer(24))


def own_proc_files() -> None:
    """Own our files in /proc again, after a change of user took them away."""
    _prctl(_PR_SET_DUMPABLE, 1)


def prefer_oom_kill() -> None:
    """Make this the first process that the kernel kills when memory runs out. Call it before a change of user."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def adopt_orphans(is_wanted: bool) -> None:
    """Set whether orphaned descendants become our children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(is_wanted))


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Get a signal when the thread that forked us ends. A change of user resets this, so call it afterwards."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() not in (parent, 0):  # it ended before we asked; 0 is a parent outside of our namespace
        os._exit(1)


def refuse_privileges() -> None:
    """Prevent gaining privileges by executing a program."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def load_filter(program: bytes) -> None:
    """Filter our system calls from now on."""
    header, _ = wrap_filter(program)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))


@cache
def wrap_filter(program: bytes) -> "tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]":
    """Wrap a filter as the kernel expects it, header and program. Built once, before forking."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    return ctypes.create_string_buffer(header), buffer


def fix_addresses() -> None:
    """Start this program again without address randomisation; returns where that is done or not permitted."""
    if sys.platform != "linux":
        return
    personality = load_libc().personality
    current = personality(ctypes.c_ulong(_ASK_PERSONALITY))
    if current < 0 or current & _ADDR_NO_RANDOMIZE or personality(ctypes.c_ulong(current | _ADDR_NO_RANDOMIZE)) < 0:
        return
    os.execv(sys.executable, sys.orig_argv)


def count_memory() -> int:
    """Our address space in bytes."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return _UNKNOWN_MEMORY_BYTES
    return pages * resource.getpagesize()


def _prctl(option: int, *arguments: int) -> None:
    _call("prctl", ctypes.c_int(option), *(ctypes.c_ulong(word) for word in (*arguments, 0, 0, 0, 0)[:4]))


def _call(name: str, *arguments: object) -> None:
    if sys.platform != "linux":
        raise OSError(f"{name}: available on Linux only")
    if getattr(load_libc(), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@cache
def load_libc() -> ctypes.CDLL:
    """The C library of this process."""
    return ctypes.CDLL(None, use_errno=True)
