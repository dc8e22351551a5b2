"""The system calls that boxed work may make, as a filter program; all others are refused with EPERM.

`STRICT` is what running Python needs once everything is imported: no file can be opened, no process made, nothing sent.
`ROOMY` adds files, for a process whose file system is empty but for its private folder. In both a new thread is
allowed, a new process is not.
"""

import platform
import struct
import sys

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _KILL, _REFUSE, _ABSENT = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
"""refuse: EPERM; absent: ENOSYS, after which the C library tries the older call"""
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_THREAD = 0x00010000
_CLONE, _CLONE3 = (56, 220), (435, 435)
_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

STRICT: dict[str, tuple[int | None, int | None]] = {
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
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "exit": (60, 93),
    "uname": (63, 160),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "times": (100, 153),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "set_robust_list": (273, 99),
    "getrandom": (318, 278),
    "rseq": (334, 293),
}
"""By number on x86-64 and on ARM64."""

ROOMY: dict[str, tuple[int | None, int | None]] = STRICT | {
    "open": (2, None),
    "stat": (4, None),
    "lstat": (6, None),
    "poll": (7, None),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, None),
    "pipe": (22, None),
    "select": (23, None),
    "dup": (32, 23),
    "dup2": (33, None),
    "fcntl": (72, 25),
    "ftruncate": (77, 46),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "rename": (82, None),
    "mkdir": (83, None),
    "rmdir": (84, None),
    "unlink": (87, None),
    "readlink": (89, None),
    "umask": (95, 166),
    "getdents64": (217, 61),
    "openat": (257, 56),
    "mkdirat": (258, 34),
    "newfstatat": (262, 79),
    "unlinkat": (263, 35),
    "renameat": (264, 38),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "dup3": (292, 24),
    "pipe2": (293, 59),
    "prlimit64": (302, 261),
    "renameat2": (316, 276),
    "statx": (332, 291),
    "faccessat2": (439, 439),
}


def build_filter(calls: dict[str, tuple[int | None, int | None]]) -> bytes | None:
    """A BPF program that allows these; None where their numbers are not known."""
    arch = _ARCHES.get(platform.machine())
    if sys.platform != "linux" or arch is None or sys.maxsize < 2**32:
        return None
    column, audit = arch
    numbers = [pair[column] for pair in calls.values() if pair[column] is not None]
    lines: list[tuple[int, int, int, int | None]] = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_EQUAL, 0, 1, _CLONE3[column]),
        (_RETURN, 0, 0, _ABSENT),  # its flags are in memory, which a filter cannot read
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_ANY_BIT, 0, 1, _THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    lines += [(_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    lines += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
