"""The few calls to Linux that Python does not offer, each raising OSError with its reason. Standard library only."""

import ctypes
import os
import struct
from functools import cache

NEW_MOUNTS, NEW_HOST, NEW_QUEUES = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_PROGRAMS, REMOUNT = 1, 2, 4, 8, 32
RECURSIVE, PRIVATE = 1 << 14, 1 << 18
DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITIES = 0x20080522
"""version 3 of the kernel's structure: two words of 32 for each set"""
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def unshare(flags: int) -> None:
    """Leave what is shared with the process that made us."""
    _check(_libc().unshare(ctypes.c_int(flags)), "unshare")


def enter(namespace: int) -> None:
    """Make our next children in the namespace of an open descriptor."""
    _check(_libc().setns(ctypes.c_int(namespace), ctypes.c_int(0)), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system."""
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    _check(_libc().mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def pivot_here() -> None:
    """Make the working directory the root, and let go of the old one."""
    number = _PIVOT_ROOT[os.uname().machine]
    _check(_libc().syscall(ctypes.c_long(number), b".", b"."), "pivot_root")
    _check(_libc().umount2(b".", ctypes.c_int(DETACH)), "umount2")
    os.chdir("/")


def drop_capabilities() -> None:
    """Have no more rights than any process, in this namespace too."""
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITIES, 0))
    _check(_libc().capset(header, ctypes.create_string_buffer(24)), "capset")


def allow_mapping() -> None:
    """Own our files in /proc again, which a change of user takes away."""
    _prctl(_PR_SET_DUMPABLE, 1)


def die_with_parent() -> None:
    """Be killed when the thread that made us ends."""
    _prctl(_PR_SET_PDEATHSIG, 9)


def refuse_privileges() -> None:
    """Gain no rights by any program."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def load_filter(program: bytes) -> None:
    """Put a filter on our system calls, for good."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer)))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header))


def _prctl(option: int, *arguments: int) -> None:
    padded = (*arguments, 0, 0, 0, 0)[:4]
    _check(_libc().prctl(ctypes.c_int(option), *(ctypes.c_ulong(word) for word in padded)), f"prctl {option}")


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
