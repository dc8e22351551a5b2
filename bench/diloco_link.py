"""A slow link to a server on loopback: every peer has its own link with a rate and a delay, in each direction.

All connections of a link share its rate; each byte leaves the link a fixed time after it has passed. Loss and slow
start are not emulated.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

PIECE_BYTES = 1 << 14


@dataclass
class Lane:
    """One direction of a link."""

    rate: float
    """bytes per second"""
    delay_s: float
    free_s: float = 0.0

    def pass_bytes(self, count: int, now_s: float) -> float:
        """When that many bytes sent now will have arrived."""
        self.free_s = max(self.free_s, now_s) + count / self.rate
        return self.free_s + self.delay_s


async def serve_links(port: int, ports: list[int], rate: float, delay_s: float) -> None:
    """Forward connections to `port` forever; each of `ports` is one link."""
    servers = [await _open_link(port, own, rate, delay_s) for own in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


async def _open_link(port: int, own: int, rate: float, delay_s: float) -> asyncio.Server:
    up, down = Lane(rate, delay_s), Lane(rate, delay_s)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_pump(reader, far_writer, up), _pump(far_reader, writer, down))

    return await asyncio.start_server(connect, "127.0.0.1", own)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lane: Lane) -> None:
    clock = asyncio.get_running_loop().time
    queue: deque[tuple[float, bytes]] = deque()
    filled = asyncio.Event()

    async def deliver() -> None:
        while True:
            while not queue:
                filled.clear()
                await filled.wait()
            when_s, data = queue.popleft()
            await asyncio.sleep(max(0.0, when_s - clock()))
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()

    async def read() -> None:
        while data := await reader.read(PIECE_BYTES):
            when_s = lane.pass_bytes(len(data), clock())
            queue.append((when_s, data))
            filled.set()
            await asyncio.sleep(max(0.0, when_s - lane.delay_s - clock()))  # data beyond the link's rate waits here
        queue.append((clock() + lane.delay_s, b""))
        filled.set()

    try:
        await asyncio.gather(read(), deliver())
    except ConnectionError:
        writer.close()
