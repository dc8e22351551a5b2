"""One connection of the control plane's server: its requests, one after the other, through an ASGI app.

Invariants:
- no byte of a body is read before the app asks for it, and `100 Continue` is sent no sooner: an app that refuses a head
  is never sent its body;
- a body comes with its length or not at all, so where a request ends is said in one way only;
- an answer that the app does not finish ends the connection short: its reader can never take it for the whole;
- after a request whose body was not read the connection goes on only if little of it is left.

Phases (limits.Phase): FRESH -> BUSY -> IDLE -> BUSY ...
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import unquote

import h11
from pydantic import Field

from shoal.config import Settings
from shoal.shardcast.http import HttpError, new_server, parse_count, receive_data, receive_head
from shoal.shardcast.limits import Phase, Roster, Seconds
from shoal.shardcast.metrics import Registry
from shoal.swarm.wire import Wire

HEAD_BYTES = 16 * 1024
_REST_BYTES = 64 * 1024
"""of a body that nobody read: up to here reading it is cheaper than a new connection"""
_LINGER_S = 1.0
_LINGER_BYTES = 1 << 18
_TARGET = re.compile(rb"/[!-~]*")
ENDED = "shoal.ended"
"""extension of the scope: `wait` returns when the peer sends no more, though it may still read"""
_ASGI = {"version": "3.0", "spec_version": "2.4"}

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class HttpLimits(Settings):
    """What the server of the control plane allows."""

    max_connections: Annotated[int, Field(ge=1, le=2**16)] = 8192
    """open connections, which nodes keep between heartbeats; one more closes the longest idle one"""
    per_peer_connections: Annotated[int, Field(ge=1, le=2**16)] = 64
    """open connections of one address (of one /64 network in IPv6)"""
    trust_loopback: bool = True
    """callers from this machine are not limited in their connections"""
    behind_proxy: bool = False
    """callers from this machine are a proxy: the last address in its X-Forwarded-For is the caller's"""
    header_seconds: Seconds = 5.0
    """from a request's first byte (or from accepting the connection) to the end of its head"""
    idle_seconds: Seconds = 30.0
    """from an answer to the first byte of the next request"""
    min_rate: Annotated[int, Field(ge=1)] = 64 * 1024
    """bytes a second that a body must arrive with, and an answer be taken with"""
    window_seconds: Seconds = 5.0
    """time waited for a peer before its rate is judged"""
    grace_seconds: Annotated[float, Field(ge=0.0, le=3600.0)] = 10.0
    """how long a closing server lets requests go on"""


class HttpMetrics:
    """What the server counts about itself."""

    def __init__(self, registry: Registry) -> None:
        self.requests = registry.add_counter("shoal_requests_total", "Requests answered, by status.", "status")
        self.accepted = registry.add_counter("shoal_accepted_total", "Connections accepted.")
        self.evicted = registry.add_counter("shoal_evicted_total", "Idle connections closed for newer ones.")
        self.refused = registry.add_counter("shoal_refused_total", "Connections refused, by reason.", "reason")
        self.cut = registry.add_counter("shoal_cut_total", "Connections ended early, by reason.", "reason")


class Seat:
    """A connection's place among the others, which decides who gives way."""

    def __init__(self, *rosters: "Roster[Seat]", address: tuple[str, int]) -> None:
        self._rosters = rosters
        self.address = address
        self.enter_phase(Phase.FRESH)

    def enter_phase(self, phase: Phase) -> None:
        """Say what the connection does now."""
        for roster in self._rosters:
            roster.put_member(self, phase)

    def leave_rosters(self) -> None:
        """Count no longer as one of the open connections, now and later."""
        for roster in self._rosters:
            roster.remove_member(self)
        self._rosters = ()


