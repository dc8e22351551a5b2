"""`--nproc N`: the same command in N processes, the ranks of one learner (learner/parallel.py).

    parent: start N ranks -> all ended with 0, or one failed -> end the others -> exit code

Invariants:
- rank 0 is the command: its exit code is the result, and it alone gets the parent's SIGINT and SIGTERM, once each. It
  ends in order and releases the other ranks, which ignore both;
- a rank that fails, by itself or by a signal, ends all others within END_S;
- no rank outlives the parent, however that ends (on Linux).

torchrun starts the same ranks, on several machines too. It is not used here because it ends ranks 30 s after a signal,
whether or not the checkpoint is written, and replaces exit codes and messages by its own.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from shoal.launch.process import bind_to_parent

END_S = 5.0
"""time for the other ranks to end after one has failed"""
_POLL_S = 0.05
MAX_RANKS = 64
MEETING = "SHOAL_RANKS"
"""file through which ranks of one machine meet; torchrun's ranks meet at its MASTER_ADDR"""


def run_ranks(arguments: Sequence[str], nproc: int) -> int:
    """Run a `shoal` command in `nproc` processes on this machine; its exit code."""
    with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as folder:
        ranks = [_start_rank(arguments, rank, nproc, Path(folder) / "meeting") for rank in range(nproc)]
        try:
            with _forward_signals(ranks[0]):
                return _await_ranks(ranks)
        finally:
            for rank in ranks:
                _end(rank, signal.SIGKILL)
                rank.wait()


def _start_rank(arguments: Sequence[str], rank: int, nproc: int, meeting: Path) -> subprocess.Popen[bytes]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, MEETING: meeting}
    environment = {"OMP_NUM_THREADS": str(max(1, cores // nproc)), **os.environ}
    environment |= {name: str(value) for name, value in places.items()}
    return subprocess.Popen(
        [sys.executable, "-m", "shoal", *arguments],
        env=environment,
        stdin=None if rank == 0 else subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone, which forwards it
        preexec_fn=bind_to_parent(signal.SIGKILL),  # noqa: PLW1509 - it calls the kernel and nothing else
    )


def _await_ranks(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all have ended, or one has failed; the exit code of rank 0, or of the rank that failed before it."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = next((code for code in codes if code), 0)
        if failed:
            deadline = time.monotonic() + END_S
            while ranks[0].poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)  # rank 0 says what is wrong, if it is not the one that is gone
            code = ranks[0].poll() or failed
            return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL_S)


@contextmanager
def _forward_signals(first: subprocess.Popen[bytes]) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        _end(first, signal.Signals(number))

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(rank: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        rank.send_signal(number)
