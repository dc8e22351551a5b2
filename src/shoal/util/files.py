"""Writing files so that kill -9 and power loss cannot leave them half-written.

Invariants:
- a file or folder appears under its name only when complete: temporary name, fsync, rename, fsync of the parent;
- temporary names begin with a dot and contain the writer's process id and a random token (in a container every start
  has the same id), so leftovers of a dead writer can be distinguished from what a live one is writing;
- a line of a JSONL file counts only with its newline; `repair_jsonl` removes an incomplete last line.

One writer per path at a time. Readers need no lock. Exclusive locks are flocks on separate files, which name their
owner for processes that find them taken. The kernel releases a lock when its process ends, however that happens.
"""

import contextlib
import fcntl
import hashlib
import itertools
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from shoal.errors import ConfigError

LATEST = "latest"
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>new|old)-(?P<pid>\d+)-(?P<token>[0-9a-f]{8})-\d+")
_token = [uuid.uuid4().hex[:8]]
"""token of this process, because process ids are reused; a fork gets its own"""
os.register_at_fork(after_in_child=lambda: _token.__setitem__(0, uuid.uuid4().hex[:8]))
_numbers = itertools.count()
_BLOCK_BYTES = 1 << 16


def write_atomic(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file so that readers see either the old or the new content, never a mixture.

    Without `sync` this holds for a kill, but not for a power cut. It then does not wait for other data on its way to
    the disk.
    """
    temporary = _hidden_path(path, "new")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_path(path.parent)


def check_output(path: Path) -> None:
    """Raise ConfigError if an output file named by the user cannot be written; called before the work starts."""
    if path.is_dir():
        raise ConfigError(f"{path}: cannot be written, it is a folder")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: cannot be written, there is no folder {path.parent}")


def write_output(path: Path, data: bytes) -> None:
    """Write a file named by the user: follows links, and writes into a pipe or device instead of replacing it."""
    target = path.resolve()
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            write_atomic(target, data)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


@contextlib.contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """A folder to fill, which appears as `path` when the block ends, or not at all if the block raises.

    An existing folder is replaced. Between the two renames that this takes, neither is visible. If the process dies
    there, `sweep_leftovers`, which every start of a run calls, restores the old one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep_leftovers(path.parent)
    temporary = _hidden_path(path, "new")
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary)
        _swap_dir(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_path(path.parent)


def remove_dir(path: Path) -> None:
    """Remove a folder so that it is never visible half-removed."""
    temporary = _hidden_path(path, "new")
    path.rename(temporary)
    shutil.rmtree(temporary)


def sweep_leftovers(folder: Path) -> None:
    """Remove what dead writers left in a folder, and restore what they had moved aside to replace."""
    for entry in sorted(folder.iterdir()):
        match = _HIDDEN.fullmatch(entry.name)
        if match is None or _is_alive(int(match["pid"]), match["token"]):
            continue
        target = folder / match["name"]
        if match["kind"] == "old" and not target.exists():
            entry.rename(target)
        elif entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)  # another run that starts now may sweep the same folder


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content in hex, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_dir(folder: Path) -> str:
    """SHA-256 in hex over the names and contents of the files directly in a folder."""
    lines = [f"{hash_file(path)}  {path.name}\n" for path in sorted(folder.iterdir()) if path.is_file()]
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def append_line(path: Path, text: str) -> None:
    """Append one line and fsync, or nothing. Call `repair_jsonl` once before the first append of a process."""
    append_lines(path, [text])


def append_lines(path: Path, texts: Iterable[str]) -> None:
    """Append lines and fsync once, or nothing; a kill may leave only some of them."""
    lines = [f"{text}\n" for text in texts]
    assert not any("\n" in line[:-1] for line in lines), "a line must not contain a line break"
    data = memoryview("".join(lines).encode())
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    size = os.fstat(descriptor).st_size
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)  # after a full disk the caller appends the line again
        raise
    finally:
        os.close(descriptor)


def repair_jsonl(path: Path) -> int:
    """Cut off an incomplete last line, if there is one, and return the number of bytes removed."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        complete = _complete_bytes(file, size)
        if complete < size:
            file.truncate(complete)
            os.fsync(file.fileno())
    return size - complete


def check_latest(target: Path) -> None:
    """Raise ConfigError if `latest` next to a run directory exists and is not a link."""
    link = target.parent / LATEST
    if link.exists() and not link.is_symlink():
        raise ConfigError(f"{link}: must be a link to the newest run, but is something else; move it away")


def link_latest(target: Path) -> None:
    """Point the link `latest` next to a run directory at it; relative, so that the whole folder can be moved."""
    check_latest(target)
    link = target.parent / LATEST
    sweep_leftovers(target.parent)
    temporary = _hidden_path(link, "new")
    temporary.symlink_to(target.name, target_is_directory=True)
    temporary.replace(link)


def sync_path(path: Path) -> None:
    """Sync a file's bytes, or the names in a folder, to disk: a rename is durable only once its folder is synced."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync everything in a folder to disk."""
    for parent, _, names in os.walk(folder):
        for name in (*names, ""):  # the folder itself last
            sync_path(Path(parent) / name)


LOCK_NAME = ".lock"
"""of a directory that one process at a time may use"""


def open_lock(path: Path, mode: int = 0o644) -> int:
    """Open a lock file, creating it if necessary; closing the descriptor releases the lock."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)


def try_lock(descriptor: int, *, is_shared: bool = False) -> bool:
    """Take the lock; False if another process holds it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_same_file(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at a path: another process may have moved or removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def write_owner(descriptor: int, role: str = "") -> None:
    """Write this process and its role into a lock file that it holds."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()} {role}".rstrip().encode() + b"\n", 0)


def read_accounts(descriptor: int) -> str:
    """The owner recorded in a lock file: process and role, or "unknown"."""
    return os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"


def _hidden_path(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{os.getpid()}-{_token[0]}-{next(_numbers)}")


def _swap_dir(temporary: Path, path: Path) -> None:
    if not path.exists():
        temporary.rename(path)
        return
    aside = _hidden_path(path, "old")
    path.rename(aside)
    try:
        temporary.rename(path)
    except BaseException:
        aside.rename(path)
        raise
    shutil.rmtree(aside)


def _is_alive(pid: int, token: str) -> bool:
    if pid == os.getpid():
        return token == _token[0]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _complete_bytes(file: BinaryIO, end: int) -> int:
    """Number of bytes up to and including the last newline before `end`."""
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
