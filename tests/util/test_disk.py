"""Disk failures become one-line errors."""

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from shoal.errors import DiskError
from shoal.util.disk import guard_disk


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES])
def test_a_refusal_names_the_folder_and_the_reason(number: int) -> None:
    with pytest.raises(DiskError) as caught, guard_disk(Path("runs/a")):
        raise OSError(number, os.strerror(number))
    assert str(caught.value).startswith(f"runs/a: cannot be written ({os.strerror(number)}); ")


def test_a_refusal_names_the_file_where_it_is_known() -> None:
    with pytest.raises(DiskError, match=r"^runs/a/metrics\.jsonl: "), guard_disk(Path("runs/a")):
        raise OSError(errno.ENOSPC, "full", "runs/a/metrics.jsonl")


def test_safetensors_own_error_is_understood() -> None:
    with pytest.raises(DiskError, match="No space left"), guard_disk(Path("runs/a")):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "no such file"), BrokenPipeError(errno.EPIPE, "pipe"), OSError("odd")]
)
def test_what_is_no_refusal_passes(error: OSError) -> None:
    with pytest.raises(OSError) as caught, guard_disk(Path("runs/a")):
        raise error
    assert caught.value is error


def test_a_damaged_file_is_no_refusal() -> None:
    with pytest.raises(SafetensorError), guard_disk(Path("runs/a")):
        raise SafetensorError("Error while deserializing header: HeaderTooLarge")
