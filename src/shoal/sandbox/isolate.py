"""The privileges that a process drops before it works on untrusted input. Nothing here can be undone. Standard library
only.

    fork server   once: a different user, its own namespaces (users, processes, network, mounts, queues, host name), and
                  an empty read-only file system as root
    job           limits of memory, CPU time and descriptors, no capabilities, no privileges, only the system calls of
                  its profile; with `has_files` also its own processes and mounts, and a private folder in memory

If namespaces are not permitted, a job has the limits and the filter of system calls. If the filter is not possible
either, it has only the limits, and a profile that requires more runs nothing.
"""

import math
import os
import resource
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.sandbox import linux
from shoal.sandbox.seccomp import COMPUTE, FILES, READ, Calls, build_filter

PRIVATE = "/private"
FOLDER_BYTES = 16 << 20
_MAX_FILES = 64
_MAX_THREADS = 1024
_STACK_BYTES = 8 << 20
_PLAIN = linux.NO_SUID | linux.NO_DEVICES | linux.NO_PROGRAMS
_ALL_NEW = linux.NEW_USER | linux.NEW_PIDS | linux.NEW_NETWORK | linux.NEW_MOUNTS | linux.NEW_QUEUES | linux.NEW_HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one job; CPU time and memory are usually reached first."""

    cpu_s: float
    """a limit in fractions of a second holds for jobs without files only"""
    wall_s: float
    memory_bytes: int
    """in addition to what its fork server holds"""
    output_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The permissions of a fork server's programs."""

    calls: Calls
    """allowed system calls within namespaces"""
    bare_calls: Calls
    """allowed system calls if namespaces are not permitted"""
    has_files: bool
    """a private folder for writing files; otherwise no descriptor can be opened at all"""
    required: bool
    """whether namespaces or a filter are required to run anything"""


RUN_CODE = Profile(calls=FILES, bare_calls=COMPUTE, has_files=True, required=True)
PARSE_FILE = Profile(calls=READ, bare_calls=READ, has_files=False, required=False)


@dataclass(frozen=True, slots=True)
class Isolation:
    """The isolation of all jobs of a fork server."""

    profile: Profile
    held_bytes: int
    """address space of the fork server"""
    pids: int | None = None
    """descriptor of the fork server's own PID namespace; None if there are no namespaces"""
    filter: bytes | None = None

    @property
    def name(self) -> str:
        """The strongest part: `namespaces`, `calls` or `limits`."""
        return "namespaces" if self.pids is not None else "calls" if self.filter is not None else "limits"

    @property
    def is_sufficient(self) -> bool:
        return self.name != "limits" or not self.profile.required

    @property
    def has_folder(self) -> bool:
        return self.pids is not None and self.profile.has_files


def isolate_server(profile: Profile, *, namespaces: bool) -> tuple[Isolation, str]:
    """Isolate the fork server as far as this machine permits.

    Returns in the process that is to serve, with the reason if there are no namespaces.
    """
    held_bytes = linux.count_memory()
    leave_user()
    try:
        if not namespaces:
            raise OSError("not requested")
        leave_host()
        pids = empty_root()
        if not profile.has_files:  # otherwise each job needs them to mount its folder
            linux.drop_capabilities()
        return Isolation(profile, held_bytes, pids, build_filter(profile.calls)), ""
    except OSError as error:
        if namespaces:
            with suppress(OSError):
                linux.unshare(linux.NEW_USER | linux.NEW_NETWORK)
        return Isolation(profile, held_bytes, None, build_filter(profile.bare_calls)), error.strerror or str(error)


def leave_user() -> None:
    """Switch to the user nobody if we are root: the owner of a namespace has the rights of its user outside of it."""
    linux.prefer_oom_kill()
    if os.geteuid() == 0:
        with suppress(OSError):
            linux.unshare(linux.NEW_NETWORK)  # root may do this even if user namespaces are not permitted
        linux.drop_root()
        with suppress(OSError):
            linux.own_proc_files()


