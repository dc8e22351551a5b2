"""Requests as bytes, whatever they say: no retries, no checks, each with a deadline.

`source` is the address of this machine from which they come: on loopback there are many (127.0.0.0/8), and to a server
each is another caller.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from shoal.swarm.link import Answer, Place

WAIT_S = 15.0
MAX_BYTES = 1 << 22
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_MARK = len(b"HTTP/1.1 200 ")


async def send_raw(
    place: Place, lines: Sequence[str], body: bytes = b"", *, source: str = "", pause_s: float = 0.0, piece: int = 0
) -> Answer:
    """One request on a connection of its own; status 0 if there was no answer.

    With `piece` the body goes in pieces of so many bytes, `pause_s` apart, until the server has heard enough.
    """
    try:
        async with asyncio.timeout(WAIT_S):
            reader, writer = await _connect(place, source)
            try:
                return await _exchange(reader, writer, _build_head(place, lines), body, pause_s, piece)
            finally:
                writer.transport.abort()
    except OSError:  # TimeoutError is one too
        return Answer(0, b"", None)


async def pour_raw(place: Place, requests: Sequence[bytes], *, source: str = "") -> Counter[int]:
    """Many requests through one pipe; how many got which status. 0 is for those without an answer."""
    found: Counter[int] = Counter()
    with suppress(OSError):
        async with asyncio.timeout(WAIT_S):
            reader, writer = await _connect(place, source)
            writing = asyncio.create_task(_write_all(writer, requests))
            try:
                await _count_answers(reader, len(requests), found)
            finally:
                writing.cancel()
                writer.transport.abort()
    found[0] = len(requests) - found.total()
    return found


def build_request(place: Place, lines: Sequence[str], body: bytes = b"") -> bytes:
    """A request that keeps its connection."""
    return "\r\n".join([*lines, f"Host: {place.authority}", "", ""]).encode("latin-1") + body


def _build_head(place: Place, lines: Sequence[str]) -> bytes:
    return build_request(place, [*lines, "Connection: close"])


async def _connect(place: Place, source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    local = (source, 0) if source else None
    return await asyncio.open_connection(place.url.host, place.url.port, ssl=place.tls, local_addr=local)


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes, pause_s: float, piece: int
) -> Answer:
    reading = asyncio.create_task(_read_all(reader))
    try:
        await _write_body(writer, head, body, pause_s, piece, reading)
        top, _, rest = (await reading).partition(b"\r\n\r\n")
    finally:
        reading.cancel()
    return Answer(int(top.split()[1]), rest, None) if _STATUS.match(top) else Answer(0, b"", None)


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
    piece: int,
    reading: "asyncio.Task[bytes]",
) -> None:
    """Send a request; what a server does not want to hear it may cut, and its answer is read all the same."""
    with suppress(ConnectionError):
        writer.write(head if piece else head + body)
        await writer.drain()
        for start in range(0, len(body) if piece else 0, max(1, piece)):
            writer.write(body[start : start + piece])
            await writer.drain()
            await asyncio.wait((reading,), timeout=pause_s)
            if reading.done():
                return


async def _write_all(writer: asyncio.StreamWriter, requests: Sequence[bytes]) -> None:
    with suppress(ConnectionError):
        for request in requests:
            writer.write(request)
            await writer.drain()


async def _count_answers(reader: asyncio.StreamReader, wanted: int, found: Counter[int]) -> None:
    """Count status lines as they come; one that is cut by the end of a piece is kept for the next."""
    rest = b""
    while found.total() < wanted and (data := await reader.read(1 << 16)):
        rest += data
        last = 0
        for match in _STATUS.finditer(rest):
            found[int(match[1])] += 1
            last = match.end()
        rest = rest[max(last, len(rest) - _MARK) :]
