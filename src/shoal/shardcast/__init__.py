"""Weights to the whole swarm: signed manifests, shards that anyone may pass on, lossless deltas.

    async with await Relay.open(data, urls, run=run, publisher=public) as relay:
        await relay.wait()
    async with await Client.open(out, urls, run=run, publisher=public) as client:
        folder = await client.pull()

An origin is a `Store`, an `Origin` that publishes into it and a `Server` that serves it. Names are imported when first
used: numpy and pyarrow are not loaded for a look at the package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.shardcast.client import Client
    from shoal.shardcast.crew import GoneError
    from shoal.shardcast.delta import DeltaStats, apply_delta, encode_delta
    from shoal.shardcast.errors import DeltaError, ManifestError, ShardError, StaleError
    from shoal.shardcast.limits import ServeLimits
    from shoal.shardcast.progress import Progress
    from shoal.shardcast.publish import Origin
    from shoal.shardcast.relay import Relay
    from shoal.shardcast.server import Server
    from shoal.shardcast.store import Entry, Store
    from shoal.shardcast.tickets import TicketBook, issue_ticket

__all__ = [
    "Client",
    "DeltaError",
    "DeltaStats",
    "Entry",
    "GoneError",
    "ManifestError",
    "Origin",
    "Progress",
    "Relay",
    "ServeLimits",
    "Server",
    "ShardError",
    "StaleError",
    "Store",
    "TicketBook",
    "apply_delta",
    "encode_delta",
    "issue_ticket",
]

_HOMES = {
    "client": ("Client",),
    "crew": ("GoneError",),
    "delta": ("DeltaStats", "apply_delta", "encode_delta"),
    "errors": ("DeltaError", "ManifestError", "ShardError", "StaleError"),
    "limits": ("ServeLimits",),
    "progress": ("Progress",),
    "publish": ("Origin",),
    "relay": ("Relay",),
    "server": ("Server",),
    "store": ("Entry", "Store"),
    "tickets": ("TicketBook", "issue_ticket"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"shoal.shardcast.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
