"""Weights over https, from an origin through a relay to a client, and what a wrong certificate does."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.certificates import write_certificate

from shoal.identity.keys import Key
from shoal.net.sockets import load_client_tls, load_server_tls
from shoal.shardcast.client import ShardcastClient
from shoal.shardcast.fetch.connection import UpstreamConnections, UpstreamError
from shoal.shardcast.origin import Origin
from shoal.shardcast.relay import Relay
from shoal.shardcast.serve.server import ShardServer
from shoal.shardcast.store.store import VersionStore
from shoal.shardcast.tree import show_tree

RUN = "demo"
Run = Callable[[Callable[[], Any]], Any]


def test_a_version_goes_over_https_from_the_origin_through_a_relay_to_a_client(tmp_path: Path, run: Run) -> None:
    certificate, secret = write_certificate(tmp_path)
    source = tmp_path / "v1"
    source.mkdir()
    data = bytes(range(256)) * 8192 + b"end"
    (source / "weights").write_bytes(data)

    async def work() -> None:
        key, tls = Key.generate(), load_server_tls(certificate, secret)
        store = await VersionStore.open(tmp_path / "origin", run=RUN, publisher=key.public, role="origin")
        server = ShardServer(store, tls=tls)
        await server.start()
        assert str(server.url).startswith("https://127.0.0.1:")
        relay = await Relay.open(
            tmp_path / "relay", [str(server.url)], run=RUN, publisher=key.public, tls=tls, authority=certificate
        )
        async with relay:
            await Origin(store, key, shard_size=1 << 16).publish(source, 1)
            client = await ShardcastClient.open(
                tmp_path / "out", [str(relay.server.url)], run=RUN, publisher=key.public, authority=certificate
            )
            async with client:
                folder = await client.pull(1)
            text, reached = await show_tree([str(server.url), str(relay.server.url)], certificate)
            assert reached and "origin" in text and "relay" in text
        assert (folder / "weights").read_bytes() == data
        await server.close()
        await store.close()

    run(work)


def test_an_untrusted_certificate_is_refused_with_a_clear_message(tmp_path: Path, run: Run) -> None:
    certificate, secret = write_certificate(tmp_path)

    async def work() -> None:
        store = await VersionStore.open(tmp_path / "origin", run=RUN, publisher=Key.generate().public, role="origin")
        server = ShardServer(store, tls=load_server_tls(certificate, secret))
        await server.start()
        with pytest.raises(UpstreamError, match=r"certificate is not trusted: self-signed certif.*--ca\)"):
            async with UpstreamConnections(server.url, tls=load_client_tls()).request("/healthz"):
                pass
        connections = UpstreamConnections(server.url, tls=load_client_tls(certificate))
        for _ in range(2):  # the second on the same connection
            async with connections.request("/healthz") as answer:
                assert b"ok" in await answer.read_piece(5)
                assert await answer.read_piece(5) == b""
        assert server.metrics.accepted.total == 2
        connections.close()
        await server.close()
        await store.close()

    run(work)


def test_a_handshake_that_never_comes_is_cut(tmp_path: Path, run: Run) -> None:
    certificate, secret = write_certificate(tmp_path)

    async def work() -> None:
        from shoal.net.limits import ServeLimits

        store = await VersionStore.open(tmp_path / "origin", run=RUN, publisher=Key.generate().public, role="origin")
        limits = ServeLimits(header_seconds=0.2)
        server = ShardServer(store, tls=load_server_tls(certificate, secret), limits=limits)
        await server.start()
        reader, writer = await asyncio.open_connection(*server.address)
        assert await reader.read(-1) == b""
        writer.close()
        assert server.metrics.cut.values == {"late": 1}
        await server.close()
        await store.close()

    run(work)