class Exchange:
    """A peer's connection, and the app that answers it."""

    def __init__(
        self, wire: Wire, seat: Seat, app: App, *, address: tuple[str, int], limits: HttpLimits, metrics: HttpMetrics
    ) -> None:
        self._wire, self._seat, self._app = wire, seat, app
        self._address = address
        self._limits, self._metrics = limits, metrics
        self._h11 = new_server(HEAD_BYTES)
        self._call: Call | None = None
        self.is_last = False
        """whether the present request is the last one to be answered here"""

    async def serve_requests(self) -> None:
        """Answer until one of both sides has had enough; raises `HttpError` and `OSError` of the peer."""
        first_s = self._limits.header_seconds
        try:
            while (request := await self._read_request(first_s)) is not None:
                await self._answer_request(request)
                if not await self._start_next():
                    await self._linger()
                    return
                first_s = self._limits.idle_seconds
                await asyncio.sleep(0)  # who has many requests in the pipe must not keep the others waiting
        except HttpError as error:
            await self._send_refusal(error.status)
            raise

    async def _read_request(self, first_s: float) -> h11.Request | None:
        self._call = None
        head = await receive_head(
            self._wire.receive, self._h11, first_s=first_s, rest_s=self._limits.header_seconds, head_bytes=HEAD_BYTES
        )
        self._seat.enter_phase(Phase.BUSY)
        if head is None:
            return None
        assert isinstance(head, h11.Request), "a server reads requests"
        if head.http_version not in (b"1.0", b"1.1"):
            raise HttpError("HTTP/1.1 is spoken here", 505)
        if any(name == b"transfer-encoding" for name, _ in head.headers):
            raise HttpError("a body comes with its length", 411)
        if _TARGET.fullmatch(head.target) is None:
            raise HttpError("a target here is a path")
        return head

    async def _answer_request(self, request: h11.Request) -> None:
        self._call = call = Call(self._wire, self._h11, request, self)
        await self._app(self._build_scope(request), call.receive, call.send)
        assert self._h11.our_state in (h11.DONE, h11.MUST_CLOSE), "an app answers each request to its end"

    async def _start_next(self) -> bool:
        """Make ready for another request; False if there can be none."""
        if self.is_last or self._h11.our_state is not h11.DONE:
            return False
        self._seat.enter_phase(Phase.IDLE)
        if self._h11.their_state is h11.SEND_BODY:
            with suppress(TimeoutError):  # looked at below
                async with asyncio.timeout(_LINGER_S):
                    while await receive_data(self._wire.receive, self._h11):
                        pass
        if self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        return True

    def count_answer(self, status: int) -> None:
        """Note an answer for the metrics."""
        self._metrics.requests.add(label=str(status))

    def has_little_left(self, request: h11.Request) -> bool:
        """Whether the connection can go on after a request whose body the app left unread."""
        if self._h11.their_state is not h11.SEND_BODY or self._h11.they_are_waiting_for_100_continue:
            return self._h11.their_state is not h11.SEND_BODY
        lengths = [parse_count(value.decode("ascii")) for name, value in request.headers if name == b"content-length"]
        return all(length is not None and length <= _REST_BYTES for length in lengths)

    async def _send_refusal(self, status: int) -> None:
        """Answer what was no request of ours; the connection ends after it."""
        is_started = self._call is not None and self._call.is_started
        if is_started or self._h11.our_state is h11.ERROR:
            return
        body = b'{"code":"http","text":"not a request that is served here"}\n'
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        events = [build_response(status, headers), h11.Data(data=body), h11.EndOfMessage()]
        self.count_answer(status)
        await self._wire.send(b"".join(self._h11.send(event) or b"" for event in events))
        await self._linger()

    async def _linger(self) -> None:
        """Let the peer read our last words: closing with its bytes unread would reset the connection under them."""
        self._seat.enter_phase(Phase.IDLE)
        self._wire.end_sending()
        left = _LINGER_BYTES
        with suppress(TimeoutError):  # it had its time
            async with asyncio.timeout(_LINGER_S):
                while left > 0 and (data := await self._wire.receive()):
                    left -= len(data)

    def _build_scope(self, request: h11.Request) -> Scope:
        path, _, query = request.target.partition(b"?")
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": request.http_version.decode("ascii"),
            "method": request.method.decode("ascii"),
            "scheme": "https" if self._wire.is_tls else "http",
            "path": unquote(path.decode("ascii"), errors="replace"),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": list(request.headers),
            "client": self._find_client(request),
            "server": None,
            "extensions": {ENDED: {"wait": self._wire.wait_ended}},
        }

    def _find_client(self, request: h11.Request) -> tuple[str, int]:
        """Who calls: the peer, or whom a proxy of ours names. What a caller wrote there itself stands before that."""
        if not self._limits.behind_proxy:
            return self._address
        named = [value for name, value in request.headers if name == b"x-forwarded-for"]
        last = named[-1].rpartition(b",")[2].strip().decode("ascii", "replace") if named else ""
        return (last, 0) if last else self._address


class Call:
    """One request and its answer, as the app sees them."""

    def __init__(self, wire: Wire, conn: h11.Connection, request: h11.Request, exchange: Exchange) -> None:
        self._wire, self._h11, self._request, self._exchange = wire, conn, request, exchange
        self._head: h11.Response | None = None
        self.is_started = False
        """whether the head of the answer has been sent"""

    async def receive(self) -> Message:
        """The next piece of the body; after its end, the end of the connection."""
        if self._h11.their_state is not h11.SEND_BODY:
            await self._wire.wait_lost()
            return {"type": "http.disconnect"}
        if self._h11.they_are_waiting_for_100_continue:
            await self._wire.send(self._h11.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        data = await receive_data(self._wire.receive_rated, self._h11)
        return {"type": "http.request", "body": data, "more_body": bool(data)}

    async def send(self, message: Message) -> None:
        """A part of the answer; the head waits for the first piece of the body, to go with it in one write."""
        if message["type"] == "http.response.start":
            self._head = build_response(message["status"], self._list_headers(message))
            self._exchange.count_answer(message["status"])
            return
        assert message["type"] == "http.response.body", f"an app here does not send {message['type']}"
        events: list[h11.Event] = []
        if not self.is_started:
            assert self._head is not None, "an answer begins with its head"
            events.append(self._head)
            self.is_started = True
        if (body := message.get("body", b"")) and self._request.method != b"HEAD":
            events.append(h11.Data(data=body))
        if not message.get("more_body", False):
            events.append(h11.EndOfMessage())
        await self._wire.send(b"".join(self._h11.send(event) or b"" for event in events))

    def _list_headers(self, message: Message) -> list[tuple[bytes, bytes]]:
        headers = list(message.get("headers", ()))
        if self._exchange.is_last or not self._exchange.has_little_left(self._request):
            self._exchange.is_last = True
            headers.append((b"connection", b"close"))
        return headers


def build_response(status: int, headers: Any) -> h11.Response:
    """The head of an answer, with what all have in common."""
    return _make_response(status, tuple(headers), int(time.time()))


@lru_cache(maxsize=256)
def _make_response(status: int, headers: tuple[Any, ...], now_s: int) -> h11.Response:
    """Kept for a while: most answers of a second have the same head, and checking it is dear."""
    common = [("server", "shoal"), ("date", _format_date(now_s))]
    return h11.Response(status_code=status, reason=HTTPStatus(status).phrase, headers=[*headers, *common])


@lru_cache(maxsize=1)
def _format_date(now_s: int) -> str:
    return formatdate(now_s, usegmt=True)
