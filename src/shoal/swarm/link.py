"""A node's connections to a coordinator or a store: one request and its answer at a time on each, kept and used again.

Invariants:
- every wait has a deadline, and all that can go wrong with the other side becomes a `LinkError` here and nowhere else;
- no more of an answer is read than the caller allows; redirects are answers like any other, and never followed;
- a connection is used again only if its answer was read to the last byte;
- a coordinator is sent a file once it says `100 Continue`: one that is refused costs its head alone.
"""

import asyncio
import os
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import h11

from shoal.disk import is_full
from shoal.errors import ConfigError
from shoal.shardcast.http import HttpError, Url, new_client, parse_count, parse_url, receive_data, receive_head
from shoal.swarm.client_auth import Headers
from shoal.swarm.intake import Intake
from shoal.swarm.wire import HELD_BYTES, Wire

MAX_IDLE = 4
CHUNK_BYTES = 1 << 17
_SCHEME = re.compile(r"https://([^/]+)/?")


class LinkError(Exception):
    """No answer, in a few words. `is_stale`: on a connection kept from before, so that a new one is worth a try."""

    def __init__(self, reason: str, *, is_stale: bool = False) -> None:
        super().__init__(reason)
        self.is_stale = is_stale


@dataclass(frozen=True, slots=True)
class Place:
    """Where a coordinator or a store is."""

    url: Url
    tls: ssl.SSLContext | None

    @property
    def authority(self) -> str:
        """As in a Host header: without the port that the scheme has anyway, for what is signed counts to the letter."""
        host = f"[{self.url.host}]" if ":" in self.url.host else self.url.host
        return host if self.url.port == (80 if self.tls is None else 443) else f"{host}:{self.url.port}"

    def __str__(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://{self.authority}"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a node waits for what, in seconds, and the least rate of a body."""

    connect_s: float = 10.0
    answer_s: float = 60.0
    """until the first byte of an answer"""
    rest_s: float = 10.0
    """for the rest of its head"""
    window_s: float = 20.0
    min_rate: int = 4 * 1024
    """bytes a second of a body, over a window"""


GLANCE = Deadlines(connect_s=5.0, answer_s=5.0)
"""of a question whose answer is at hand, for a person who waits: a server that is silent so long is as good as away"""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, read to its end."""

    status: int
    body: bytes
    retry_after_s: int | None


def parse_place(text: str, authority: Path | None = None) -> Place:
    """A coordinator's address as the user writes it; `authority` is a file of certificates to trust instead."""
    secure = _SCHEME.fullmatch(text)
    if secure is None:
        return Place(parse_url(text), None)
    host = secure[1]
    has_port = re.search(r":[0-9]{1,5}$", host) is not None
    try:
        url = parse_url(f"http://{host}" if has_port else f"http://{host}:443")
    except ConfigError:
        raise ConfigError(
            f"{text[:80]!r}: no address of a coordinator, expected https://HOST or https://HOST:PORT"
        ) from None
    try:
        return Place(url, ssl.create_default_context(cafile=None if authority is None else str(authority)))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{authority}: no file of certificates ({error.strerror or error})") from None


class Link:
    """The connections to one server."""

    def __init__(self, place: Place, deadlines: Deadlines | None = None, *, held_bytes: int = HELD_BYTES) -> None:
        self._place, self._held_bytes = place, held_bytes
        self._deadlines = deadlines or Deadlines()
        self._idle: list[Wire] = []

    async def ask(self, method: str, target: str, headers: Headers, body: bytes, max_bytes: int) -> Answer:
        """A request with a short body."""
        async with self._take_wire() as (wire, conn):
            end = [h11.Data(data=body), h11.EndOfMessage()]
            await _send(wire, conn, self._build_request(method, target, headers), *end)
            response = await self._read_response(wire, conn)
            return await _read_answer(wire, conn, response, max_bytes)

    async def send_file(
        self, target: str, headers: Headers, path: Path, max_bytes: int, *, waits: bool = True
    ) -> Answer:
        """A request whose body is a file; `waits` for the server's word before it is sent."""
        async with self._take_wire() as (wire, conn):
            expect = [("Expect", "100-continue")] if waits else []
            await _send(wire, conn, self._build_request("PUT", target, [*headers, *expect]))
            response = await self._await_word(wire, conn) if waits else None
            if response is None:
                await _send_contents(wire, conn, path)
                response = await self._read_response(wire, conn)
            return await _read_answer(wire, conn, response, max_bytes)

    async def fetch(self, target: str, headers: Headers, intake: Intake, max_bytes: int) -> Answer:
        """A GET whose answer, if it is the file or the rest of what was begun, goes to `intake`; else as `ask`."""
        is_begun = intake.received > 0
        async with self._take_wire() as (wire, conn):
            await _send(wire, conn, self._build_request("GET", target, headers), h11.EndOfMessage())
            response = await self._read_response(wire, conn)
            if response.status_code != 200 and not (is_begun and response.status_code == 206):
                return await _read_answer(wire, conn, response, max_bytes)
            if response.status_code == 200:
                intake.restart()
            while piece := await receive_data(wire.receive_rated, conn):
                intake.take(piece)
            return Answer(200, b"", None)

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop().abort()

    @asynccontextmanager
    async def _take_wire(self) -> AsyncIterator[tuple[Wire, h11.Connection]]:
        """A connection for one exchange; what goes wrong with it is told as `LinkError`."""
        wire = self._find_idle()
        is_kept = wire is not None
        if wire is None:
            wire = await self._connect()
        before, conn = wire.received_bytes, new_client()
        try:
            yield wire, conn
        except (OSError, HttpError) as error:
            if is_full(error):
                wire.abort()
                raise  # our own disk's, on which an answer was to be kept
            is_closed = wire.received_bytes == before and not wire.is_open
            wire.abort()
            if is_closed:
                self.close()  # what else is kept from before is as old, and a try is dear
            reason = "closed without an answer" if is_closed else _phrase_error(error)
            raise LinkError(f"{self._place}: {reason}", is_stale=is_kept and is_closed) from error
        except BaseException:
            wire.abort()
            raise
        self._keep_wire(wire, conn)

    def _find_idle(self) -> Wire | None:
        while self._idle:
            wire = self._idle.pop()
            if wire.is_open:
                return wire
            wire.abort()
        return None

    def _keep_wire(self, wire: Wire, conn: h11.Connection) -> None:
        is_done = conn.our_state is h11.DONE and conn.their_state is h11.DONE
        if is_done and wire.is_open and not conn.trailing_data[0] and len(self._idle) < MAX_IDLE:
            self._idle.append(wire)
        else:
            wire.close()

    async def _connect(self) -> Wire:
        loop = asyncio.get_running_loop()
        limits = self._deadlines
        host, port, tls = self._place.url.host, self._place.url.port, self._place.tls
        try:
            async with asyncio.timeout(limits.connect_s):
                _, wire = await loop.create_connection(self._make_wire, host, port, ssl=tls)
        except (OSError, UnicodeError) as error:
            raise LinkError(f"{self._place}: no connection ({_phrase_error(error)})") from error
        return wire

    def _make_wire(self) -> Wire:
        limits = self._deadlines
        return Wire(min_rate=limits.min_rate, window_s=limits.window_s, held_bytes=self._held_bytes)

    def _build_request(self, method: str, target: str, headers: Headers) -> h11.Request:
        fields = [("Host", self._place.authority), *headers]
        if method != "GET" and not any(name.lower() == "content-length" for name, _ in headers):
            fields.append(("Content-Length", "0"))
        return h11.Request(method=method, target=target, headers=fields)

    async def _await_word(self, wire: Wire, conn: h11.Connection) -> h11.Response | None:
        """Wait for `100 Continue`; an answer in its place means that no body is wanted."""
        head = await self._read_any(wire, conn)
        return None if isinstance(head, h11.InformationalResponse) else head

    async def _read_response(self, wire: Wire, conn: h11.Connection) -> h11.Response:
        async with asyncio.timeout(self._deadlines.answer_s):
            while isinstance(head := await self._read_any(wire, conn), h11.InformationalResponse):
                pass
        return head

    async def _read_any(self, wire: Wire, conn: h11.Connection) -> h11.Response | h11.InformationalResponse:
        limits = self._deadlines
        head = await receive_head(wire.receive, conn, first_s=limits.answer_s, rest_s=limits.rest_s)
        if head is None:
            raise HttpError("closed without an answer")
        assert not isinstance(head, h11.Request), "a client reads answers"
        return head


async def _send(wire: Wire, conn: h11.Connection, *events: h11.Event) -> None:
    await wire.send(b"".join(conn.send(event) or b"" for event in events))


async def _send_contents(wire: Wire, conn: h11.Connection, path: Path) -> None:
    """Send a file; a server that has heard enough may answer and close before the end, and its answer is read then."""
    with path.open("rb") as file:
        try:
            while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                await _send(wire, conn, h11.Data(data=data))
            await _send(wire, conn, h11.EndOfMessage())
        except ConnectionError:
            return


async def _read_answer(wire: Wire, conn: h11.Connection, response: h11.Response, max_bytes: int) -> Answer:
    pieces: list[bytes] = []
    size = 0
    while piece := await receive_data(wire.receive_rated, conn):
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise HttpError(f"an answer of more than {max_bytes} bytes")
    retry = next((value.decode("ascii", "replace") for name, value in response.headers if name == b"retry-after"), "")
    return Answer(response.status_code, b"".join(pieces), parse_count(retry))


def _phrase_error(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLError):
        return f"no TLS ({error.reason or error})"
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)
    return str(error) or type(error).__name__
