"""The HTTP server of an origin or a relay: one method per route, all of them lookups.

Connections are accepted and limited as by any `net.listener`; a bug while responding ends only that connection.

Invariants:
- a target is a path of printable ASCII and a query of numbers. Nothing is decoded: no percent signs, no dots, no
  alternative spellings;
- no part of a request becomes a file path: versions, digests, blobs and numbers are matched by strict patterns and
  looked up in the store. Anything that matches no route is 404, and there are no directory listings;
- a refusal is one short line of our own text; nothing of the request is repeated in it;
- only versions that pass `announce` are listed; other versions in the store are served to clients that know of them;
- a shard is sent as far as the store permits (`Blob.ready`), in bytes of one writer only. If that writer gives up, or
  nothing arrives for too long, the connection is closed early;
- a missing shard is requested (`Want`) exactly as long as the client's request lives: it ends when the client
  disconnects.

Life cycle: start -> (connections come and go) -> close: no new ones, idle ones end at once, transfers have a grace
period.
"""

import asyncio
import re
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import h11
from prometheus_client import CollectorRegistry

from shoal.net.http import HttpError, Url, parse_count
from shoal.net.limits import Bucket, ConnectionSlot, ServeLimits
from shoal.net.listener import Listener
from shoal.net.sockets import start_tls
from shoal.shardcast.errors import ShardError
from shoal.shardcast.format.manifest import FULL
from shoal.shardcast.serve.connection import (
    BYTES,
    LINES,
    AbortedResponseError,
    Connection,
    send_json,
    send_refusal,
)
from shoal.shardcast.store.blob import Blob
from shoal.shardcast.store.store import StoredVersion, VersionStore
from shoal.shardcast.tickets import Ticket, TicketError, TicketTable
from shoal.util.metrics import METRICS_TYPE, ServeMetrics, add_gauge, render_metrics

MAX_PROBE_BYTES = 1 << 20
MAX_TARGET_BYTES = 1024
_RANGE = re.compile(r"bytes=([0-9]{1,19})-([0-9]{1,19})?")
_BATCH_BYTES = 1 << 16
_VERSION_PATH = re.compile(
    r"/v/(?P<version>[0-9]{1,19})/(?P<digest>[0-9a-f]{16})/(?:manifest|(?P<blob>full|delta)/(?P<index>[0-9]{1,7}))"
)

Announce = Callable[[StoredVersion], bool]
"""Whether a version is listed."""
Describe = Callable[[], Mapping[str, object]]
"""Further fields of /status, shown only to this machine."""
Want = Callable[[Blob, int, str], AbstractContextManager[object] | None]
"""Called for a shard that is not here yet: (blob, index, name of the peer). The shard is wanted while the block
runs; None if it will never be here.
"""


class RefusalError(Exception):
    """A refused request: status, reason and headers."""

    def __init__(self, status: int, reason: str, *headers: tuple[str, str]) -> None:
        super().__init__(reason)
        self.status = status
        self.headers = headers


@dataclass(frozen=True)
class RequestTarget:
    """The parsed target of a request."""

    path: str
    query: Mapping[str, int]

    def read_query(self, **defaults: int) -> list[int]:
        """The requested numbers, in the order of their defaults; unknown keys are refused."""
        if not self.query.keys() <= defaults.keys():
            raise RefusalError(400, "unknown query")
        return [self.query.get(key, default) for key, default in defaults.items()]


