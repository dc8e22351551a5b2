"""One node of shoal's shardcast, for bench/shardcast.py: the library in a process of its own, with its defaults.

    python cast_node.py origin  READY DATA PORT KEY                 publishes "VERSION PATH" when such a line comes in
    python cast_node.py relay   READY DATA PORT PUBLISHER URL ...
    python cast_node.py client  READY OUT PUBLISHER URL ...         follows: versions appear as folders OUT/vN
    python cast_node.py even    READY OUT PUBLISHER URL ...         likewise, but draws sources without looking at them

The file READY appears when the node is live.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

from shoal.keys import Key
from shoal.shardcast.client import Client
from shoal.shardcast.publish import Origin
from shoal.shardcast.relay import Relay
from shoal.shardcast.server import Server
from shoal.shardcast.sources import Source, SourceBook
from shoal.shardcast.store import Store

RUN = "bench"


def main(role: str, ready: str, *arguments: str) -> None:
    jobs: dict[str, Callable[..., Coroutine[None, None, None]]]
    jobs = {"origin": run_origin, "relay": run_relay, "client": run_client, "even": run_even}
    asyncio.run(jobs[role](Path(ready), *arguments))


async def run_origin(ready: Path, data: str, port: str, key_path: str) -> None:
    key = Key.load(Path(key_path))
    store = await Store.open(Path(data), run=RUN, publisher=key.public, note=_show_note)
    server = Server(store)
    await server.start(port=int(port))
    origin = Origin(store, key)
    ready.touch()
    while line := await asyncio.to_thread(sys.stdin.readline):
        version, _, path = line.rstrip("\n").partition(" ")
        await origin.publish(Path(path), int(version))
    await server.close()
    await store.close()


async def run_relay(ready: Path, data: str, port: str, publisher: str, *urls: str) -> None:
    async with await Relay.open(
        Path(data), urls, run=RUN, publisher=publisher, port=int(port), note=_show_note
    ) as relay:
        ready.touch()
        await relay.wait()


async def run_client(ready: Path, out: str, publisher: str, *urls: str) -> None:
    async with await Client.open(Path(out), urls, run=RUN, publisher=publisher, note=_show_note) as client:
        ready.touch()
        async for folder in client.follow():
            print(folder, *client.progress.sources, sep="\n", flush=True)


async def run_even(ready: Path, out: str, publisher: str, *urls: str) -> None:
    SourceBook.weigh_all = _weigh_evenly  # type: ignore[method-assign, assignment]
    await run_client(ready, out, publisher, *urls)


def _weigh_evenly(book: SourceBook) -> dict[Source, float]:
    return dict.fromkeys(book.sources, 1.0)


def _show_note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
