"""The HTTP server of the control plane: runs an ASGI app so that no peer can hold it up for the others.

Invariants:
- the number of open connections never passes the limits; a new one takes the place of one that is not being served,
  first of those that never sent a whole request, and is refused only if all others are being served;
- a TLS handshake counts as a part of the first head, in time and in place;
- whatever a peer does ends its own connection at most; accepting goes on, also when descriptors run out;
- a bug of the app ends that connection, is counted, and goes to the loop's exception handler, never to the peer.

Life cycle: start -> (connections come and go) -> close: no new ones, idle ones end at once, requests have a grace
period. The app's own start and end are its maker's business: no lifespan events are sent.
"""

import asyncio
import errno
import socket
import ssl
from contextlib import suppress
from pathlib import Path

from shoal.errors import ConfigError
from shoal.shardcast.http import HttpError
from shoal.shardcast.limits import Phase, Roster, name_peer
from shoal.shardcast.metrics import Registry
from shoal.swarm.exchange import App, Exchange, HttpLimits, HttpMetrics, Seat
from shoal.swarm.wire import Wire

BACKLOG = 1024
_SHORTAGE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_SHORTAGE_PAUSE_S = 0.05
_ACCEPT_TURN = 32
_BUSY_ANSWER = b"HTTP/1.1 %d %s\r\nServer: shoal\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Server:
    """Serves one app on one address."""

    def __init__(
        self,
        app: App,
        *,
        limits: HttpLimits | None = None,
        registry: Registry | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._app = app
        self._limits = limits or HttpLimits()
        self._tls = tls
        registry = registry or Registry()
        self.metrics = HttpMetrics(registry)
        registry.add_gauge("shoal_connections", "Open connections.", lambda: len(self._roster))
        self._roster: Roster[Seat] = Roster()
        self._peers: dict[str, Roster[Seat]] = {}
        self._exchanges: dict[Seat, Exchange] = {}
        self._tasks: dict[Seat, asyncio.Task[None]] = {}
        self._closing = False
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

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
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._roster)

    async def close(self) -> None:
        """Stop accepting, let requests go on for the grace period, then end all."""
        self._closing = True
        if self._accepting is not None and self._listener is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._listener.close()
        for exchange in self._exchanges.values():
            exchange.is_last = True
        for seat, task in list(self._tasks.items()):
            if not self._roster.has_member(seat, Phase.BUSY):
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
            self._admit_socket(sock, (address[0], address[1]))
            if count % _ACCEPT_TURN == 0:
                await asyncio.sleep(0)  # a flood of connections must leave a turn to those that are being served

    def _admit_socket(self, sock: socket.socket, address: tuple[str, int]) -> None:
        """Make room for a connection and serve it, or refuse it."""
        name, is_loopback = name_peer(address[0])
        peer = self._peers.get(name) or Roster()
        is_limited = not (is_loopback and self._limits.trust_loopback)
        if is_limited and len(peer) >= self._limits.per_peer_connections:
            if not self._evict_one(peer):
                self._refuse_socket(sock, 429, b"Too Many Requests", "peer")
                return
        elif len(self._roster) >= self._limits.max_connections and not self._evict_one(self._roster):
            self._refuse_socket(sock, 503, b"Service Unavailable", "full")
            return
        self._peers[name] = peer
        seat = Seat(self._roster, peer)
        task = asyncio.create_task(self._serve_socket(sock, seat, address))
        self._tasks[seat] = task
        task.add_done_callback(lambda done: self._end_connection(seat, name, done))

    def _evict_one(self, roster: Roster[Seat]) -> bool:
        seat = roster.find_victim()
        if seat is None:
            return False
        self.metrics.evicted.add()
        seat.leave()
        self._tasks[seat].cancel()
        return True

    def _refuse_socket(self, sock: socket.socket, status: int, phrase: bytes, reason: str) -> None:
        """Say no without waiting for anything: there is no place to wait in."""
        self.metrics.refused.add(label=reason)
        self.metrics.requests.add(label=str(status))
        if self._tls is None:
            with suppress(OSError):  # best effort; whoever does not get it sees a closed connection
                sock.setblocking(False)
                sock.send(_BUSY_ANSWER % (status, phrase))
        sock.close()

    async def _serve_socket(self, sock: socket.socket, seat: Seat, address: tuple[str, int]) -> None:
        wire = Wire(min_rate=self._limits.min_rate, window_s=self._limits.window_seconds)
        try:
            await self._connect_wire(wire, sock)
            await self._serve_wire(wire, seat, address)
            wire.close()
        except HttpError as error:
            self.metrics.cut.add(label="slow" if error.status == 408 else "http")
        except TimeoutError:
            self.metrics.cut.add(label="late")
        except OSError:
            self.metrics.cut.add(label="lost")
        finally:
            wire.abort()  # nothing of ours is left to send: what was sent, the kernel has
            sock.close()

    async def _connect_wire(self, wire: Wire, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        handshake_s = None if self._tls is None else self._limits.header_seconds
        await loop.connect_accepted_socket(lambda: wire, sock, ssl=self._tls, ssl_handshake_timeout=handshake_s)

    async def _serve_wire(self, wire: Wire, seat: Seat, address: tuple[str, int]) -> None:
        exchange = Exchange(wire, seat, self._app, address=address, limits=self._limits, metrics=self.metrics)
        exchange.is_last = self._closing
        self._exchanges[seat] = exchange
        try:
            await exchange.serve_requests()
        finally:
            del self._exchanges[seat]

    def _end_connection(self, seat: Seat, name: str, task: "asyncio.Task[None]") -> None:
        """Give the place free, whatever the end was. What nobody expected is a bug of ours, told to the loop."""
        seat.leave()
        del self._tasks[seat]
        peer = self._peers.get(name)
        if peer is not None and not len(peer):
            del self._peers[name]
        self._tell_bug(task, "a connection")

    def _tell_bug(self, task: "asyncio.Task[None]", what: str) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.metrics.cut.add(label="bug")
            context = {"message": f"{what} ended by a bug", "exception": error, "task": task}
            asyncio.get_running_loop().call_exception_handler(context)


def load_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """A server's TLS from two PEM files: the certificate with its chain, and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{certificate}, {key}: no certificate and key for TLS ({error.strerror or error})") from None
    return context


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
