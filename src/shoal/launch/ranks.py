"""`--nproc N`: the same command in N processes, the ranks of one learner (learner/parallel.py).

    parent: import -> fork N ranks -> all ended with 0, or one failed -> end the others -> exit code

Invariants:
- rank 0 is the command: its exit code is the result, and it alone gets the parent's SIGINT and SIGTERM, once each. It
  ends in order and releases the other ranks, which ignore both;
- a rank that fails, by itself or by a signal, ends all others within END_S;
- no rank outlives the parent, however that ends (on Linux);
- the parent imports what the ranks need, which takes seconds, once for all of them. It computes nothing and asks no
  device anything: a fork could not use a device that its parent has opened.

torchrun starts the same ranks, on several machines too. It is not used here because it ends ranks 30 s after a signal,
whether or not the checkpoint is written, and replaces exit codes and messages by its own.
"""

import gc
import importlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from shoal.launch.process import MODULES, NO_DRIVER
from shoal.sandbox import linux

END_S = 5.0
"""time for the other ranks to end after one has failed"""
_POLL_S = 0.05
MAX_RANKS = 64
MEETING = "SHOAL_RANKS"
"""file through which ranks of one machine meet; torchrun's ranks meet at its MASTER_ADDR"""
RunCommand = Callable[[Sequence[str]], int]


def run_ranks(command: RunCommand, arguments: Sequence[str], nproc: int) -> int:
    """Run a `shoal` command in `nproc` processes on this machine; its exit code."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    new_process: Callable[..., BaseProcess] = multiprocessing.get_context("spawn").Process
    if sys.platform == "linux":
        _import_libraries()
        new_process = multiprocessing.get_context("fork").Process
    with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as folder:
        meeting = Path(folder) / "meeting"
        ranks: list[BaseProcess] = []
        try:
            for rank in range(nproc):
                places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
                names = {name: str(value) for name, value in {**places, MEETING: meeting}.items()}
                ranks.append(new_process(target=_run_rank, args=(command, arguments, names, os.getpid())))
                ranks[-1].start()
            with _forward_signals(ranks[0]):
                return _await_ranks(ranks)
        finally:
            for process in ranks:
                if process.pid is not None:  # it was started
                    process.kill()
                    process.join()


def _import_libraries() -> None:
    os.environ.update(NO_DRIVER)
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # shared memory stays shared: no collection of a rank touches it


def _run_rank(command: RunCommand, arguments: Sequence[str], environment: dict[str, str], parent: int) -> None:
    """In the new process: run the command to its end."""
    os.setsid()  # a terminal's Ctrl-C reaches the parent alone, which forwards it
    if sys.platform == "linux":
        linux.die_with_parent(parent, signal.SIGKILL)
    os.environ.update(environment)
    random.seed()
    sys.exit(command(arguments))


def _await_ranks(ranks: Sequence[BaseProcess]) -> int:
    """Until all have ended, or one has failed; the exit code of rank 0, or of the rank that failed before it."""
    while True:
        codes = [rank.exitcode for rank in ranks]
        failed = next((code for code in codes if code), 0)
        if failed:
            deadline = time.monotonic() + END_S
            while ranks[0].exitcode is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)  # rank 0 says what is wrong, if it is not the one that is gone
            code = ranks[0].exitcode or failed
            return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL_S)


@contextmanager
def _forward_signals(first: BaseProcess) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        if first.exitcode is None and first.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(first.pid, number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
