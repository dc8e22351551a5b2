"""The system calls that a job may make, as a filter program; all others fail with EPERM.

    READ      what parsing an open file needs: no file can be opened, no thread or process created, nothing sent
    COMPUTE   what running Python needs once everything is imported: READ, and clocks, sleep, threads
    FILES     COMPUTE, and files, for a process whose file system is empty except for its private folder

No table allows a new process.
"""

import platform
import struct
import sys
from collections.abc import Mapping

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _KILL, _REFUSE, _ABSENT = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
"""refuse: EPERM; absent: ENOSYS, after which the C library tries the older call"""
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_THREAD = 0x00010000
_CLONE3 = (435, 435)
_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

Calls = Mapping[str, tuple[int | None, int | None]]
"""numbers on x86-64 and on ARM64, by name"""


def _read_table(text: str) -> Calls:
    """`name x86-64 arm64; ...`, with `-` where an architecture does not have the call."""
    rows = (row.split() for row in text.split(";"))
    return {name: (int(first), None if second == "-" else int(second)) for name, first, second in rows}


_READ = """
read 0 63; write 1 64; close 3 57; fstat 5 80; lseek 8 62; mmap 9 222; mprotect 10 226; munmap 11 215;
brk 12 214; rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139; pread64 17 67; sched_yield 24 124;
mremap 25 216; madvise 28 233; getpid 39 172; exit 60 93; gettid 186 178; futex 202 98; clock_gettime 228 113;
exit_group 231 94; getrandom 318 278
"""
_COMPUTE = """
nanosleep 35 101; uname 63 160; gettimeofday 96 169; getrusage 98 165; times 100 153; getuid 102 174;
getgid 104 176; geteuid 107 175; getegid 108 177; sigaltstack 131 132; sched_getaffinity 204 123;
clock_getres 229 114; clock_nanosleep 230 115; set_robust_list 273 99; rseq 334 293; clone 56 220
"""
_FILES = """
open 2 -; stat 4 -; lstat 6 -; poll 7 -; pwrite64 18 68; readv 19 65; writev 20 66; access 21 -; pipe 22 -; select 23 -;
dup 32 23; dup2 33 -; fcntl 72 25; ftruncate 77 46; getcwd 79 17; chdir 80 49; rename 82 -; mkdir 83 -; rmdir 84 -;
unlink 87 -; readlink 89 -; umask 95 166; getdents64 217 61; openat 257 56; mkdirat 258 34; newfstatat 262 79;
unlinkat 263 35; renameat 264 38; readlinkat 267 78; faccessat 269 48; pselect6 270 72; ppoll 271 73; dup3 292 24;
pipe2 293 59; prlimit64 302 261; renameat2 316 276; statx 332 291; faccessat2 439 439
"""
READ = _read_table(_READ)
COMPUTE = {**READ, **_read_table(_COMPUTE)}
"""`clone` for threads only: see build_filter"""
FILES = {**COMPUTE, **_read_table(_FILES)}


def build_filter(calls: Calls) -> bytes | None:
    """Build a BPF program that allows these calls; None if their numbers are not known."""
    arch = _ARCHES.get(platform.machine())
    if sys.platform != "linux" or arch is None or sys.maxsize < 2**32:
        return None
    column, audit = arch
    numbers = [pair[column] for name, pair in calls.items() if pair[column] is not None and name != "clone"]
    lines: list[tuple[int, int, int, int | None]] = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_EQUAL, 0, 1, _CLONE3[column]),
        (_RETURN, 0, 0, _ABSENT),  # its flags are in memory, which a filter cannot read
    ]
    if "clone" in calls:
        lines += [
            (_EQUAL, 0, 4, calls["clone"][column]),
            (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
            (_ANY_BIT, 0, 1, _THREAD),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _REFUSE),
        ]
    lines += [(_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    lines += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
