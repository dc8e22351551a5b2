"""Process-wide settings: threads, and which freed memory is kept."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's names for mallopt's parameters
_KEEP_BYTES = 2**30
_LARGE_BYTES = 2**27
"""Less than this is kept when it is freed: giving it back and asking for it again takes longer than it is worth."""
_LARGE_MODEL_BYTES = 2**30
_LARGE_BLOCK, _LARGE_TRIM = 2**20, 2**26


def tune_process(threads: int) -> None:
    """Set torch's threads (0: torch's default, all cores), and keep freed memory in the process. Idempotent.

    glibc maps every block above 32 MB again and unmaps it when freed, so a training step on the CPU spends most of its
    time in page faults. If memory is kept, the next tensor reuses the same pages.
    """
    if threads:
        torch.set_num_threads(threads)
    _set_thresholds(_KEEP_BYTES, _KEEP_BYTES)


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """Set the number of torch's threads within the context, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tune_memory(model_bytes: int) -> None:
    """Keep little of the memory that is freed if the process works on a large model; otherwise change nothing.

    Its tensors are large, so page faults cost little beside computing with them. But they are of many sizes, and freed
    blocks that are kept do not fit the next ones: a rank of 1.1 billion parameters that used 1.4 GB held 6.7 GB.
    """
    if model_bytes >= _LARGE_MODEL_BYTES:
        _set_thresholds(_LARGE_BLOCK, _LARGE_TRIM)
        _set_option(_ARENA_MAX, 1)  # no more heaps of single threads, which keep 64 MB each


def _set_thresholds(mapped: int, trimmed: int) -> None:
    """Blocks from `mapped` bytes on go back when they are freed, others when `trimmed` bytes are free at the end."""
    _set_option(_MMAP_THRESHOLD, mapped)
    _set_option(_TRIM_THRESHOLD, trimmed)


def _set_option(parameter: int, value: int) -> None:
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has no mallopt and does not need it
    if mallopt is not None:
        mallopt(parameter, value)


def release_memory(freed_bytes: int) -> None:
    """Give freed memory back to the system, which `tune_process` keeps, if that much was freed and is not needed soon.

    For what is larger than the work that follows: a model that was replaced, copies made while one was loaded.
    """
    if freed_bytes < _LARGE_BYTES or sys.platform != "linux":
        return
    gc.collect()  # modules of a model refer to each other
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
