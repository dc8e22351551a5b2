"""Coordinators that are killed: each is a process forked from one that has imported everything.

A line of JSON on standard input starts a life: the coordinator's files, its settings, the crash point to die at and at
which passing, and the number of points after which to die in any case. Standard output reports `up PORT PID`, if it
lives that long, `at POINT`, `end STATUS`.
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

from shoal.coordinator.service import ServiceConfig, open_service
from shoal.ledger.ledger import set_hook


def main() -> None:
    """Run one life after the other."""
    asyncio.run(rehearse())
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            asyncio.run(live(json.loads(line)))
            os._exit(0)
        tell(f"end {os.waitpid(pid, 0)[1]}")


async def rehearse() -> None:
    """A life in which nothing happens, so that caches are filled before forking."""
    with TemporaryDirectory() as folder:
        for _ in range(2):
            async with open_service(ServiceConfig(run="rehearsal", port=0), Path(folder)):
                pass


async def live(order: dict[str, Any]) -> None:
    """Run a coordinator until the end."""
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
