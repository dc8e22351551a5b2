"""Ownership of a store's folder: which process uses it, and whose versions are in it.

    store.lock    locked by the process that uses the folder, which writes `<process id> <role>` into it
    store.json    the run and the publisher whose versions these are

Invariants:
- only the lock counts: the kernel releases it when the process ends, however it ends. The contents of the file are read
  only while the lock is taken, and used only for messages and hand-overs;
- `find_owner` takes the lock for an instant, shared with other readers. A process that opens the folder therefore
  retries for a moment before it reports that another process uses it.
"""

import asyncio
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError
from shoal.util.files import open_lock, read_accounts, try_lock, write_atomic, write_owner

LOCK = "store.lock"
WAIT_S = 1.0
"""How long to retry before another process is reported as the owner."""
_RETRY_S = 0.02
_OWNER = re.compile(r"([1-9][0-9]{0,18})(?: ([a-z]{1,16}))?\n?")


@dataclass(frozen=True, slots=True)
class LockOwner:
    """The process that uses a folder; None and an empty role if unknown."""

    process: int | None
    role: str

    def __str__(self) -> str:
        process = "another process" if self.process is None else f"process {self.process}"
        return f"{process} ({self.role})" if self.role else process


def find_owner(folder: Path) -> LockOwner | None:
    """The process that has a folder open as its store, if any."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return None if try_lock(lock, is_shared=True) else _read_owner(lock)
    finally:
        os.close(lock)


async def claim_folder(folder: Path, *, run: str, publisher: str, role: str) -> int:
    """Claim a folder for this process and this run; returns the descriptor of its lock."""
    lock = -1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_lock(folder / LOCK)
        await _take_lock(lock, folder)
        write_owner(lock, role)
        check_owner(folder, run, publisher)
    except BaseException as error:
        if lock >= 0:
            os.close(lock)
        if isinstance(error, OSError):
            text = f"{error.filename or folder}: cannot be used as a store ({error.strerror})"
            raise ConfigError(text) from None
        raise
    return lock


def check_owner(folder: Path, run: str, publisher: str) -> None:
    """Refuse a folder with versions of another run or publisher; an empty one is assigned to this run."""
    path = folder / "store.json"
    wanted = {"format": 1, "run": run, "publisher": publisher}
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        write_atomic(path, json.dumps(wanted).encode() + b"\n")
        return
    except ValueError:
        raise ConfigError(f"{path}: cannot be read; choose another folder") from None
    if found != wanted:
        raise ConfigError(f"{folder}: contains versions of a different run or publisher; choose another folder")


async def _take_lock(lock: int, folder: Path) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WAIT_S
    while not try_lock(lock):
        if loop.time() >= deadline:
            raise ConfigError(f"{folder}: in use by {_read_owner(lock)}; wait for it or choose another folder")
        await asyncio.sleep(_RETRY_S)


def _read_owner(lock: int) -> LockOwner:
    match = _OWNER.fullmatch(read_accounts(lock))
    return LockOwner(None, "") if match is None else LockOwner(int(match[1]), match[2] or "")
