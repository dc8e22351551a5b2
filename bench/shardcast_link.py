"""A slow, distant or unreliable link in front of a server: bytes per second, delay, share of failing requests.

    python shardcast_link.py PORT TARGET_PORT [--rate BYTES_PER_S] [--delay SECONDS] [--fail SHARE]

Kernels often lack packet delays (tc netem), which also needs root; this needs neither. All connections of one
direction share the rate, and every byte arrives `delay` seconds after it was sent. Each connection has at most the
capacity of the link plus `SLACK_BYTES` in flight, then its sender is blocked. Loss and TCP slow start are not
emulated.

A shard request fails, by a fixed seed, in one of two ways: 503 immediately, or the connection ends within the response.
"""

import argparse
import asyncio
import random
import re
import time
from contextlib import suppress

CHUNK_BYTES = 1 << 16
SLACK_BYTES = 1 << 18
CUT_BYTES = 1 << 19
"""bytes of a cut response that get through"""
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
SHARD_PATH = re.compile(rb"GET /v/[0-9]+/[0-9a-f]+/(full|delta)/[0-9]+ ")


class Lane:
    """One direction of a link, represented by the time at which it has sent everything it was given."""

    def __init__(self, rate: float | None, delay_s: float) -> None:
        self._rate = rate
        self._delay_s = delay_s
        self._free_at = 0.0

    @property
    def room(self) -> int:
        """Bytes of one connection that may be in flight."""
        return (1 << 22) if self._rate is None else SLACK_BYTES + int(self._rate * self._delay_s)

    def send_bytes(self, num_bytes: int, now: float) -> float:
        """Put bytes on the link; returns the time at which the last of them arrives."""
        self._free_at = max(self._free_at, now) + (num_bytes / self._rate if self._rate else 0.0)
        return self._free_at + self._delay_s


class Pipe:
    """One direction of one connection: bytes go in at one end and come out when they arrive."""

    def __init__(self, lane: Lane, sink: asyncio.StreamWriter) -> None:
        self._lane, self._sink = lane, sink
        self._under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._num_bytes = 0
        self._moved = asyncio.Event()

    async def put(self, data: bytes) -> None:
        """Send bytes, blocking while the link is full. Empty bytes mean the end."""
        while self._num_bytes > self._lane.room:
            self._moved.clear()
            await self._moved.wait()
        self._num_bytes += len(data)
        self._under_way.put_nowait((self._lane.send_bytes(len(data), time.monotonic()), data))

    async def deliver(self) -> None:
        """Write what arrives, until the end has arrived."""
        while True:
            arrival, data = await self._under_way.get()
            await asyncio.sleep(max(0.0, arrival - time.monotonic()))
            if not data:
                return
            self._sink.write(data)
            await self._sink.drain()
            self._num_bytes -= len(data)
            self._moved.set()


class Link:
    """Accepts connections and forwards them to the target."""

    def __init__(self, target: int, *, rate: float | None = None, delay_s: float = 0.0, fail: float = 0.0) -> None:
        self._target, self._delay_s = target, delay_s
        self._up, self._down = Lane(rate, delay_s), Lane(rate, delay_s)
        self._fail = fail
        self._rng = random.Random(0)

    async def serve(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        await asyncio.sleep(2 * self._delay_s)  # a handshake takes one round trip before the first byte
        with suppress(OSError):
            far, forth = await asyncio.open_connection("127.0.0.1", self._target)
            await _Connection(self, Pipe(self._up, forth), Pipe(self._down, back)).run(near, far)
            forth.close()
        back.close()

    def draw_cut(self, head: bytes) -> int | None:
        """How many bytes of the response to a request get through; None: all."""
        if not SHARD_PATH.match(head) or self._rng.random() >= self._fail:
            return None
        return self._rng.choice((0, CUT_BYTES))


class _Connection:
    def __init__(self, link: Link, up: Pipe, down: Pipe) -> None:
        self._link, self._up, self._down = link, up, down
        self._left: int | None = None
        """bytes of responses that still get through; None: all"""

    async def run(self, near: asyncio.StreamReader, far: asyncio.StreamReader) -> None:
        """Forward until the caller disconnects, or the end of the responses has arrived."""
        readers = (self._pass_requests(near), self._pass_answers(far))
        tasks = [asyncio.ensure_future(job) for job in (*readers, self._up.deliver(), self._down.deliver())]
        tasks[0].add_done_callback(lambda _: tasks[3].cancel())
        await asyncio.wait([tasks[3]])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass_requests(self, near: asyncio.StreamReader) -> None:
        """Requests have no bodies, so each ends with an empty line. A refused one is not forwarded."""
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await near.readuntil(b"\r\n\r\n")
                self._left = self._link.draw_cut(head)
                if self._left == 0:
                    await self._down.put(REFUSAL)
                    await self._down.put(b"")
                    await near.read()  # until the caller disconnects
                    return
                await self._up.put(head)

    async def _pass_answers(self, far: asyncio.StreamReader) -> None:
        data = b"-"
        while data:
            data = await far.read(CHUNK_BYTES)
            await self._down.put(data)
            if self._left is not None:
                self._left -= len(data)
                if self._left <= 0:
                    await self._down.put(b"")
                    return


async def run_link(port: int, link: Link) -> None:
    """Serve until the process is stopped."""
    server = await asyncio.start_server(link.serve, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("target", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--fail", type=float, default=0.0)
    flags = parser.parse_args()
    asyncio.run(run_link(flags.port, Link(flags.target, rate=flags.rate, delay_s=flags.delay, fail=flags.fail)))


if __name__ == "__main__":
    main()
