"""Requests of an attacker: raw bytes with any content, and a budget that limits them.

An attack is code that tries to do harm, if only to one's own run. Everything it does is counted in one place
beforehand. Anything over budget is not done, and ends the attack.

Raw requests have no retries and no checks; each has a deadline. `source` is the local address they come from: on
loopback there are many (127.0.0.0/8), and to a server each is a different caller.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import h11

from shoal.net.client import ClientConnection, Endpoint, HttpClient, HttpResponse

TIMEOUT_S = 15.0
MAX_BYTES = 1 << 22
MAX_IN_FLIGHT = 16
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_STATUS_BYTES = len(b"HTTP/1.1 200 ")


async def send_raw(
    endpoint: Endpoint,
    lines: Sequence[str],
    body: bytes = b"",
    *,
    source: str = "",
    pause_s: float = 0.0,
    piece_bytes: int = 0,
) -> HttpResponse:
    """Send one request on its own connection; status 0 if there was no response.

    With `piece_bytes` the body is sent in pieces of that size, `pause_s` apart, until the server responds.
    """
    head = build_request(endpoint, [*lines, "Connection: close"])
    with suppress(OSError):  # includes TimeoutError
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await _connect(endpoint, source)
            reading = asyncio.create_task(_read_all(reader))
            try:
                await _write_body(writer, head, body, pause_s, piece_bytes, reading)
                top, _, rest = (await reading).partition(b"\r\n\r\n")
            finally:
                reading.cancel()
                writer.transport.abort()
            if _STATUS.match(top):
                return HttpResponse(int(top.split()[1]), rest, None)
    return HttpResponse(0, b"", None)


async def send_many_raw(endpoint: Endpoint, requests: Sequence[bytes], *, source: str = "") -> Counter[int]:
    """Send many requests over one connection. Returns counts by status; 0 counts requests without a response.

    At most `MAX_IN_FLIGHT` are unanswered at a time: a server closes a connection with more.
    """
    found: Counter[int] = Counter()
    with suppress(OSError):
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await _connect(endpoint, source)
            try:
                for start in range(0, len(requests), MAX_IN_FLIGHT):
                    writer.writelines(requests[start : start + MAX_IN_FLIGHT])
                    await _count_answers(reader, min(start + MAX_IN_FLIGHT, len(requests)), found)
            finally:
                writer.transport.abort()
    found[0] = len(requests) - found.total()
    return found


def build_request(endpoint: Endpoint, lines: Sequence[str], body: bytes = b"") -> bytes:
    """A request that keeps its connection open."""
    return "\r\n".join([*lines, f"Host: {endpoint.authority}", "", ""]).encode("latin-1") + body


async def _connect(endpoint: Endpoint, source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    local = (source, 0) if source else None
    return await asyncio.open_connection(endpoint.url.host, endpoint.url.port, ssl=endpoint.tls, local_addr=local)


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while len(data) < MAX_BYTES and (more := await reader.read(1 << 16)):
        data += more
    return data


async def _write_body(
    writer: asyncio.StreamWriter,
    head: bytes,
    body: bytes,
    pause_s: float,
    piece_bytes: int,
    reading: "asyncio.Task[bytes]",
) -> None:
    """Send a request. The server may close the connection early; its response is read anyway."""
    with suppress(ConnectionError):
        writer.write(head if piece_bytes else head + body)
        await writer.drain()
        for start in range(0, len(body) if piece_bytes else 0, max(1, piece_bytes)):
            writer.write(body[start : start + piece_bytes])
            await writer.drain()
            await asyncio.wait((reading,), timeout=pause_s)
            if reading.done():
                return


async def _count_answers(reader: asyncio.StreamReader, wanted: int, found: Counter[int]) -> None:
    """Count status lines until `wanted` were found; an incomplete line at the end of a chunk is kept for the next."""
    rest = b""
    while found.total() < wanted and (data := await reader.read(1 << 16)):
        rest += data
        last = 0
        for match in _STATUS.finditer(rest):
            found[int(match[1])] += 1
            last = match.end()
        rest = rest[max(last, len(rest) - _STATUS_BYTES) :]


class BudgetError(Exception):
    """An attack has used up its budget; the message says which part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one attack."""

    identities: int = 120
    """nodes that it creates, each with its own key"""
    requests: int = 20_000
    """requests to the coordinator; weights come from relays and are not counted"""
    seconds: float = 120.0


class BudgetMeter:
    """The rest of a budget. Time counts from construction."""

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget, self._clock, self._begun = budget, clock, clock()
        self.num_identities = 0
        self.num_requests = 0

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._begun

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._budget.seconds - self.spent_s)

    @property
    def left_requests(self) -> int:
        """Requests left."""
        return self._budget.requests - self.num_requests

    def spend_request(self, count: int = 1) -> None:
        """Count requests before they are sent."""
        if self.num_requests + count > self._budget.requests:
            raise BudgetError(f"budget of {self._budget.requests} requests used up")
        if not self.left_s:
            raise BudgetError(f"time budget of {self._budget.seconds:g} s used up")
        self.num_requests += count

    def spend_identity(self) -> None:
        """Count an identity before it is created."""
        if self.num_identities + 1 > self._budget.identities:
            raise BudgetError(f"budget of {self._budget.identities} identities used up")
        self.num_identities += 1


class CountingHttpClient(HttpClient):
    """Counts requests, and does not send any that exceed the budget."""

    def __init__(self, endpoint: Endpoint, budget: BudgetMeter) -> None:
        super().__init__(endpoint)
        self._budget = budget

    @asynccontextmanager
    async def _take_connection(self) -> AsyncIterator[tuple[ClientConnection, h11.Connection]]:
        """As in `HttpClient`, where every request takes a connection first."""
        self._budget.spend_request()
        async with super()._take_connection() as taken:
            yield taken