def leave_host() -> None:
    """Enter new namespaces of every kind; returns in a child, the first process of its PID namespace."""
    user, group = os.geteuid(), os.getegid()
    linux.unshare(_ALL_NEW)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{linux.NOBODY} {user} 1"),
        ("gid_map", f"{linux.NOBODY} {group} 1"),
    ):
        Path(f"/proc/self/{name}").write_text(text)
    parent = os.getpid()
    if pid := os.fork():
        os.waitpid(pid, 0)
        os._exit(0)
    linux.die_with_parent(parent)


def empty_root() -> int:
    """Mount an empty folder over the whole file system; returns a descriptor of the PID namespace."""
    pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    linux.mount("none", "/", None, linux.RECURSIVE | linux.PRIVATE)
    linux.mount("none", "/tmp", "tmpfs", _PLAIN, "size=64k,nr_inodes=16,mode=755")
    os.chdir("/tmp")
    Path(PRIVATE[1:]).mkdir(0o700)
    linux.pivot_root_here()
    linux.mount("none", "/", None, linux.REMOUNT | linux.READ_ONLY | _PLAIN, "size=64k,nr_inodes=16,mode=755")
    return pids


def fork_job(isolation: Isolation) -> int | None:
    """Fork a process for a job, with `has_files` in its own PID namespace; None if that is not possible."""
    server = os.getpid()
    try:
        if isolation.has_folder:
            linux.unshare(linux.NEW_PIDS)
        pid = os.fork()
    except OSError:
        pid = None
    if pid == 0:
        with suppress(OSError):
            linux.die_with_parent(server)
        return 0
    if isolation.has_folder:
        assert isolation.pids is not None
        linux.enter_namespace(isolation.pids)  # otherwise the next job could not get its own namespace
    return pid


def isolate_job(isolation: Isolation, limits: SandboxLimits) -> None:
    """Drop all remaining privileges of a job."""
    if isolation.has_folder:
        linux.unshare(linux.NEW_MOUNTS | linux.NEW_QUEUES)
        linux.mount("none", PRIVATE, "tmpfs", _PLAIN, f"size={FOLDER_BYTES},nr_inodes=1024,mode=700")
        os.chdir(PRIVATE)
    _set_limits(isolation, limits)
    try:
        linux.refuse_privileges()
    except OSError:
        if isolation.filter is not None:
            raise
    if isolation.has_folder:
        linux.drop_capabilities()
    if isolation.filter is not None:
        linux.load_filter(isolation.filter)
    elif not isolation.is_sufficient:
        raise OSError("system call filters are not available on this machine")


def _set_limits(isolation: Isolation, limits: SandboxLimits) -> None:
    has_files, cpu_s = isolation.profile.has_files, math.ceil(limits.cpu_s)
    for kind, most in (
        (resource.RLIMIT_AS, isolation.held_bytes + limits.memory_bytes),
        (resource.RLIMIT_CPU, cpu_s + (not has_files)),  # the kernel kills without asking a handler
        (resource.RLIMIT_FSIZE, FOLDER_BYTES if isolation.has_folder else 0),
        (resource.RLIMIT_NOFILE, _MAX_FILES if isolation.has_folder else 4 if has_files else 0),
        (resource.RLIMIT_NPROC, _MAX_THREADS if has_files else 0),
        (resource.RLIMIT_STACK, _STACK_BYTES),  # otherwise the depth of a recursion would differ between machines
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (getattr(resource, "RLIMIT_MSGQUEUE", resource.RLIMIT_CORE), 0),  # only Linux has it
    ):
        allowed = resource.getrlimit(kind)[1]
        limit = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(kind, (limit, limit))
    if not has_files:  # SIGXCPU before SIGKILL shows why a job ended; the first process of a namespace ignores it
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (min(cpu_s, most), most))
        if limits.cpu_s < cpu_s:  # the kernel's limit has whole seconds; this one ends by SIGPROF
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
