"""The door of every server: who is let in when there is no room, and what a bug does."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.net.door import Door, Neighbours
from shoal.shardcast.limits import Phase, Roster
from shoal.shardcast.metrics import Registry
from shoal.swarm.exchange import HttpLimits, HttpMetrics

WAIT_S = 20


class Guest:
    def __init__(self, sock: socket.socket, *rosters: "Roster[Guest]") -> None:
        self.sock, self.rosters = sock, rosters
        self.enter(Phase.FRESH)

    def enter(self, phase: Phase) -> None:
        for roster in self.rosters:
            roster.put_member(self, phase)

    def leave_rosters(self) -> None:
        for roster in self.rosters:
            roster.remove_member(self)
        self.rosters = ()


class House:
    """Does with each guest what the test says."""

    def __init__(self, serve: Callable[[Guest], Awaitable[None]], **limits: int) -> None:
        self.roster: Roster[Guest] = Roster()
        self.near: Roster[Guest] = Roster()
        self.serve = serve
        self.guests: list[Guest] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.metrics = HttpMetrics(Registry())
        self.door = Door(self, self.roster, limits=HttpLimits(grace_seconds=0, **limits), metrics=self.metrics)

    def find_neighbours(self, address: str) -> Neighbours[Guest]:
        assert address == "127.0.0.1"
        return Neighbours(self.near, True)

    def seat_guest(self, sock: socket.socket, address: tuple[str, int]) -> Guest:
        self.guests.append(Guest(sock, self.roster, self.near))
        return self.guests[-1]

    async def serve_guest(self, guest: Guest) -> None:
        await self.serve(guest)

    def release_guest(self, guest: Guest) -> None:
        guest.leave_rosters()
        guest.sock.close()


@asynccontextmanager
async def open_house(serve: Callable[[Guest], Awaitable[None]], **limits: int) -> AsyncIterator[House]:
    house = House(serve, **limits)
    await house.door.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(WAIT_S):
            yield house
    finally:
        await house.door.close()


async def knock(house: House) -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection(*house.door.address)
    house.writers.append(writer)  # which would close with its last reference
    return reader


async def until(holds: Callable[[], Any]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


async def idle(guest: Guest) -> None:
    await asyncio.sleep(3600)


async def busy(guest: Guest) -> None:
    guest.enter(Phase.BUSY)
    await asyncio.sleep(3600)


@pytest.mark.parametrize("limits", [{"max_connections": 2}, {"per_peer_connections": 2}])
def test_one_too_many_takes_the_place_of_the_longest_idle_one(limits: dict[str, int]) -> None:
    async def check() -> None:
        async with open_house(idle, **limits) as house:
            first, second = await knock(house), await knock(house)
            await until(lambda: len(house.guests) == 2)
            await knock(house)
            assert await first.read(-1) == b""
            assert len(house.roster) == 2
            assert not second.at_eof()
            assert house.metrics.evicted.total == 1

    asyncio.run(check())


def test_of_several_that_come_at_once_each_takes_a_place_of_its_own() -> None:
    async def check() -> None:
        async with open_house(idle, max_connections=3) as house:
            early = [await knock(house) for _ in range(3)]
            await until(lambda: len(house.guests) == 3)
            await asyncio.gather(*(knock(house) for _ in range(3)))
            for reader in early:
                assert await reader.read(-1) == b""
            assert len(house.roster) == 3
            assert house.metrics.evicted.total == 3

    asyncio.run(check())


@pytest.mark.parametrize(
    ("limits", "status"), [({"max_connections": 2}, b"503"), ({"per_peer_connections": 2}, b"429")]
)
def test_one_too_many_is_told_so_if_all_others_are_served(limits: dict[str, int], status: bytes) -> None:
    async def check() -> None:
        async with open_house(busy, **limits) as house:
            for _ in range(2):
                await knock(house)
            await until(lambda: len(house.guests) == 2)
            answer = await (await knock(house)).read(-1)
            assert answer.startswith(b"HTTP/1.1 " + status)
            assert len(house.roster) == 2
            assert house.metrics.refused.total == 1

    asyncio.run(check())


def test_a_bug_ends_its_connection_and_goes_to_the_loop() -> None:
    async def stumble(guest: Guest) -> None:
        raise ZeroDivisionError("a bug")

    async def check() -> None:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        async with open_house(stumble) as house:
            assert await (await knock(house)).read(-1) == b""
            assert await (await knock(house)).read(-1) == b""
            assert [type(context["exception"]) for context in told] == [ZeroDivisionError] * 2
            assert house.metrics.cut.values == {"bug": 2}
            assert len(house.roster) == 0

    asyncio.run(check())


def test_a_connection_that_was_gone_before_it_was_seated_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with open_house(idle) as house:
            real, trouble = house.seat_guest, [OSError("reset")]

            def seat(sock: socket.socket, address: tuple[str, int]) -> Guest:
                if trouble:
                    raise trouble.pop()
                return real(sock, address)

            monkeypatch.setattr(house, "seat_guest", seat)
            assert await (await knock(house)).read(-1) == b""
            await knock(house)
            await until(lambda: len(house.guests) == 1)

    asyncio.run(check())


def test_an_address_that_cannot_be_listened_on_is_explained() -> None:
    async def check() -> None:
        async with open_house(idle) as house:
            for host, port, text in (("127.0.0.1", house.door.address[1], "in use"), ("127.0.0.1", 70_000, "65535")):
                with pytest.raises(ConfigError, match=text):
                    await House(idle).door.start(host, port)

    asyncio.run(check())
