"""Walls around a box: what a process leaves behind before it does work that nobody trusts. Standard library only.

    house   once: another user, namespaces of its own (users, processes, network, mounts, queues, host name), and an
            empty read-only file system for a root
    cell    for each piece of work: processes and mounts of its own, a private folder in memory, limits, no rights,
            and the system calls of `calls`

Where namespaces are not permitted, a cell has the limits and the strict filter, which opens no file at all, not even
its own: whatever work may import is imported before. Where the filter is not possible either, nothing is run.
"""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from shoal.box import kernel
from shoal.box.calls import ROOMY, STRICT, build_filter
from shoal.submission import sandbox

PRIVATE = "/private"
FOLDER_BYTES = 16 << 20
_MAX_FILES = 64
_MAX_THREADS = 1024
_STACK_BYTES = 8 << 20
_PLAIN = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_PROGRAMS
_HOUSE = (
    kernel.NEW_USER | kernel.NEW_PIDS | kernel.NEW_NETWORK | kernel.NEW_MOUNTS | kernel.NEW_QUEUES | kernel.NEW_HOST
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one piece of work may take; CPU time and memory are the ones it meets first."""

    cpu_s: int
    wall_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class House:
    """What the walls of all cells are made of."""

    namespaced: bool
    held_bytes: int
    """address space of the process that the cells are forked from"""
    pids: int = -1
    """descriptor of the house's own namespace of processes"""

    @property
    def filter(self) -> bytes | None:
        return build_filter(ROOMY if self.namespaced else STRICT)


def leave_user() -> None:
    """Be nobody, if we are root: the owner of a namespace has the rights of its user outside of it. And be the first
    that the kernel ends when memory runs out, rather than who judges by us."""
    sandbox.offer_first()
    if os.geteuid() == 0 and sandbox.drop_root():
        kernel.allow_mapping()


def leave_host() -> None:
    """Take new namespaces of every kind; the next child is the first process of its own."""
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(_HOUSE)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{sandbox.NOBODY} {user} 1"),
        ("gid_map", f"{sandbox.NOBODY} {group} 1"),
    ):
        descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(descriptor, text.encode())
        os.close(descriptor)


def empty_root() -> None:
    """Stand in a file system with nothing in it but a folder to mount on."""
    kernel.mount("none", "/", None, kernel.RECURSIVE | kernel.PRIVATE)
    kernel.mount("none", "/tmp", "tmpfs", _PLAIN, "size=64k,nr_inodes=16,mode=755")
    os.chdir("/tmp")
    Path(PRIVATE[1:]).mkdir(0o700)
    kernel.pivot_here()
    kernel.mount("none", "/", None, kernel.REMOUNT | kernel.READ_ONLY | _PLAIN, "size=64k,nr_inodes=16,mode=755")


def open_folder() -> None:
    """Take mounts of our own and stand in an empty private folder, which ends with us."""
    kernel.unshare(kernel.NEW_MOUNTS | kernel.NEW_QUEUES)
    kernel.mount("none", PRIVATE, "tmpfs", _PLAIN, f"size={FOLDER_BYTES},nr_inodes=1024,mode=700")
    os.chdir(PRIVATE)


def close_cell(house: House, limits: Limits) -> None:
    """Take away all that is left to take; nothing of it can be undone."""
    memory = house.held_bytes + limits.memory_bytes
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, limits.cpu_s),  # soft is hard: the kernel kills, and no handler is asked
        (resource.RLIMIT_FSIZE, FOLDER_BYTES if house.namespaced else 0),
        (resource.RLIMIT_NOFILE, _MAX_FILES if house.namespaced else 4),
        (resource.RLIMIT_NPROC, _MAX_THREADS),
        (resource.RLIMIT_STACK, _STACK_BYTES),  # or how deep a recursion goes would differ from machine to machine
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        allowed = resource.getrlimit(kind)[1]
        limit = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(kind, (limit, limit))
    kernel.refuse_privileges()
    if house.namespaced:
        kernel.drop_capabilities()
    if (program := house.filter) is not None:
        kernel.load_filter(program)
    elif not house.namespaced:
        raise OSError("no filter of system calls is possible here")
