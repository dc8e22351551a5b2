"""HTTP server of the control plane and of the DiLoCo reducer: uvicorn's protocol with limits against hostile peers.

uvicorn parses requests (httptools) and implements ASGI. Its server, signals and lifespan events are not used: the
caller manages the app. `Listener` accepts connections; `LimitedProtocol` adds the limits that uvicorn lacks.

Invariants:
- the TLS handshake, every head and every idle connection have a deadline, and a head has a maximum size. A body must
  arrive, and a response must be read, at a minimum rate. Time in which nobody waits for the peer does not count;
- a body is read only when the app asks for it, except for the bytes that arrived with its head. `100 Continue` is not
  sent earlier, so a client never sends a body to an app that rejects the head;
- a body must have a Content-Length, a target must be a path, and upgrades are refused;
- a connection serves one request at a time, and at most `MAX_PIPELINED` are queued behind it;
- a response that the app does not finish closes the connection early, so its reader never takes it for complete;
- a bug of the app ends that connection, is counted, and goes to the loop's exception handler, never to the peer.

Life cycle of a connection (limits.Phase): FRESH -> UNVERIFIED -> IDLE -> UNVERIFIED ... -> lingering -> closed; once
the app has verified a caller on it: BUSY -> KNOWN -> BUSY ...
"""

import asyncio
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, MutableMapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, cast

import httptools
import uvicorn
from prometheus_client import CollectorRegistry
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from shoal.net.http import HttpError
from shoal.net.limits import ConnectionSlot, HttpLimits, Phase, RateGuard, keep_rate
from shoal.net.listener import Listener
from shoal.util.metrics import ServerMetrics, add_gauge

READ_BYTES = 1 << 15
BULK_BYTES = 1 << 18
"""the same if few peers send much: one read call per 32 KB would cost more than the bytes"""
HEAD_BYTES = 16 * 1024
MAX_PIPELINED = 16
VERIFIED = "shoal.verified"
"""key of an ASGI scope: what an app calls when it has verified the caller"""
_UNREAD_BYTES = 64 * 1024
"""up to this many unread bytes of a body, reading them is cheaper than a new connection"""
_LINGER_S = 1.0
_LINGER_BYTES = 1 << 18
_TARGET = re.compile(rb'/[!"$-~]*')
_REFUSAL = b'{"code":"http","text":"not a request that is served here"}\n'

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class HttpServer(Listener):
    """Serves one ASGI app on one address."""

    def __init__(
        self,
        app: App,
        *,
        limits: HttpLimits | None = None,
        registry: CollectorRegistry | None = None,
        tls: ssl.SSLContext | None = None,
        read_bytes: int = READ_BYTES,
    ) -> None:
        """`read_bytes`: size of one read."""
        self.app, self._tls = app, tls
        self.read_buffer = memoryview(bytearray(read_bytes))
        """read buffer shared by all connections; its contents are copied before the next read"""
        self.limits = limits or HttpLimits()
        registry = registry or CollectorRegistry()
        self.metrics = ServerMetrics(registry)
        add_gauge(registry, "shoal_connections", "Open connections.", lambda: len(self.connections))
        self.config = uvicorn.Config(
            app, lifespan="off", ws="none", proxy_headers=False, log_config=None, log_level="critical", access_log=False
        )
        self.config.load()
        self.state = ServerState()
        super().__init__(self._serve_connection, limits=self.limits, metrics=self.metrics, is_plain=tls is None)

    async def close(self) -> None:
        """Stop accepting, give requests in progress the grace period, then close all connections."""
        for protocol in self.state.connections:
            if isinstance(protocol, LimitedProtocol) and protocol.cycle is not None:
                protocol.cycle.keep_alive = False
        await super().close()

    async def _serve_connection(self, sock: socket.socket, slot: ConnectionSlot) -> None:
        loop = asyncio.get_running_loop()
        protocol = LimitedProtocol(self, slot)
        handshake_s = None if self._tls is None else self.limits.header_seconds
        try:
            await loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._tls, ssl_handshake_timeout=handshake_s)
            await protocol.closed
        except TimeoutError:
            self.metrics.cut.labels("late").inc()
        except OSError:
            self.metrics.cut.labels("lost").inc()
        finally:
            protocol.abort()


class LimitedProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):  # type: ignore[misc]  # both define only callbacks
    """One connection."""

    def __init__(self, server: HttpServer, slot: ConnectionSlot) -> None:
        super().__init__(server.config, server.state, {})
        limits = server.limits
        self._server, self._slot, self._limits, self._metrics = server, slot, limits, server.metrics
        self.app = self._run_app
        self.closed: asyncio.Future[None] = self.loop.create_future()
        """done when the connection has ended; holds the exception if a bug ended it"""
        self.peer_ended: asyncio.Future[None] = self.loop.create_future()
        """done when the peer has closed its sending side; it may still read"""
        self.reading = RateGuard(limits.min_rate, limits.window_seconds)
        self._writing = RateGuard(limits.min_rate, limits.window_seconds)
        self.received_bytes = 0
        self.wants_body = False
        """whether the app has asked for the body of the current request"""
        self._is_busy = self._is_known = False
        self._is_lingering = False
        self._in_head = True
        """whether received bytes may belong to a head, so that the deadline of the head applies"""
        self._has_begun = False
        """whether a head has begun but is incomplete"""
        self._head_bytes = 0
        self._refusal: HttpError | None = None
        """why input is no longer parsed; sent as a response after the earlier requests are answered"""
        self._task: asyncio.Task[None] | None = None
        self._accepted_s = self.loop.time()
        self._deadline_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    # Callbacks of the loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called when the connection is established, after the TLS handshake if any."""
        super().connection_made(LingeringTransport(transport, self.linger))  # type: ignore[arg-type]
        # A plain transport is full above its limit, one with TLS already at its limit. At 0 the latter would count as
        # full while empty, and nothing would wake us.
        transport.set_write_buffer_limits(0 if self.scheme == "http" else 1, 0)
        self._set_deadline(self._accepted_s + self._limits.header_seconds - self.loop.time())

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer to read into."""
        return self._server.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Handle received bytes."""
        self.received_bytes += nbytes
        self.data_received(bytes(self._server.read_buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; stop reading at a body that the app has not asked for."""
        if self._is_lingering or self._refusal is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _LINGER_BYTES:
                self.abort()
            return
        if not self._is_busy and not self._in_head:
            self._in_head = True
            self._set_deadline(self._limits.header_seconds)
        was_begun = self._has_begun
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:  # also for an upgrade, which is refused with its head
            self._fail(self._refusal or HttpError("invalid HTTP"))
            return
        if was_begun and self._has_begun:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._fail(HttpError("head too long", 431))
        elif self._is_busy and self.cycle.more_body and not self.wants_body and not self.cycle.response_complete:
            self.flow.pause_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The peer sends no more. It may still read, unless TLS closes both directions."""
        _finish(self.peer_ended)
        if self.cycle is not None:
            self.cycle.message_event.set()
        return self._is_busy and self.scheme == "http"

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._is_lingering = True
        super().connection_lost(exc)
        _finish(self.peer_ended)
        _finish(self.closed)

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._has_begun, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """A head is complete: refuse it or start its request."""
        self._has_begun = False
        self._refusal = self._check_head()
        if self._refusal is not None:
            raise self._refusal
        self._in_head = self.wants_body = False
        self._is_busy, self._deadline_s = True, None
        self._slot.enter_phase(Phase.BUSY if self._is_known else Phase.UNVERIFIED)
        super().on_headers_complete()

    def _check_head(self) -> HttpError | None:
        version = self.parser.get_http_version()
        names = [name for name, _ in self.headers]
        if version not in ("1.0", "1.1"):
            return HttpError("only HTTP/1.1 is supported", 505)
        if sum(len(name) + len(value) + 4 for name, value in self.headers) + len(self.url) > HEAD_BYTES:
            return HttpError("head too long", 431)
        if b"transfer-encoding" in names:
            return HttpError("a body requires Content-Length", 411)
        if _TARGET.fullmatch(self.url) is None or self.parser.should_upgrade():
            return HttpError("the request target must be a path")
        if names.count(b"host") != 1 and (version == "1.1" or b"host" in names):
            return HttpError("one Host header is required")
        return HttpError("too many requests at once") if len(self.pipeline) >= MAX_PIPELINED else None

    def on_response_complete(self) -> None:
        """Called when uvicorn has written a response. The request ends when the peer has read it (`_end_request`)."""

    # The app

    async def _run_app(self, scope: Any, receive: Any, send: Any) -> None:
        """Called by uvicorn for each request."""
        self._task = asyncio.current_task()
        scope["client"], scope[VERIFIED] = self._find_client(scope["headers"]), self._note_known
        exchange = Exchange(self, scope, receive, send)
        try:
            await self._server.app(scope, exchange.receive, exchange.send)
            assert exchange.is_complete, "the app must complete each response"
        except HttpError as error:
            self._metrics.cut.labels("slow" if error.status == 408 else "http").inc()
            self._send_refusal(error.status) if not exchange.is_started else self.abort()
        except OSError as error:
            self._metrics.cut.labels("late" if isinstance(error, TimeoutError) else "lost").inc()
            self.abort()
        except Exception as error:  # noqa: BLE001  # raised again in the connection's task, as a bug
            if not self.closed.done():
                self.closed.set_exception(error)
            self.abort()
        else:
            self._end_request()

    def _note_known(self) -> None:
        """Called by the app when it has verified the caller."""
        if self._is_busy and not self._is_lingering:
            self._is_known = True
            self._slot.enter_phase(Phase.BUSY)

    @property
    def has_input(self) -> bool:
        """Whether the app can read without waiting for the peer. Also right while a further request waits behind the
        current one, whose body has then arrived."""
        return self.cycle is not None and self.cycle.message_event.is_set()

    def count_answer(self, status: int) -> None:
        """Count a response in the metrics."""
        self._metrics.requests.labels(str(status)).inc()

    async def drain(self) -> None:
        """Return when the kernel has taken everything written; `HttpError` if the peer reads too slowly."""
        if self.flow.write_paused:
            await keep_rate(self._writing, self._count_taken, self.flow.drain)
        if self.closed.done():
            raise ConnectionResetError("the peer closed the connection")

    def abort(self) -> None:
        """End the connection at once and cancel the app's work for it."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if self.transport is not None:
            self.transport.abort()

    def linger(self) -> None:
        """Close after the peer has read the response: closing with unread input would reset the connection."""
        if self._is_lingering:
            return
        self._is_lingering, self._head_bytes = True, 0
        cast(LingeringTransport, self.transport).is_ended = True
        self._slot.enter_phase(Phase.IDLE)
        self._set_deadline(_LINGER_S)
        self.flow.resume_reading()
        if self.peer_ended.done():
            self._transport.close()
        elif self._transport.can_write_eof():
            self._transport.write_eof()

    @property
    def _transport(self) -> asyncio.Transport:
        return cast(LingeringTransport, self.transport).inner

    def _end_request(self) -> None:
        """Continue with the next request, or wait for one."""
        self._task = None
        if self._is_lingering:
            return
        if self.pipeline:
            super().on_response_complete()  # starts the next request
            return
        self._is_busy = False
        if self._refusal is not None:
            self._send_refusal(self._refusal.status)
        elif self.peer_ended.done():
            self._transport.close()
        else:
            self.flow.resume_reading()
            self._in_head = self._has_begun
            self._slot.enter_phase(Phase.KNOWN if self._is_known else Phase.IDLE)
            self._set_deadline(self._limits.header_seconds if self._in_head else self._limits.idle_seconds)

    def _fail(self, error: HttpError) -> None:
        """Stop parsing. The invalid request is refused after those before it are answered."""
        self._refusal, self._head_bytes = error, 0
        if not self._is_busy:
            self._metrics.cut.labels("http").inc()
            self._send_refusal(error.status)

    def _send_refusal(self, status: int) -> None:
        """Respond in place of the app; the connection ends afterwards."""
        if self._is_lingering:
            return
        self.count_answer(status)
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nserver: shoal\r\ncontent-type: application/json\r\n"
        tail = f"content-length: {len(_REFUSAL)}\r\nconnection: close\r\n\r\n"
        self._transport.write((head + tail).encode("ascii") + _REFUSAL)
        self.linger()

    def _find_client(self, headers: list[tuple[bytes, bytes]]) -> tuple[str, int]:
        """The peer, or the last address that our own proxy names; the caller wrote those before it."""
        named = [value for name, value in headers if name == b"x-forwarded-for"] if self._limits.behind_proxy else []
        last = named[-1].rpartition(b",")[2].strip().decode("ascii", "replace") if named else ""
        return (last, 0) if last else self._slot.address

    def _count_taken(self) -> int:
        return cast(LingeringTransport, self.transport).sent_bytes - self._transport.get_write_buffer_size()

    def _set_deadline(self, seconds: float) -> None:
        """Each connection uses a single timer: a deadline that was moved is noticed when the old one passes."""
        self._deadline_s = self.loop.time() + seconds
        if self._timer is None or self._timer.when() > self._deadline_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(self._deadline_s, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._deadline_s is None:
            return
        if self.loop.time() < self._deadline_s:
            self._timer = self.loop.call_at(self._deadline_s, self._check_deadline)
            return
        if not self._is_lingering:
            self._metrics.cut.labels("late").inc()
        self.abort()


class LingeringTransport:
    """The transport that uvicorn sees: closes after the peer has read everything, writes head and body at once."""

    def __init__(self, inner: asyncio.Transport, linger: Callable[[], None]) -> None:
        self.inner, self._linger = inner, linger
        self.sent_bytes = 0
        self.is_corked = False
        self._held = b""
        self.is_ended = False
        """whether writing is no longer allowed"""

    def write(self, data: bytes) -> None:
        """Write, or buffer the data until `flush`."""
        self._held += data
        if not self.is_corked:
            self.flush()

    def flush(self) -> None:
        """Write the buffered data."""
        if self._held and not self.is_closing():
            self.sent_bytes += len(self._held)
            self.inner.write(self._held)
        self._held = b""

    def close(self) -> None:
        """Close after the peer has read what was written."""
        self.flush()
        self._linger()

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self.is_ended or self.inner.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Exchange:
    """One request and its response, as the app sees them."""

    def __init__(self, protocol: LimitedProtocol, scope: Scope, receive: Receive, send: Send) -> None:
        self._protocol, self._receive, self._send = protocol, receive, send
        fields = dict(scope["headers"])
        self._unread = int(fields.get(b"content-length", 0))  # the parser rejects anything but a decimal number
        self._expects = b"expect" in fields
        self._is_read = False
        self.is_started = False
        """whether the head of the response has been sent"""
        self.is_complete = False

    async def receive(self) -> Message:
        """Return the next piece of the body; after its end, wait for the end of the connection."""
        protocol = self._protocol
        if self._is_read:
            await asyncio.shield(protocol.peer_ended)
            return {"type": "http.disconnect"}
        protocol.wants_body, self._expects = True, False
        while True:
            if protocol.has_input:
                message = await self._receive()  # returns at once
            else:
                message = await keep_rate(protocol.reading, lambda: protocol.received_bytes, self._receive)
            if message["type"] == "http.disconnect":
                raise HttpError("connection closed in the middle of a body")
            self._unread -= len(message["body"])
            self._is_read = not message["more_body"]
            if message["body"] or self._is_read:
                return message
            if protocol.peer_ended.done():
                raise HttpError("connection closed in the middle of a body")

    async def send(self, message: Message) -> None:
        """Send a part of the response; the head is written together with the first piece of the body."""
        transport = cast(LingeringTransport, self._protocol.transport)
        if self._protocol.closed.done():
            raise ConnectionResetError("the peer closed the connection")
        if message["type"] == "http.response.start":
            self._protocol.count_answer(message["status"])
            transport.is_corked = True
            await self._send({**message, "headers": self._list_headers(message)})
            return
        self.is_started = True
        transport.is_corked = False
        await self._send(message)
        transport.flush()
        self.is_complete = not message.get("more_body", False)
        await self._protocol.drain()

    def _list_headers(self, message: Message) -> list[tuple[bytes, bytes]]:
        headers = [*message.get("headers", ()), (b"server", b"shoal"), (b"date", _format_date(int(time.time())))]
        if self._unread > (0 if self._expects else _UNREAD_BYTES):
            headers.append((b"connection", b"close"))
        return headers


@lru_cache(maxsize=1)
def _format_date(now_s: int) -> bytes:
    return formatdate(now_s, usegmt=True).encode("ascii")


def _finish(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
