"""Who has a store's folder, and whose versions are in it.

    store.lock    locked by the process that has the folder, which writes `<process id> <role>` into it
    store.json    the run and the publisher whose versions these are

Invariants:
- the lock is what counts: the kernel gives it up when the process ends, however it ends. What the file says is read
  only while somebody has the lock, and believed for messages and hand-overs alone;
- whoever only looks (`find_owner`) has the lock for an instant, shared with others who look. Whoever opens the folder
  therefore tries for a moment before it believes that another process has it.
"""

import asyncio
import fcntl
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError
from shoal.files import write_atomic

LOCK = "store.lock"
WAIT_S = 1.0
"""How long a lock may be taken before another process is said to have it."""
_RETRY_S = 0.02
_OWNER = re.compile(r"([1-9][0-9]{0,18})(?: ([a-z]{1,16}))?\n?")


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that has a folder; None and the empty role where it does not say."""

    process: int | None
    role: str

    def __str__(self) -> str:
        process = "another process" if self.process is None else f"process {self.process}"
        return f"{process} ({self.role})" if self.role else process


def find_owner(folder: Path) -> Owner | None:
    """Who has a folder open as its store; None: nobody has."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_owner(lock)
    finally:
        os.close(lock)
    return None


async def claim_folder(folder: Path, *, run: str, publisher: str, role: str) -> int:
    """Make a folder this process's own and this run's; the descriptor of its lock."""
    lock = -1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        await _take_lock(lock, folder)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} {role}".rstrip().encode() + b"\n", 0)
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
    """Refuse a folder that holds versions of another run or publisher; one that holds none becomes theirs."""
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
        raise ConfigError(f"{folder}: holds versions of another run or publisher; choose another folder")


async def _take_lock(lock: int, folder: Path) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if loop.time() >= deadline:
                text = f"{folder}: in use by {_read_owner(lock)}; wait for it or choose another folder"
                raise ConfigError(text) from None
        await asyncio.sleep(_RETRY_S)


def _read_owner(lock: int) -> Owner:
    match = _OWNER.fullmatch(os.pread(lock, 64, 0).decode(errors="replace"))
    return Owner(None, "") if match is None else Owner(int(match[1]), match[2] or "")
