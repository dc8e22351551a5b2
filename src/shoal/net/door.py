"""Accepting connections, within limits, for whatever kind of server stands behind.

Invariants:
- the number of open connections never passes the limits; a new one takes the place of one that is not being served
  (limits.Roster says of which), and is refused only if all others are being served;
- whatever a peer does ends its own connection at most; accepting goes on, also when descriptors run out;
- what nobody expected of a connection is a bug of ours: it ends that connection, is counted, and goes to the loop's
  exception handler, never to the peer.

Life cycle: start -> (guests come and go) -> close: no new ones, idle ones end at once, the others have a grace period.
"""

import asyncio
import errno
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Generic, NamedTuple, Protocol, TypeVar

from shoal.errors import ConfigError
from shoal.shardcast.limits import Phase, Roster
from shoal.shardcast.metrics import Counter

BACKLOG = 1024
_SHORTAGE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_SHORTAGE_PAUSE_S = 0.05
_ACCEPT_TURN = 32
_BUSY_ANSWER = b"HTTP/1.1 %d %s\r\nServer: shoal\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Guest(Protocol):
    """A connection, as the door sees it."""

    def leave_rosters(self) -> None:
        """Count no longer as one of the open connections, now and later."""
        ...


G = TypeVar("G", bound=Guest)


class DoorLimits(Protocol):
    """How many may be in."""

    @property
    def max_connections(self) -> int: ...

    @property
    def per_peer_connections(self) -> int: ...

    @property
    def grace_seconds(self) -> float: ...


class DoorMetrics(Protocol):
    """What the door counts."""

    requests: Counter
    """by status"""
    accepted: Counter
    evicted: Counter
    refused: Counter
    """by reason"""
    cut: Counter
    """by reason; the door's own is `bug`"""


class Neighbours(NamedTuple, Generic[G]):
    """The connections of one address."""

    roster: Roster[G]
    is_limited: bool
    """whether they are counted at all"""


class House(Protocol[G]):
    """What stands behind a door."""

    def find_neighbours(self, address: str) -> Neighbours[G]:
        """The connections of an address."""
        ...

    def seat_guest(self, sock: socket.socket, address: tuple[str, int]) -> G:
        """Put a connection into the rosters, that of its address too; `OSError` if it is gone already."""
        ...

    async def serve_guest(self, guest: G) -> None:
        """All of a connection's life."""
        ...

    def release_guest(self, guest: G) -> None:
        """Close a connection and take it out of the rosters, whatever its end was."""
        ...


class Door(Generic[G]):
    """Lets connections in on one address."""

    def __init__(
        self, house: House[G], roster: Roster[G], *, limits: DoorLimits, metrics: DoorMetrics, is_plain: bool = True
    ) -> None:
        """`is_plain`: who is refused can be told so in HTTP, for the connection is not encrypted."""
        self._house, self._roster = house, roster
        self._limits, self._metrics, self._is_plain = limits, metrics, is_plain
        self._tasks: dict[G, asyncio.Task[None]] = {}
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.is_closing = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        assert self._listener is not None, "a server has an address once it has started"
        host, port = self._listener.getsockname()[:2]
        return host, port

    async def start(self, host: str, port: int) -> None:
        """Listen; `ConfigError` says why that cannot be."""
        assert self._listener is None, "a server starts once"
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"port {port}: must be from 0 (any that is free) to 65535")
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self._listener = _listen(found[0][0], found[0][4])
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "no name of a host"
            raise ConfigError(f"{host}:{port}: cannot listen there ({reason})") from None
        self._accepting = asyncio.create_task(self._accept_all(self._listener))
        self._accepting.add_done_callback(lambda task: self._tell_bug(task, "accepting"))

    async def close(self) -> None:
        """Stop accepting, let those who are served go on for the grace period, then end all."""
        self.is_closing = True
        if self._accepting is not None and self._listener is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._listener.close()
        _cancel_all(task for guest, task in self._tasks.items() if not self._roster.has_member(guest, Phase.BUSY))
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=self._limits.grace_seconds)
        _cancel_all(self._tasks.values())
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _accept_all(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        count = 0
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:
                # A peer that is gone already is no matter. A shortage stays until somebody closes something.
                if error.errno in _SHORTAGE:
                    self._evict_one(self._roster)
                    await asyncio.sleep(_SHORTAGE_PAUSE_S)
                continue
            count += 1
            self._metrics.accepted.add()
            self._admit_socket(sock, (address[0], address[1]))
            if count % _ACCEPT_TURN == 0:
                await asyncio.sleep(0)  # a flood of connections must leave a turn to those that are being served

    def _admit_socket(self, sock: socket.socket, address: tuple[str, int]) -> None:
        """Make room for a connection and serve it, or refuse it."""
        neighbours = self._house.find_neighbours(address[0])
        if neighbours.is_limited and len(neighbours.roster) >= self._limits.per_peer_connections:
            if not self._evict_one(neighbours.roster):
                self._refuse_socket(sock, 429, b"Too Many Requests", "peer")
                return
        elif len(self._roster) >= self._limits.max_connections and not self._evict_one(self._roster):
            self._refuse_socket(sock, 503, b"Service Unavailable", "full")
            return
        try:
            guest = self._house.seat_guest(sock, address)
        except OSError:  # reset before we looked at it
            sock.close()
            return
        task = asyncio.create_task(self._house.serve_guest(guest))
        self._tasks[guest] = task
        task.add_done_callback(lambda done: self._end_guest(guest, done))

    def _evict_one(self, roster: Roster[G]) -> bool:
        guest = roster.find_victim()
        if guest is None:
            return False
        self._metrics.evicted.add()
        guest.leave_rosters()
        self._tasks[guest].cancel()
        return True

    def _refuse_socket(self, sock: socket.socket, status: int, phrase: bytes, reason: str) -> None:
        """Say no without waiting for anything: there is no place to wait in."""
        self._metrics.refused.add(label=reason)
        self._metrics.requests.add(label=str(status))
        if self._is_plain:
            with suppress(OSError):  # best effort; whoever does not get it sees a closed connection
                sock.setblocking(False)
                sock.send(_BUSY_ANSWER % (status, phrase))
        sock.close()

    def _end_guest(self, guest: G, task: "asyncio.Task[None]") -> None:
        self._house.release_guest(guest)
        del self._tasks[guest]
        self._tell_bug(task, "a connection")

    def _tell_bug(self, task: "asyncio.Task[None]", what: str) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._metrics.cut.add(label="bug")
            context = {"message": f"{what} ended by a bug", "exception": error, "task": task}
            asyncio.get_running_loop().call_exception_handler(context)


def _cancel_all(tasks: "Iterable[asyncio.Task[None]]") -> None:
    for task in list(tasks):
        task.cancel()


def _listen(family: int, address: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
