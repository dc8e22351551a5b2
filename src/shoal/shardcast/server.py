"""The HTTP server of an origin or a relay: accepts connections, keeps them within limits, ends them in order.

Invariants:
- the number of open connections never passes the limits; a new one takes the place of an idle one (limits.Roster), and
  is refused only if all others are being served;
- whatever a peer does ends its own connection at most; accepting goes on, also when descriptors run out;
- a bug in an answer ends that connection, is counted, and goes to the loop's exception handler, never to the peer.

Life cycle: start -> (connections come and go) -> close: no new ones, idle ones end at once, transfers have a grace
period.
"""

import asyncio
import errno
import socket
from contextlib import suppress

from shoal.errors import ConfigError
from shoal.shardcast.answers import send_refusal
from shoal.shardcast.connection import Connection, CutError
from shoal.shardcast.http import HttpError, Url
from shoal.shardcast.limits import Bucket, PeerTable, Phase, Roster, ServeLimits
from shoal.shardcast.metrics import Registry, ServeMetrics
from shoal.shardcast.routes import Announce, Describe, Routes
from shoal.shardcast.shards import Want
from shoal.shardcast.store import Store
from shoal.shardcast.tickets import TicketBook

BACKLOG = 1024
_SHORTAGE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_SHORTAGE_PAUSE_S = 0.05
_ACCEPT_TURN = 32
_BUSY_ANSWER = b"HTTP/1.1 %d %s\r\nServer: shoal\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Server:
    """Serves one store on one address."""

    def __init__(
        self,
        store: Store,
        *,
        limits: ServeLimits | None = None,
        want: Want | None = None,
        announce: Announce = lambda _: True,
        tickets: TicketBook | None = None,
        role: str = "origin",
        registry: Registry | None = None,
        describe: Describe | None = None,
    ) -> None:
        clock = asyncio.get_running_loop().time
        self._limits = limits or ServeLimits()
        self.registry = registry or Registry()
        self.metrics = ServeMetrics(self.registry, clock)
        self._roster: Roster[Connection] = Roster()
        self._peers: PeerTable[Connection] = PeerTable(self._limits, clock)
        self._bucket = None if self._limits.rate is None else Bucket(self._limits.rate, clock)
        self._tasks: dict[Connection, asyncio.Task[None]] = {}
        self._closing = False
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._routes = Routes(
            store,
            limits=self._limits,
            registry=self.registry,
            metrics=self.metrics,
            role=role,
            want=want,
            announce=announce,
            tickets=tickets,
            describe=describe,
            list_peers=self._list_peers,
        )
        self._add_gauges(store)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
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

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        assert self._listener is not None, "a server has an address once it has started"
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def url(self) -> Url:
        """The address as a client writes it."""
        return Url(*self.address)

    async def close(self) -> None:
        """Stop accepting, let transfers go on for the grace period, then end all."""
        self._closing = True
        if self._accepting is not None and self._listener is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._listener.close()
        for conn, task in list(self._tasks.items()):
            if not self._roster.has_member(conn, Phase.BUSY):
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=self._limits.grace_seconds)
        for task in self._tasks.values():
            task.cancel()
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
            self.metrics.accepted.add()
            self._admit_socket(sock, address[0])
            if count % _ACCEPT_TURN == 0:
                await asyncio.sleep(0)  # a flood of connections must leave a turn to those that are being served

    def _admit_socket(self, sock: socket.socket, address: str) -> None:
        """Make room for a connection and serve it, or refuse it."""
        peer = self._peers.find_peer(address)
        if not peer.is_trusted and len(peer.roster) >= self._limits.per_peer_connections:
            if not self._evict_one(peer.roster):
                self._refuse_socket(sock, 429, b"Too Many Requests", "peer")
                return
        elif len(self._roster) >= self._limits.max_connections and not self._evict_one(self._roster):
            self._refuse_socket(sock, 503, b"Service Unavailable", "full")
            return
        try:
            conn = Connection(
                sock, peer, limits=self._limits, metrics=self.metrics, roster=self._roster, bucket=self._bucket
            )
        except OSError:  # reset before we looked at it
            sock.close()
            return
        task = asyncio.create_task(self._serve_connection(conn))
        self._tasks[conn] = task
        task.add_done_callback(lambda done: self._end_connection(conn, done))

    def _evict_one(self, roster: Roster[Connection]) -> bool:
        conn = roster.find_victim()
        if conn is None:
            return False
        self.metrics.evicted.add()
        conn.leave_rosters()
        self._tasks[conn].cancel()
        return True

    def _refuse_socket(self, sock: socket.socket, status: int, phrase: bytes, reason: str) -> None:
        """Say no without waiting for anything: there is no place to wait in."""
        self.metrics.refused.add(label=reason)
        self.metrics.requests.add(label=str(status))
        with suppress(OSError):  # best effort; whoever does not get it sees a closed connection
            sock.setblocking(False)
            sock.send(_BUSY_ANSWER % (status, phrase))
        sock.close()

    async def _serve_connection(self, conn: Connection) -> None:
        try:
            await self._serve_requests(conn)
        except HttpError as error:
            await self._send_last(conn, error)
        except CutError as error:
            self.metrics.cut.add(label=str(error))
        except TimeoutError:
            self.metrics.cut.add(label="late")
        except OSError:
            self.metrics.cut.add(label="lost")

    async def _serve_requests(self, conn: Connection) -> None:
        first_s = self._limits.header_seconds
        while (request := await conn.read_request(first_s)) is not None:
            conn.end_request()
            await self._routes.answer_request(conn, request)
            if self._closing or not conn.start_next():
                await conn.linger()
                return
            first_s = self._limits.idle_seconds
            await asyncio.sleep(0)  # who has many requests in the pipe must not keep the others waiting

    async def _send_last(self, conn: Connection, error: HttpError) -> None:
        """Answer what was no request of ours, and close."""
        if conn.started:
            return
        try:
            await send_refusal(conn, error.status, "not a request that is served here", ("Connection", "close"))
            await conn.linger()
        except (OSError, CutError):
            self.metrics.cut.add(label="lost")

    def _end_connection(self, conn: Connection, task: "asyncio.Task[None]") -> None:
        """Close, whatever the end was. What nobody expected is a bug of ours: told to the loop, not to the peer."""
        conn.close()
        del self._tasks[conn]
        self._tell_bug(task, "a connection")

    def _tell_bug(self, task: "asyncio.Task[None]", what: str) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.metrics.cut.add(label="bug")
            context = {"message": f"{what} ended by a bug", "exception": error, "task": task}
            asyncio.get_running_loop().call_exception_handler(context)

    def _list_peers(self) -> list[dict[str, object]]:
        return [
            {
                "address": peer.name,
                "connections": len(peer.roster),
                "sent_bytes": peer.sent_bytes,
                "version": peer.version,
            }
            for peer in self._peers.list_peers()
        ]

    def _add_gauges(self, store: Store) -> None:
        add = self.registry.add_gauge
        add("shoal_connections", "Open connections.", lambda: len(self._roster))
        add("shoal_versions", "Versions held, complete or not.", lambda: len(store.entries()))
        add("shoal_newest_version", "Newest version known.", lambda: _last_version(store, False))
        add("shoal_complete_version", "Newest version held completely.", lambda: _last_version(store, True))
        add("shoal_have_bytes", "Verified bytes held.", lambda: _count_have(store))


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


def _last_version(store: Store, complete: bool) -> float | None:
    versions = [entry.version for entry in store.entries() if entry.complete or not complete]
    return versions[-1] if versions else None


def _count_have(store: Store) -> int:
    blobs = [blob for entry in store.entries() for blob in (entry.full, entry.delta) if blob is not None]
    return sum(blob.have_bytes for blob in blobs)