def parse_target(target: bytes) -> RequestTarget:
    """Parse a path of printable ASCII and a query of numbers, each key once; `RefusalError` otherwise."""
    if len(target) > MAX_TARGET_BYTES:
        raise RefusalError(414, "target too long")
    if not target.startswith(b"/") or not target.isascii():
        raise RefusalError(400, "the target must be a path")
    path, mark, text = target.decode("ascii").partition("?")
    query: dict[str, int] = {}
    for pair in text.split("&") if mark else ():
        key, _, digits = pair.partition("=")
        number = parse_count(digits)
        if number is None or key in query:
            raise RefusalError(400, "query values must be numbers")
        query[key] = number
    return RequestTarget(path, query)


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and end of the requested range; None for the whole, also for unsupported kinds of ranges."""
    match = _RANGE.fullmatch(header or "")
    if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
        return None
    first = int(match[1])
    if first >= size:
        raise RefusalError(416, "range beyond the end", ("Content-Range", f"bytes */{size}"))
    return first, size if match[2] is None else min(size, int(match[2]) + 1)


@dataclass(frozen=True)
class _ShardRange:
    """The bytes of a shard for a response, and the writer they come from."""

    blob: Blob
    index: int
    first: int
    end: int
    attempt: int

    def is_valid(self) -> bool:
        """Whether the bytes still come from the same writer as when the response began."""
        return self.blob.claims.attempt(self.index) == self.attempt and self.blob.ready(self.index) > 0


class ShardServer(Listener):
    """Serves one store on one address."""

    def __init__(
        self,
        store: VersionStore,
        *,
        limits: ServeLimits | None = None,
        want: Want | None = None,
        announce: Announce = lambda _: True,
        tickets: TicketTable | None = None,
        role: str = "origin",
        describe: Describe = dict,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        clock = asyncio.get_running_loop().time
        self.limits, self._tls = limits or ServeLimits(), tls
        self._store, self._tickets, self._role = store, tickets, role
        self._want, self._announce, self._describe = want, announce, describe
        self.registry = CollectorRegistry()
        self.metrics = ServeMetrics(self.registry, clock)
        self._bucket = None if self.limits.rate is None else Bucket(self.limits.rate, clock)
        super().__init__(
            self._serve_connection,
            limits=self.limits,
            metrics=self.metrics,
            is_plain=tls is None,
            peer_rate=self.limits.peer_rate,
        )
        self._add_gauges(store)

    @property
    def url(self) -> Url:
        """The address for clients."""
        return Url(*self.address, "http" if self._tls is None else "https")

    async def _serve_connection(self, sock: socket.socket, slot: ConnectionSlot) -> None:
        try:
            if self._tls is not None:
                sock.setblocking(False)
                async with asyncio.timeout(self.limits.header_seconds):
                    sock = await start_tls(sock, self._tls)
            conn = Connection(sock, slot, limits=self.limits, metrics=self.metrics, bucket=self._bucket)
            try:
                await self._serve_requests(conn)
            except HttpError as error:  # answer an invalid request, then close the connection
                if not conn.started:
                    await send_refusal(conn, error.status, "not a request that is served here", ("Connection", "close"))
                    await conn.linger()
        except AbortedResponseError as error:
            self.metrics.cut.labels(str(error)).inc()
        except TimeoutError:
            self.metrics.cut.labels("late").inc()
        except OSError:
            self.metrics.cut.labels("lost").inc()
        finally:
            sock.close()  # the listener closes the accepted socket, which TLS has replaced

    async def _serve_requests(self, conn: Connection) -> None:
        first_s = self.limits.header_seconds
        while (request := await conn.read_request(first_s)) is not None:
            await self._answer_request(conn, request)
            if self.is_closing or not conn.start_next():
                await conn.linger()
                return
            first_s = self.limits.idle_seconds
            await asyncio.sleep(0)  # a client that pipelines many requests must not starve others

    async def _answer_request(self, conn: Connection, request: h11.Request) -> None:
        """Respond to one request, possibly with a refusal."""
        try:
            await self._route_request(conn, request)
        except RefusalError as refusal:
            await send_refusal(conn, refusal.status, str(refusal), *refusal.headers)
        except TicketError as error:
            challenge = [("WWW-Authenticate", "Shoal")] if error.status == 401 else []
            await send_refusal(conn, error.status, str(error), *challenge)

    async def _route_request(self, conn: Connection, request: h11.Request) -> None:
        if request.method != b"GET":
            raise RefusalError(405, "only GET", ("Allow", "GET"))
        target = parse_target(request.target)
        headers = {name: value.decode("latin-1") for name, value in request.headers}
        if (answer := _OPEN.get(target.path)) is not None:
            target.read_query()
            await answer(self, conn)
            return
        ticket = self._tickets.check_header(headers.get(b"authorization")) if self._tickets else None
        if target.path == "/versions":
            await self._answer_versions(conn, *target.read_query(after=-1, wait=0))
        elif target.path == "/probe":
            await self._answer_probe(conn, ticket, *target.read_query(bytes=MAX_PROBE_BYTES))
        elif (match := _VERSION_PATH.fullmatch(target.path)) is not None:
            entry = self._find_entry(match["version"], match["digest"])
            if match["blob"] is None:
                await self._answer_manifest(conn, entry, *target.read_query(**{"from": 0}))
            else:
                target.read_query()
                with entry.hold():
                    index, span = _take_count(match["index"]), headers.get(b"range")
                    await self._answer_shard(conn, entry, match["blob"], index, span, ticket)
        else:
            raise RefusalError(404, "not found")

    async def _answer_health(self, conn: Connection) -> None:
        fields = {
            "ok": True,
            "role": self._role,
            "run": self._store.run,
            "newest": _last_version(self._store, False),
            "complete": _last_version(self._store, True),
        }
        await send_json(conn, fields)

    async def _answer_metrics(self, conn: Connection) -> None:
        await conn.send_answer(200, render_metrics(self.registry), METRICS_TYPE)

    async def _answer_status(self, conn: Connection) -> None:
        fields: dict[str, object] = {
            "role": self._role,
            "run": self._store.run,
            "sent_bytes": self.metrics.sent.total,
            "sent_rate": round(self.metrics.window.rate),
            "transfers": self.metrics.transfers,
            "versions": [_describe_entry(entry) for entry in self._store.entries()],
        }
        if conn.peer.is_trusted:
            fields["peers"] = self._list_peers()
            fields.update(self._describe())
        await send_json(conn, fields)

    async def _answer_versions(self, conn: Connection, after: int, wait_s: int) -> None:
        deadline_s = _now() + min(wait_s, self.limits.poll_seconds)
        while not (heads := self._list_heads(after)) and (left_s := deadline_s - _now()) > 0:
            await conn.wait_parked(self._store.changed.wait(), left_s)
        await conn.send_answer(200, b"".join(heads), LINES)

    def _list_heads(self, after: int) -> list[bytes]:
        entries = [entry for entry in self._store.entries() if entry.serial > after and self._announce(entry)]
        return [entry.log.lines[0] + b"\n" for entry in entries]

    async def _answer_probe(self, conn: Connection, ticket: Ticket | None, size: int) -> None:
        if size > MAX_PROBE_BYTES:
            raise RefusalError(400, f"at most {MAX_PROBE_BYTES} bytes")
        with self._charge_ticket(conn, ticket, size):
            await conn.send_answer(200, bytes(size), BYTES)

    async def _answer_manifest(self, conn: Connection, entry: StoredVersion, number: int) -> None:
        """Send lines from `number` on, and new ones until the log ends or the poll expires."""
        deadline_s = _now() + self.limits.poll_seconds
        await conn.start_answer(200, ("Content-Type", LINES), ("Transfer-Encoding", "chunked"))
        while True:
            lines, number = entry.read_lines(number, _BATCH_BYTES)
            left_s = deadline_s - _now()
            if lines:
                await conn.send_data(lines)
            elif entry.log.ended or entry.gone or left_s <= 0:
                break
            else:
                await conn.wait_parked(entry.grown.wait(), left_s)
        await conn.end_answer()

    async def _answer_shard(
        self, conn: Connection, entry: StoredVersion, name: str, index: int, span: str | None, ticket: Ticket | None
    ) -> None:
        """Send the shard; `RefusalError` if it is unavailable, as long as no byte of it was sent."""
        conn.peer.version = max(entry.version, conn.peer.version or 0)
        deadline_s = _now() + self.limits.first_seconds
        blob = await self._await_blob(conn, entry, name, deadline_s)
        if index >= len(blob.layout.shards):
            raise RefusalError(404, "no such shard")
        size = blob.layout.shards[index].size
        part = parse_range(span, size)
        first, end = part or (0, size)
        with self._charge_ticket(conn, ticket, end - first), self._ask_for(conn, blob, index, first):
            await self._await_bytes(conn, blob, index, first, deadline_s)
            attempt = blob.claims.attempt(index)
            headers = [("Content-Type", BYTES), ("Content-Length", str(end - first)), ("Accept-Ranges", "bytes")]
            if part is not None:
                headers.append(("Content-Range", f"bytes {first}-{end - 1}/{size}"))
            await conn.start_answer(200 if part is None else 206, *headers)
            await self._send_span(conn, _ShardRange(blob, index, first, end, attempt))
            await conn.end_answer()

    async def _await_blob(self, conn: Connection, entry: StoredVersion, name: str, deadline_s: float) -> Blob:
        """The requested blob; whether there is a delta is known only some time after the head."""
        if name == FULL:
            return entry.full
        while not entry.log.delta_settled and not entry.gone:
            await self._await_signal(conn, entry.grown.wait(), deadline_s)
        if entry.delta is None:
            raise RefusalError(410 if entry.gone else 404, "no delta")
        return entry.delta

    def _ask_for(self, conn: Connection, blob: Blob, index: int, first: int) -> AbstractContextManager[object]:
        if self._want is None or blob.ready(index) > first:
            return nullcontext()
        wanted = self._want(blob, index, conn.peer.name)
        if wanted is None:
            raise RefusalError(404, "not held here")
        return wanted

    async def _await_bytes(self, conn: Connection, blob: Blob, index: int, first: int, deadline_s: float) -> None:
        """Wait until there is a byte to send, so that a server that can send nothing responds with an error status."""
        while blob.ready(index) <= first:
            if blob.entry.gone:
                raise RefusalError(410, "gone")
            await self._await_signal(conn, blob.claims.progress(index).wait(), deadline_s)
        try:
            with blob.locate(index):
                return  # the file exists and is still the published one
        except ShardError:
            raise RefusalError(410, "gone") from None

    async def _await_signal(self, conn: Connection, signal: "asyncio.Future[None]", deadline_s: float) -> None:
        if not await conn.wait_parked(signal, deadline_s - _now()):
            raise RefusalError(503, "not available now", ("Retry-After", "1"))

    async def _send_span(self, conn: Connection, span: _ShardRange) -> None:
        """Send the bytes as they become ready."""
        self.metrics.transfers += 1
        sent = span.first
        try:
            while sent < span.end:
                ready = min(span.blob.ready(span.index), span.end)
                if not span.is_valid():
                    raise AbortedResponseError("writer")
                if ready > sent:
                    with span.blob.locate(span.index) as (descriptor, offset, _):
                        await conn.send_file(descriptor, offset + sent, ready - sent, span.is_valid)
                    sent = ready
                else:
                    await self._await_growth(span.blob, span.index)
        except ShardError as error:
            raise AbortedResponseError("gone") from error
        finally:
            self.metrics.transfers -= 1

    async def _await_growth(self, blob: Blob, index: int) -> None:
        try:
            async with asyncio.timeout(self.limits.stall_seconds):
                await blob.claims.progress(index).wait()
        except TimeoutError as error:
            raise AbortedResponseError("stalled") from error

    def _find_entry(self, version: str, digest: str) -> StoredVersion:
        number = _take_count(version)
        entry = self._store.find_digest(digest)
        if entry is not None and entry.version == number:
            return entry
        if self._store.find(number) is None and self._store.is_gone(number):
            raise RefusalError(410, "gone")
        raise RefusalError(404, "no such version")

    @contextmanager
    def _charge_ticket(self, conn: Connection, ticket: Ticket | None, size: int) -> Iterator[None]:
        """Charge before sending, and refund what was not sent."""
        if ticket is None or self._tickets is None:
            yield
            return
        self._tickets.charge_bytes(ticket, size)
        before = conn.sent_bytes
        try:
            yield
        finally:
            self._tickets.return_bytes(ticket, size - (conn.sent_bytes - before))

    def _list_peers(self) -> list[dict[str, object]]:
        return [
            {
                "address": peer.name,
                "connections": len(peer.connections),
                "sent_bytes": peer.sent_bytes,
                "version": peer.version,
            }
            for peer in self.addresses.list_connected()
        ]

    def _add_gauges(self, store: VersionStore) -> None:
        add = partial(add_gauge, self.registry)
        add("shoal_connections", "Open connections.", lambda: len(self.connections))
        add("shoal_versions", "Versions held, complete or not.", lambda: len(store.entries()))
        add("shoal_newest_version", "Newest version known.", lambda: _last_version(store, False))
        add("shoal_complete_version", "Newest version held completely.", lambda: _last_version(store, True))
        add("shoal_have_bytes", "Verified bytes held.", lambda: _count_have(store))


_OPEN = {
    "/healthz": ShardServer._answer_health,
    "/metrics": ShardServer._answer_metrics,
    "/status": ShardServer._answer_status,
}
"""Served to anyone, with or without a ticket."""


def _describe_entry(entry: StoredVersion) -> dict[str, object]:
    head, delta = entry.log.head, entry.delta
    return {
        "version": entry.version,
        "digest": entry.digest,
        "serial": entry.serial,
        "anchor": head.anchor,
        "parent": head.parent,
        "shards": len(entry.full.layout.shards),
        "ended": entry.log.ended,
        "complete": entry.complete,
        "total_bytes": entry.full.layout.total,
        "have_bytes": entry.full.have_bytes,
        "delta_bytes": None if delta is None else delta.layout.total,
        "have_delta_bytes": None if delta is None else delta.have_bytes,
    }


def _take_count(text: str) -> int:
    number = parse_count(text)
    if number is None:
        raise RefusalError(404, "not found")
    return number


def _last_version(store: VersionStore, complete: bool) -> int | None:
    versions = [entry.version for entry in store.entries() if entry.complete or not complete]
    return versions[-1] if versions else None


def _count_have(store: VersionStore) -> int:
    return sum(blob.have_bytes for entry in store.entries() for blob in entry.blobs)


def _now() -> float:
    return asyncio.get_running_loop().time()
