"""One node of the published package `shardcast` 0.3.2, for bench/shardcast.py. Runs in a Python that has it installed.

    python -I shardcast_reference.py origin  PORT FOLDER FILE      broadcasts FILE when it reads a line
    python -I shardcast_reference.py middle  PORT FOLDER UPSTREAM
    python -I shardcast_reference.py client  FOLDER UPSTREAM       writes `done` when version 1 is complete and verified

Middle and client poll every second; the package's default is 30. `-I` keeps bench/shardcast.py, which has the same name
as the package, off the import path.
"""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 1


def main(role: str, *arguments: str) -> None:
    jobs: dict[str, Callable[..., None]] = {"origin": run_origin, "middle": run_middle, "client": run_client}
    jobs[role](*arguments)


def run_origin(port: str, folder: str, file: str) -> None:
    import shardcast

    _put_probe(folder)
    shardcast.initialize(folder, int(port))
    sys.stdin.readline()
    shardcast.broadcast(file)
    threading.Event().wait()


def run_middle(port: str, folder: str, upstream: str) -> None:
    import shardcast

    _put_probe(folder)
    shardcast.MiddleNode([upstream], folder, int(port), check_interval=POLL_S)
    threading.Event().wait()


def run_client(folder: str, upstream: str) -> None:
    import shardcast

    client = shardcast.ClientNode([upstream], folder)
    Path(folder, "ready").touch()
    while "v1" not in client.list_available_versions():
        time.sleep(POLL_S)
    if client.download_version("v1", str(Path(folder, "file"))) is None:
        sys.exit("the reference gave up")
    Path(folder, "done").touch()


def _put_probe(folder: str) -> None:
    """Every node first asks its upstream for this file, which the package does not create."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "data1.bin").write_bytes(bytes(1 << 20))


if __name__ == "__main__":
    main(*sys.argv[1:])
