"""Distribution of weights to the whole swarm: signed manifests, shards that anyone may relay, lossless deltas.

    async with await Relay.open(data, urls, run=run, publisher=public) as relay:
        await relay.wait()
    async with await ShardcastClient.open(out, urls, run=run, publisher=public) as client:
        folder = await client.pull()

An origin is a `VersionStore`, an `Origin` that publishes into it and a `ShardServer` that serves it. Names are imported
on first use, so importing the package does not load numpy and pyarrow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.shardcast.client import ShardcastClient
    from shoal.shardcast.origin import Origin
    from shoal.shardcast.relay import Relay
    from shoal.shardcast.serve.server import ShardServer
    from shoal.shardcast.store.store import VersionStore

__all__ = ["Origin", "Relay", "ShardServer", "ShardcastClient", "VersionStore"]
_HOMES = dict(zip(__all__, ("origin", "relay", "serve.server", "client", "store.store"), strict=True))


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
