"""The listener of every server: what is accepted at the connection limit, and what a bug does."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from shoal.errors import ConfigError, UnavailableError
from shoal.net.limits import ConnectionSlot, HttpLimits, Phase
from shoal.net.listener import Listener
from shoal.util.metrics import ServerMetrics

WAIT_S = 20


class Server:
    """Handles each connection as the test specifies."""

    def __init__(self, serve: Callable[[ConnectionSlot], Awaitable[None]], **limits: Any) -> None:
        self.serve = serve
        self.slots: list[ConnectionSlot] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.metrics = ServerMetrics(CollectorRegistry())
        allowed = HttpLimits(grace_seconds=0, trust_loopback=False, **limits)
        self.listener = Listener(self._serve, limits=allowed, metrics=self.metrics)

    async def _serve(self, sock: socket.socket, slot: ConnectionSlot) -> None:
        self.slots.append(slot)
        await self.serve(slot)


@asynccontextmanager
async def open_server(serve: Callable[[ConnectionSlot], Awaitable[None]], **limits: int) -> AsyncIterator[Server]:
    server = Server(serve, **limits)
    await server.listener.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(WAIT_S):
            yield server
    finally:
        await server.listener.close()


async def connect(server: Server) -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection(*server.listener.address)
    server.writers.append(writer)  # it would be closed with its last reference
    return reader


async def until(holds: Callable[[], Any]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


async def idle(slot: ConnectionSlot) -> None:
    await asyncio.sleep(3600)


async def busy(slot: ConnectionSlot) -> None:
    slot.enter_phase(Phase.BUSY)
    await asyncio.sleep(3600)


@pytest.mark.parametrize("limits", [{"max_connections": 2}, {"per_peer_connections": 2}])
def test_one_connection_too_many_replaces_the_longest_idle_one(limits: dict[str, int]) -> None:
    async def check() -> None:
        async with open_server(idle, **limits) as server:
            first, second = await connect(server), await connect(server)
            await until(lambda: len(server.slots) == 2)
            await connect(server)
            assert await first.read(-1) == b""
            assert len(server.listener.connections) == 2
            assert not second.at_eof()
            assert server.metrics.evicted.total == 1

    asyncio.run(check())


def test_of_several_that_connect_at_once_each_gets_its_own_slot() -> None:
    async def check() -> None:
        async with open_server(idle, max_connections=3) as server:
            early = [await connect(server) for _ in range(3)]
            await until(lambda: len(server.slots) == 3)
            await asyncio.gather(*(connect(server) for _ in range(3)))
            for reader in early:
                assert await reader.read(-1) == b""
            assert len(server.listener.connections) == 3
            assert server.metrics.evicted.total == 3

    asyncio.run(check())


@pytest.mark.parametrize(
    ("limits", "status"), [({"max_connections": 2}, b"503"), ({"per_peer_connections": 2}, b"429")]
)
def test_one_connection_too_many_is_refused_if_all_others_are_being_served(
    limits: dict[str, int], status: bytes
) -> None:
    async def check() -> None:
        async with open_server(busy, **limits) as server:
            for _ in range(2):
                await connect(server)
            await until(lambda: len(server.slots) == 2)
            answer = await (await connect(server)).read(-1)
            assert answer.startswith(b"HTTP/1.1 " + status)
            assert len(server.listener.connections) == 2
            assert server.metrics.refused.total == 1

    asyncio.run(check())


def test_a_bug_ends_its_connection_and_goes_to_the_loop() -> None:
    async def stumble(slot: ConnectionSlot) -> None:
        raise ZeroDivisionError("a bug")

    async def check() -> None:
        reported: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        async with open_server(stumble) as server:
            assert await (await connect(server)).read(-1) == b""
            assert await (await connect(server)).read(-1) == b""
            assert [type(context["exception"]) for context in reported] == [ZeroDivisionError] * 2
            assert server.metrics.cut.values == {"bug": 2}
            assert len(server.listener.connections) == 0

    asyncio.run(check())


def test_an_address_that_cannot_be_listened_on_is_explained() -> None:
    async def check() -> None:
        async with open_server(idle) as server:
            taken = server.listener.address[1]
            for port, error, text in ((taken, UnavailableError, "in use"), (70_000, ConfigError, "65535")):
                with pytest.raises(error, match=text):
                    await Server(idle).listener.start("127.0.0.1", port)

    asyncio.run(check())
