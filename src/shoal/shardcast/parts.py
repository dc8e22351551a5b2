"""Files of a blob on disk: allocated whole, forced to disk, removed."""

import errno
import os
import shutil
from pathlib import Path

from shoal.shardcast.errors import ShardError
from shoal.shardcast.hashing import own_buffer


def allocate_file(path: Path, size: int) -> None:
    """A file of a size, with all its blocks where the file system can do that; bytes it has are kept."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(descriptor, size)
        if size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Force a file's bytes to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Remove a folder of ours or a file, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_at(descriptor: int, view: memoryview, offset: int) -> None:
    """All of a buffer to a place in a file."""
    while view:
        length = os.pwrite(descriptor, view, offset)
        view, offset = view[length:], offset + length


def copy_range(source: int, target: int, offset: int, size: int) -> None:
    """The first `size` bytes of one file to a place in another."""
    view = own_buffer()
    done = 0
    while done < size:
        length = os.preadv(source, [view[: min(len(view), size - done)]], done)
        if length == 0:
            raise ShardError("the spare file became shorter")
        write_at(target, view[:length], offset + done)
        done += length
