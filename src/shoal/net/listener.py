"""Accepts connections, within limits, for any kind of server.

Invariants:
- the number of open connections never exceeds the limits; a new one replaces one that is not being served
  (`limits.ConnectionTable` decides which), and is refused only if all others are being served;
- whatever a peer does ends at most its own connection; accepting continues, also when descriptors run out;
- an unexpected exception of a connection is a bug of ours: it ends that connection, is counted, and goes to the loop's
  exception handler, never to the peer.

Life cycle: start -> (connections come and go) -> close: no new ones, idle ones end at once, the others have a grace
period.
"""

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress

from shoal.errors import ConfigError, UnavailableError
from shoal.net.limits import AddressTable, ConnectionSlot, ConnectionTable, HttpLimits, Phase, ServeLimits
from shoal.net.sockets import phrase_error
from shoal.util.metrics import ServerMetrics

BACKLOG = 1024
_SHORTAGE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_SHORTAGE_PAUSE_S = 0.05
_ACCEPT_BATCH = 32
_BUSY_ANSWER = b"HTTP/1.1 %d %s\r\nServer: shoal\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


Serve = Callable[[socket.socket, ConnectionSlot], Coroutine[None, None, None]]
"""Serves one connection from its first byte to its last; cancelled when it is evicted."""


class Listener:
    """Accepts connections on one address."""

    def __init__(
        self,
        serve: Serve,
        *,
        limits: HttpLimits | ServeLimits,
        metrics: ServerMetrics,
        is_plain: bool = True,
        peer_rate: int | None = None,
    ) -> None:
        """`is_plain`: the connection is not encrypted, so a refusal can be sent as HTTP."""
        self._serve, self._limits, self._metrics, self._is_plain = serve, limits, metrics, is_plain
        self.connections = ConnectionTable()
        clock = asyncio.get_running_loop().time
        self.addresses = AddressTable(clock, trust_loopback=limits.trust_loopback, peer_rate=peer_rate)
        self._tasks: dict[ConnectionSlot, asyncio.Task[None]] = {}
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.is_closing = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the listening socket."""
        assert self._socket is not None, "a server has no address before start()"
        host, port = self._socket.getsockname()[:2]
        return host, port

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Start listening; `UnavailableError` if another process has the port, else `ConfigError` if that fails."""
        assert self._socket is None, "a server starts once"
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"port {port}: must be between 0 (any free port) and 65535")
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, address = found[0][0], found[0][4]
            self._socket = socket.create_server(
                address, family=family, backlog=BACKLOG, dualstack_ipv6=family == socket.AF_INET6
            )
            self._socket.setblocking(False)
        except (OSError, UnicodeError) as error:
            reason = "invalid host name" if isinstance(error, UnicodeError) else phrase_error(error)
            is_in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            kind = UnavailableError if is_in_use else ConfigError
            raise kind(f"{host}:{port}: cannot listen on this address ({reason})") from None
        self._accepting = asyncio.create_task(self._accept_all(self._socket))
        self._accepting.add_done_callback(lambda task: self._report_bug(task, "accepting"))

    async def close(self) -> None:
        """Stop accepting, give connections that are being served the grace period, then end all."""
        self.is_closing = True
        if self._accepting is not None and self._socket is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._socket.close()
        served = (Phase.BUSY, Phase.UNVERIFIED)
        idle = (slot for slot in self._tasks if not any(self.connections.has_member(slot, phase) for phase in served))
        _cancel_all([self._tasks[slot] for slot in idle])
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
                # A peer that has already disconnected does not matter. A shortage of descriptors lasts until something
                # is closed.
                if error.errno in _SHORTAGE:
                    self._evict_one(self.connections)
                    await asyncio.sleep(_SHORTAGE_PAUSE_S)
                continue
            count += 1
            self._metrics.accepted.inc()
            self._admit(sock, (address[0], address[1]))
            if count % _ACCEPT_BATCH == 0:
                await asyncio.sleep(0)  # keep a flood of connections from starving those being served

    def _admit(self, sock: socket.socket, address: tuple[str, int]) -> None:
        """Serve a connection, evicting another one if there are too many, or refuse it."""
        usage = self.addresses.find(address[0])
        if not usage.is_trusted and len(usage.connections) >= self._limits.per_peer_connections:
            if not self._evict_one(usage.connections):
                self._refuse(sock, 429, b"Too Many Requests", "peer")
                return
        elif len(self.connections) >= self._limits.max_connections and not self._evict_one(self.connections):
            self.addresses.release(usage)
            self._refuse(sock, 503, b"Service Unavailable", "full")
            return
        slot = ConnectionSlot(address, self.connections, usage)
        task: asyncio.Task[None] = asyncio.create_task(self._serve(sock, slot))
        self._tasks[slot] = task
        task.add_done_callback(lambda done: self._end(sock, slot, done))

    def _evict_one(self, connections: ConnectionTable) -> bool:
        slot = connections.find_evictable()
        if slot is None:
            return False
        self._metrics.evicted.inc()
        slot.leave()
        self._tasks[slot].cancel()
        return True

    def _refuse(self, sock: socket.socket, status: int, phrase: bytes, reason: str) -> None:
        """Refuse a connection without waiting for anything, since it has no slot."""
        self._metrics.refused.labels(reason).inc()
        self._metrics.requests.labels(str(status)).inc()
        if self._is_plain:
            with suppress(OSError):  # best effort: otherwise the peer sees a closed connection
                sock.setblocking(False)
                sock.send(_BUSY_ANSWER % (status, phrase))
        sock.close()

    def _end(self, sock: socket.socket, slot: ConnectionSlot, task: "asyncio.Task[None]") -> None:
        slot.leave()
        sock.close()
        self.addresses.release(slot.usage)
        del self._tasks[slot]
        self._report_bug(task, "a connection")

    def _report_bug(self, task: "asyncio.Task[None]", what: str) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._metrics.cut.labels("bug").inc()
            context = {"message": f"{what} ended by an unexpected exception", "exception": error, "task": task}
            asyncio.get_running_loop().call_exception_handler(context)


def _cancel_all(tasks: "Iterable[asyncio.Task[None]]") -> None:
    for task in list(tasks):
        task.cancel()
