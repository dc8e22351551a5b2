"""One node of shoal's shardcast, for bench/shardcast.py: the library in its own process, with its defaults.

    python shardcast_node.py origin  READY DATA PORT KEY             publishes for each line "VERSION PATH" it reads
    python shardcast_node.py relay   READY DATA PORT PUBLISHER URL ...
    python shardcast_node.py client  READY OUT PUBLISHER URL ...     follows: versions appear as folders OUT/vN
    python shardcast_node.py even    READY OUT PUBLISHER URL ...     the same, but chooses sources uniformly

The file READY is created when the node is ready.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

from shoal.identity.keys import Key
from shoal.shardcast.client import ShardcastClient
from shoal.shardcast.fetch.upstream_stats import Upstream, UpstreamTable
from shoal.shardcast.origin import Origin
from shoal.shardcast.relay import Relay
from shoal.shardcast.serve.server import ShardServer
from shoal.shardcast.store.store import VersionStore
from shoal.util.logs import log_to_stderr

RUN = "bench"


def main(role: str, ready: str, *arguments: str) -> None:
    jobs: dict[str, Callable[..., Coroutine[None, None, None]]]
    jobs = {"origin": run_origin, "relay": run_relay, "client": run_client, "even": run_even}
    with log_to_stderr(role):
        asyncio.run(jobs[role](Path(ready), *arguments))


async def run_origin(ready: Path, data: str, port: str, key_path: str) -> None:
    key = Key.load(Path(key_path))
    store = await VersionStore.open(Path(data), run=RUN, publisher=key.public)
    server = ShardServer(store)
    await server.start(port=int(port))
    origin = Origin(store, key)
    ready.touch()
    while line := await asyncio.to_thread(sys.stdin.readline):
        version, _, path = line.rstrip("\n").partition(" ")
        await origin.publish(Path(path), int(version))
    await server.close()
    await store.close()


async def run_relay(ready: Path, data: str, port: str, publisher: str, *urls: str) -> None:
    async with await Relay.open(Path(data), urls, run=RUN, publisher=publisher, port=int(port)) as relay:
        ready.touch()
        await relay.wait()


async def run_client(ready: Path, out: str, publisher: str, *urls: str) -> None:
    async with await ShardcastClient.open(Path(out), urls, run=RUN, publisher=publisher) as client:
        ready.touch()
        async for folder in client.follow():
            print(folder, *client.progress.upstreams, sep="\n", flush=True)


async def run_even(ready: Path, out: str, publisher: str, *urls: str) -> None:
    UpstreamTable.weigh_all = _weigh_evenly  # type: ignore[method-assign, assignment]
    await run_client(ready, out, publisher, *urls)


def _weigh_evenly(book: UpstreamTable) -> dict[Upstream, float]:
    return dict.fromkeys(book.all, 1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
