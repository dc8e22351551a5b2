"""Where a disk that refuses becomes a sentence.

The parts below let `OSError` pass; the commands run inside `guard_disk`, the one place that catches it. Only errors of
the disk itself are taken: a missing file where we had put one is a bug of ours, and crashes.
"""

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from shoal.errors import DiskError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CLOSED = {errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
ROOM_BYTES = 1 << 20
"""what a disk takes if it is not full"""


@contextmanager
def guard_disk(folder: Path) -> Iterator[None]:
    """Raise a `DiskError` where the block fails because what it writes below `folder` was refused."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _find_errno(error)
        if number not in _FULL | _CLOSED:
            raise
        path = getattr(error, "filename", None) or folder
        raise DiskError(
            f"{path}: cannot be written ({os.strerror(number)}); nothing complete was lost, and the same command goes "
            "on from there once it can be",
            is_full=number in _FULL,
        ) from error


def is_full(error: BaseException) -> bool:
    """Whether this is a disk that has no room, or lets us have none."""
    return isinstance(error, OSError | SafetensorError) and _find_errno(error) in _FULL


def is_refused(error: OSError) -> bool:
    """Whether it is the disk that refuses, for want of room or otherwise."""
    return _find_errno(error) in _FULL | _CLOSED


@contextmanager
def spare_words() -> Iterator[None]:
    """Let a full disk behind a log cost the words that the block says, and not who says them."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise


def has_room(folder: Path) -> bool:
    """Whether something can be written below a folder now. Blocking."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        if not is_full(error):
            raise
        return False
    return True


def _find_errno(error: OSError | SafetensorError) -> int:
    """The system's number for it, which safetensors only writes into its text; 0 if there is none."""
    if isinstance(error, OSError):
        return error.errno or 0
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else 0
