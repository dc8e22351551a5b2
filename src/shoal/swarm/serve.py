"""The HTTP server of the control plane: runs an ASGI app so that no peer can hold it up for the others.

Invariants, besides those of the door that lets connections in (net.door):
- of those that are not being served the first to give way are those that never sent a whole request;
- a TLS handshake counts as a part of the first head, in time and in place;
- a bug of the app ends that connection, is counted, and goes to the loop's exception handler, never to the peer.

Life cycle: start -> (connections come and go) -> close: no new ones, idle ones end at once, requests have a grace
period. The app's own start and end are its maker's business: no lifespan events are sent.
"""

import asyncio
import socket
import ssl
from pathlib import Path

from shoal.errors import ConfigError
from shoal.net.door import Door, Neighbours
from shoal.shardcast.http import HttpError
from shoal.shardcast.limits import Roster, name_peer
from shoal.shardcast.metrics import Registry
from shoal.swarm.exchange import App, Exchange, HttpLimits, HttpMetrics, Seat
from shoal.swarm.wire import HELD_BYTES, Wire


class Server:
    """Serves one app on one address."""

    def __init__(
        self,
        app: App,
        *,
        limits: HttpLimits | None = None,
        registry: Registry | None = None,
        tls: ssl.SSLContext | None = None,
        held_bytes: int = HELD_BYTES,
    ) -> None:
        """`held_bytes` of each connection are read ahead of the app."""
        self._app = app
        self._held_bytes = held_bytes
        self._limits = limits or HttpLimits()
        self._tls = tls
        registry = registry or Registry()
        self.metrics = HttpMetrics(registry)
        registry.add_gauge("shoal_connections", "Open connections.", lambda: len(self._roster))
        self._roster: Roster[Seat] = Roster()
        self._peers: dict[str, Roster[Seat]] = {}
        self._sockets: dict[Seat, socket.socket] = {}
        self._exchanges: dict[Seat, Exchange] = {}
        self._door = Door(self, self._roster, limits=self._limits, metrics=self.metrics, is_plain=tls is None)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; `ConfigError` says why that cannot be."""
        await self._door.start(host, port)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        return self._door.address

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._roster)

    async def close(self) -> None:
        """Stop accepting, let requests go on for the grace period, then end all."""
        for exchange in self._exchanges.values():
            exchange.is_last = True
        await self._door.close()

    def find_neighbours(self, address: str) -> Neighbours[Seat]:
        """As `House.find_neighbours`."""
        name, is_loopback = name_peer(address)
        return Neighbours(self._peers.get(name) or Roster(), not (is_loopback and self._limits.trust_loopback))

    def seat_guest(self, sock: socket.socket, address: tuple[str, int]) -> Seat:
        """As `House.seat_guest`."""
        seat = Seat(self._roster, self._peers.setdefault(name_peer(address[0])[0], Roster()), address=address)
        self._sockets[seat] = sock
        return seat

    async def serve_guest(self, guest: Seat) -> None:
        """As `House.serve_guest`."""
        sock = self._sockets[guest]
        wire = Wire(min_rate=self._limits.min_rate, window_s=self._limits.window_seconds, held_bytes=self._held_bytes)
        try:
            await self._connect_wire(wire, sock)
            await self._serve_wire(wire, guest)
            wire.close()
        except HttpError as error:
            self.metrics.cut.add(label="slow" if error.status == 408 else "http")
        except TimeoutError:
            self.metrics.cut.add(label="late")
        except OSError:
            self.metrics.cut.add(label="lost")
        finally:
            wire.abort()  # nothing of ours is left to send: what was sent, the kernel has

    def release_guest(self, guest: Seat) -> None:
        """As `House.release_guest`."""
        guest.leave_rosters()
        self._sockets.pop(guest).close()
        name = name_peer(guest.address[0])[0]
        if not self._peers.get(name):
            self._peers.pop(name, None)

    async def _connect_wire(self, wire: Wire, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        handshake_s = None if self._tls is None else self._limits.header_seconds
        await loop.connect_accepted_socket(lambda: wire, sock, ssl=self._tls, ssl_handshake_timeout=handshake_s)

    async def _serve_wire(self, wire: Wire, seat: Seat) -> None:
        exchange = Exchange(wire, seat, self._app, address=seat.address, limits=self._limits, metrics=self.metrics)
        exchange.is_last = self._door.is_closing
        self._exchanges[seat] = exchange
        try:
            await exchange.serve_requests()
        finally:
            del self._exchanges[seat]


def load_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """A server's TLS from two PEM files: the certificate with its chain, and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{certificate}, {key}: no certificate and key for TLS ({error.strerror or error})") from None
    return context
