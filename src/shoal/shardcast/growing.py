"""A folder that is published while it is written.

    <folder>             its files, each under its name once it is complete
    <folder>.writing     names and sizes of all files; locked by the writer, removed when all are complete

    writer: open_growing -> announce -> file after file -> the marker is removed, or all of it if the writer fails
    origin: read_plan -> has_file for file after file -> is_growing is False

Invariants:
- the marker is there before the folder, and longer than its last file is incomplete: a folder without one is complete;
- names that begin with a dot belong to the writer and are not there when the marker is removed;
- the kernel releases the lock when the writer ends, however that happens: nobody waits for a dead writer, and
  `remove_stale` removes what it left.

Both sides belong to one owner and trust each other; they share a file system.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from shoal.errors import ConfigError
from shoal.util.files import open_lock, remove_dir, sync_path, sync_tree, try_lock

_MARKER = ".writing"

Announce = Callable[[Mapping[str, int]], None]
"""Writes down the names and sizes of all files that the folder will have; from then on it can be published."""


@contextlib.contextmanager
def open_growing(folder: Path) -> Iterator[Announce]:
    """Create a folder to fill, which counts as complete when the block ends, and is removed if the block raises.

    Files appear in it under their final names only when complete.
    """
    marker = _marker_of(folder)
    lock = open_lock(marker)
    assert try_lock(lock), f"{folder}: has another writer"

    def announce(sizes: Mapping[str, int]) -> None:
        os.pwrite(lock, json.dumps(dict(sizes)).encode(), 0)

    try:
        sync_path(folder.parent)
        folder.mkdir()
        yield announce
        sync_tree(folder)
        marker.unlink()
    except BaseException:
        _remove_both(folder)
        raise
    finally:
        os.close(lock)
    sync_path(folder.parent)


def is_growing(folder: Path) -> bool:
    """Whether a folder is not complete yet; ConfigError if its writer ended before it was."""
    try:
        descriptor = os.open(_marker_of(folder), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        ended = try_lock(descriptor, is_shared=True) and _marker_of(folder).exists()
    finally:
        os.close(descriptor)
    if ended:
        raise ConfigError(f"{folder}: its writer ended before all files were complete")
    return True


def read_plan(folder: Path) -> dict[str, int] | None:
    """Sizes of the files that a growing folder will have, by name; None if it is complete."""
    try:
        data = _marker_of(folder).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return {str(name): int(size) for name, size in json.loads(data).items()}
    except ValueError:  # not announced yet
        raise ConfigError(f"{folder}: is still being written") from None


def has_file(folder: Path, name: str) -> bool:
    """Whether a file of a growing folder is complete; ConfigError if it never will be."""
    grows = is_growing(folder)  # before the look at the file: a writer that is done has written it
    if (folder / name).exists():
        return True
    if not grows:
        raise ConfigError(f"{folder}: has no {name}, which its writer announced")
    return False


def list_growing(parent: Path) -> set[str]:
    """Names of the folders in a folder that are not complete."""
    return {path.name.removesuffix(_MARKER) for path in parent.glob(f"*{_MARKER}")}


def remove_stale(parent: Path) -> None:
    """Remove the folders in a folder whose writers ended before they were complete."""
    for name in list_growing(parent):
        try:
            is_growing(parent / name)
        except ConfigError:
            _remove_both(parent / name)


def _remove_both(folder: Path) -> None:
    """The marker last: without it the folder would count as complete."""
    if folder.exists():
        remove_dir(folder)
    _marker_of(folder).unlink(missing_ok=True)


def _marker_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _MARKER)
