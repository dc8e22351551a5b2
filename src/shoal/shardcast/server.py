"""The HTTP server of an origin or a relay: accepts connections, keeps them within limits, ends them in order.

The invariants are those of the door that lets connections in (net.door); a bug in an answer ends that connection alone.

Life cycle: start -> (connections come and go) -> close: no new ones, idle ones end at once, transfers have a grace
period.
"""

import asyncio
import socket

from shoal.net.door import Door, Neighbours
from shoal.shardcast.answers import send_refusal
from shoal.shardcast.connection import Connection, CutError
from shoal.shardcast.http import HttpError, Url
from shoal.shardcast.limits import Bucket, PeerTable, Roster, ServeLimits
from shoal.shardcast.metrics import Registry, ServeMetrics
from shoal.shardcast.routes import Announce, Describe, Routes
from shoal.shardcast.shards import Want
from shoal.shardcast.store import Store
from shoal.shardcast.tickets import TicketBook


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
        self._door = Door(self, self._roster, limits=self._limits, metrics=self.metrics)
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
        await self._door.start(host, port)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        return self._door.address

    @property
    def url(self) -> Url:
        """The address as a client writes it."""
        return Url(*self.address)

    async def close(self) -> None:
        """Stop accepting, let transfers go on for the grace period, then end all."""
        await self._door.close()

    def find_neighbours(self, address: str) -> Neighbours[Connection]:
        """As `House.find_neighbours`."""
        peer = self._peers.find_peer(address)
        return Neighbours(peer.roster, not peer.is_trusted)

    def seat_guest(self, sock: socket.socket, address: tuple[str, int]) -> Connection:
        """As `House.seat_guest`."""
        peer = self._peers.find_peer(address[0])
        return Connection(
            sock, peer, limits=self._limits, metrics=self.metrics, roster=self._roster, bucket=self._bucket
        )

    async def serve_guest(self, guest: Connection) -> None:
        """As `House.serve_guest`."""
        try:
            await self._serve_requests(guest)
        except HttpError as error:
            await self._send_last(guest, error)
        except CutError as error:
            self.metrics.cut.add(label=str(error))
        except TimeoutError:
            self.metrics.cut.add(label="late")
        except OSError:
            self.metrics.cut.add(label="lost")

    def release_guest(self, guest: Connection) -> None:
        """As `House.release_guest`."""
        guest.close()

    async def _serve_requests(self, conn: Connection) -> None:
        first_s = self._limits.header_seconds
        while (request := await conn.read_request(first_s)) is not None:
            conn.end_request()
            await self._routes.answer_request(conn, request)
            if self._door.is_closing or not conn.start_next():
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


def _last_version(store: Store, complete: bool) -> float | None:
    versions = [entry.version for entry in store.entries() if entry.complete or not complete]
    return versions[-1] if versions else None


def _count_have(store: Store) -> int:
    blobs = [blob for entry in store.entries() for blob in (entry.full, entry.delta) if blob is not None]
    return sum(blob.have_bytes for blob in blobs)
