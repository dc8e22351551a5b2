"""Turns disk failures into one error message.

The layers below let `OSError` pass. Commands run inside `guard_disk`, the one place that catches it. Only errors of the
disk itself are caught: a missing file that we wrote before is a bug, and crashes.
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
"""a disk that cannot store this much counts as full"""


@contextmanager
def guard_disk(folder: Path) -> Iterator[None]:
    """Raise `DiskError` if the block fails because writing below `folder` was refused."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _find_errno(error)
        if number not in _FULL | _CLOSED:
            raise
        path = getattr(error, "filename", None) or folder
        raise DiskError(
            f"{path}: cannot be written ({os.strerror(number)}); all completed work is safe, and the same command "
            "resumes once the disk is writable again",
            is_full=number in _FULL,
        ) from error


def is_full(error: BaseException) -> bool:
    """Whether the disk is full, or our quota is."""
    return isinstance(error, OSError | SafetensorError) and _find_errno(error) in _FULL


def is_refused(error: OSError) -> bool:
    """Whether the disk refused the operation, because it is full or otherwise."""
    return _find_errno(error) in _FULL | _CLOSED


@contextmanager
def spare_words() -> Iterator[None]:
    """Ignore a full disk while logging in this block: the message is lost, the caller continues."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise


def has_room(folder: Path) -> bool:
    """Whether something can be written below a folder now. Blocking I/O."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        if not is_full(error):
            raise
        return False
    return True


def _find_errno(error: OSError | SafetensorError) -> int:
    """The errno of the error, which safetensors only puts into its text; 0 if there is none."""
    if isinstance(error, OSError):
        return error.errno or 0
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else 0
