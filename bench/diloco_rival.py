"""hivemind's averager for comparison: starts its peers, keeps them in step and stops them.

They run in a separate interpreter, so that hivemind need not be installed next to this package.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import IO

SCRIPT = Path(__file__).with_name("diloco_hivemind.py")
LARGEST_ERROR = {"fp32": 1e-5, "fp16": 1e-2}


def time_hivemind(python: str, size: int, count: int, codec: str, repeats: int) -> float:
    """Seconds per sync: the median over rounds of the slowest peer, without the first."""
    with _start_peers(python, size, count, codec) as peers:
        times = [_time_round(peers, LARGEST_ERROR[codec]) for _ in range(repeats)]
    return median(times[1:])


def _time_round(peers: list[subprocess.Popen[str]], largest_error: float) -> float:
    for _ in ("draw the vector", "average it"):
        for peer in peers:
            print("go", file=peer.stdin, flush=True)
        answers = [_read_line(peer).split() for peer in peers]
    # It reports success for a mean of some slices only (docs/diloco_engine.md), so the result is checked.
    if max(float(error) for _, error in answers) > largest_error:
        raise RuntimeError("hivemind did not average the whole vector over all peers")
    return max(float(seconds) for seconds, _ in answers)


@contextmanager
def _start_peers(python: str, size: int, count: int, codec: str) -> Iterator[list[subprocess.Popen[str]]]:
    peers: list[subprocess.Popen[str]] = []
    try:
        addresses: list[str] = []
        for rank in range(count):
            words = [python, str(SCRIPT), str(rank), str(count), str(size), codec, *addresses]
            peers.append(_start_peer(words))
            line = _read_line(peers[-1])
            addresses = addresses or line.split()
        assert all(_read_line(peer) == "ready" for peer in peers)
        yield peers
    finally:
        for peer in peers:
            os.killpg(peer.pid, signal.SIGKILL)  # its own group: its averager and daemon outlive it
            peer.wait()


def _start_peer(words: list[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )


def _read_line(peer: subprocess.Popen[str]) -> str:
    stream: IO[str] | None = peer.stdout
    assert stream is not None
    line = stream.readline().strip()
    if not line:
        raise RuntimeError("a hivemind peer ended early")
    return line
