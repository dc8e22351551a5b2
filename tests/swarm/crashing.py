"""Coordinators that are killed: each a process of its own, made by fork from one that has imported everything.

A life is ordered by a line of JSON on standard input: where the coordinator's files are, its settings, the point to die
at, at which passing of it, and after how many points to die in any case. Told on standard output: `up PORT PID`, if it
lives so long, `at POINT`, `end STATUS`.
"""

import asyncio
import gc
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shoal.swarm.faults import set_hook
from shoal.swarm.service import ServiceConfig, open_service


def main() -> None:
    """Start one life after the other."""
    asyncio.run(rehearse())
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            asyncio.run(live(json.loads(line)))
            os._exit(0)
        tell(f"end {os.waitpid(pid, 0)[1]}")


async def rehearse() -> None:
    """A life in which nothing happens: what is computed once in a process need not be in each of its children."""
    with TemporaryDirectory() as folder:
        for _ in range(2):
            async with open_service(ServiceConfig(run="rehearsal", port=0), Path(folder)):
                pass


async def live(order: dict[str, Any]) -> None:
    """Be a coordinator until the end."""
    config = ServiceConfig.model_validate_json(json.dumps(order["config"]), strict=True)
    set_hook(make_hook(order["point"], order["turn"], order["most"]))
    async with open_service(config, Path(order["data"])) as service:
        tell(f"up {service.server.address[1]} {os.getpid()}")
        await service.run()


def make_hook(point: str, turn: int, most: int) -> Callable[[str], None]:
    """Die when a point is passed for the `turn`-th time, or after `most` points; 0 for never."""
    lock, seen = threading.Lock(), Counter[str]()

    def hook(here: str) -> None:
        with lock:
            seen[here] += 1
            if (here == point and seen[here] == turn) or seen.total() == most:
                tell(f"at {here}")
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    main()
