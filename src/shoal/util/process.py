"""Process-wide settings: threads, and keeping freed memory."""

import ctypes
import sys

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for mallopt's parameters
_KEEP_BYTES = 2**30


def tune_process(threads: int) -> None:
    """Set torch's threads (0: torch's default, all cores), and keep freed memory in the process. Idempotent.

    glibc maps every block above 32 MB again and unmaps it when freed, so a training step on the CPU spends most of its
    time in page faults. If memory is kept, the next tensor reuses the same pages.
    """
    if threads:
        torch.set_num_threads(threads)
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has no mallopt and does not need it
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, _KEEP_BYTES)
            mallopt(_TRIM_THRESHOLD, _KEEP_BYTES)
