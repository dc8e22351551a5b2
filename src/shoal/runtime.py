"""How the process uses this machine: threads, and memory that stays."""

import ctypes
import sys

import torch

from shoal.config import RunConfig

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for mallopt's parameters
_KEEP_BYTES = 2**30


def fix_threads(config: RunConfig) -> RunConfig:
    """The settings with the number of threads that 0, all cores, means here: bits depend on it."""
    return config if config.threads else config.model_copy(update={"threads": torch.get_num_threads()})


def tune_process(threads: int) -> None:
    """Set torch's threads (0: as torch chose, all cores), and keep freed memory in the process. Twice is as once.

    glibc maps every block above 32 MB anew and gives it back when freed, so a training step on the CPU spends most of
    its time in page faults; kept, the same pages serve the next tensor.
    """
    if threads:
        torch.set_num_threads(threads)
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none, and needs none
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, _KEEP_BYTES)
            mallopt(_TRIM_THRESHOLD, _KEEP_BYTES)
