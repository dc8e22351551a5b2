"""One accepted connection: reads its requests, sends its responses, and never waits forever.

Invariants:
- bodies of shards go from file to socket by sendfile, unless TLS has to encrypt them;
- every wait for the reader is judged by `RateGuard`; a reader that does not read is disconnected, which frees its slot;
- a response that cannot be finished as announced closes the connection early: the reader sees that bytes are missing,
  and never takes what it got for the whole;
- everything sent passes the buckets of the server and of the peer, one quantum at a time.

Phases (limits.Phase): FRESH -> BUSY -> IDLE -> BUSY ..., and PARKED during a long poll.

Also here: short responses, that is refusals, JSON, and the content types that a server uses.
"""

import asyncio
import errno
import fcntl
import json
import os
import socket
import ssl
import struct
import termios
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import cast

import h11

from shoal.net.http import HttpError, new_server
from shoal.net.limits import MAX_QUANTUM, Bucket, ConnectionSlot, Phase, RateGuard, ServeLimits, keep_rate
from shoal.net.sockets import read_head, receive, set_options, try_send, try_send_file, wait_writable, watch_peer
from shoal.util.metrics import ServeMetrics

_LINGER_S = 1.0
_LINGER_BYTES = 1 << 18
_NOWAIT = getattr(os, "RWF_NOWAIT", None)


class AbortedResponseError(Exception):
    """The response cannot continue, so the connection is closed. The text is the label of a metric."""


class Connection:
    """A peer's socket with methods to respond on it."""

    def __init__(
        self,
        sock: socket.socket,
        slot: ConnectionSlot,
        *,
        limits: ServeLimits,
        metrics: ServeMetrics,
        bucket: Bucket | None,
    ) -> None:
        set_options(sock)
        self._slot = slot
        self.peer = slot.usage
        self.started = False
        """whether the head of the current response has been sent"""
        self._is_bare = False
        """whether the current response must have no body, whatever its head says"""
        self._sock = sock
        self._h11 = new_server()
        self._limits = limits
        self._metrics = metrics
        self._buckets = [one for one in (self.peer.bucket, bucket) if one is not None]
        self._guard = RateGuard(limits.min_rate, limits.window_seconds)
        self.sent_bytes = 0

    async def wait_parked(self, signal: "asyncio.Future[None]", left_s: float) -> bool:
        """Wait for a signal; False if it is late. `AbortedResponseError` if the peer disconnects first."""
        self._slot.enter_phase(Phase.PARKED)
        try:
            with watch_peer(self._sock) as left:
                waited = {signal, left}
                done, _ = await asyncio.wait(waited, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._slot.enter_phase(Phase.BUSY)
            signal.cancel()
        if left in done and signal not in done:
            raise AbortedResponseError("left")
        return signal in done

    async def read_request(self, first_s: float) -> h11.Request | None:
        """The next request; None if the peer sends no more. `HttpError` for unsupported requests."""
        self.started = False
        rest_s = self._limits.header_seconds
        head = await read_head(self._sock, self._h11, first_s=first_s, rest_s=rest_s)
        self._slot.enter_phase(Phase.BUSY)
        if head is None:
            return None
        assert isinstance(head, h11.Request), "a server must receive requests"
        self._is_bare = head.method == b"HEAD"
        if head.http_version not in (b"1.0", b"1.1"):
            raise HttpError("only HTTP/1.1 is supported", 505)
        # A request with a body, or with an ambiguous length, is not read further: what follows could be mistaken for
        # another request (request smuggling).
        if any(name in (b"content-length", b"transfer-encoding") for name, _ in head.headers):
            raise HttpError("requests must not have a body")
        end = self._h11.next_event()
        assert isinstance(end, h11.EndOfMessage), "a request without a body must end with its head"
        return head

    async def send_answer(self, status: int, body: bytes, kind: str, *headers: tuple[str, str]) -> None:
        """Send a whole response with a short body."""
        await self._pay_bytes(len(body))
        response = self._build_response(status, ("Content-Type", kind), ("Content-Length", str(len(body))), *headers)
        data = [] if self._is_bare else [h11.Data(data=body)]
        await self._send_events(response, *data, h11.EndOfMessage())

    async def start_answer(self, status: int, *headers: tuple[str, str]) -> None:
        """Send the head of a response whose body follows by `send_data` or `send_file`."""
        await self._send_events(self._build_response(status, *headers))

    async def send_data(self, data: bytes) -> None:
        """Send a piece of the body, framed as the head announced."""
        await self._pay_bytes(len(data))
        await self._send_events(h11.Data(data=data))

    async def send_file(self, descriptor: int, offset: int, size: int, is_valid: Callable[[], bool]) -> None:
        """Send a piece of the body from a file, without a copy; `is_valid` is checked before every part of it."""
        end = offset + size
        while offset < end:
            stop = offset + await self._take_quantum(end - offset)
            await _warm_pages(descriptor, offset, stop - offset)
            while offset < stop:
                if not is_valid():
                    raise AbortedResponseError("writer")
                offset += await self._push_pages(descriptor, offset, stop - offset)
        # The bytes bypassed h11, which still has to count them.
        self._h11.send_with_data_passthrough(h11.Data(data=cast(bytes, _ByteCount(size))))

    async def end_answer(self) -> None:
        """End a body begun with `start_answer`."""
        await self._send_events(h11.EndOfMessage())

    def start_next(self) -> bool:
        """Prepare for another request; False if this connection cannot have one."""
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        self._slot.enter_phase(Phase.IDLE)
        return True

    async def linger(self) -> None:
        """Drain the peer, so that closing does not reset the connection before it has read the response."""
        self._slot.enter_phase(Phase.IDLE)
        if not isinstance(self._sock, ssl.SSLSocket):  # TLS cannot close one direction alone
            self._sock.shutdown(socket.SHUT_WR)
        left = _LINGER_BYTES
        with suppress(TimeoutError):  # best effort within the time limit
            async with asyncio.timeout(_LINGER_S):
                while left > 0 and (data := await receive(self._sock, left)):
                    left -= len(data)

    def _build_response(self, status: int, *headers: tuple[str, str]) -> h11.Response:
        self.started = True
        self._metrics.requests.labels(str(status)).inc()
        reason = HTTPStatus(status).phrase
        common = [("Server", "shoal"), ("Date", formatdate(usegmt=True))]
        return h11.Response(status_code=status, reason=reason, headers=[*common, *headers])

    async def _send_events(self, *events: h11.Event) -> None:
        view = memoryview(b"".join(self._h11.send(event) or b"" for event in events))
        while view:
            sent = try_send(self._sock, view)
            self._count_sent(sent)
            view = view[sent:]
            if not sent:
                await self._wait_room()

    async def _push_pages(self, descriptor: int, offset: int, size: int) -> int:
        """Call sendfile once, then let other tasks run; if the socket is full, wait until it is writable."""
        sent = try_send_file(self._sock, descriptor, offset, size)
        if sent is None:
            await self._wait_room()
            return 0
        if sent == 0:
            raise AbortedResponseError("file")  # the file is shorter than announced: it was truncated meanwhile
        self._count_sent(sent)
        if sent < size:
            await self._wait_room()
        else:
            await asyncio.sleep(0)
        return sent

    async def _wait_room(self) -> None:
        try:
            await keep_rate(self._guard, self._count_acked, partial(wait_writable, self._sock))
        except HttpError as error:
            raise AbortedResponseError("slow") from error

    async def _pay_bytes(self, size: int) -> None:
        while size > 0:
            size -= await self._take_quantum(size)

    async def _take_quantum(self, size: int) -> int:
        """How many of `size` bytes may be sent now. Waiting for the peer's own bucket first delays nobody else."""
        size = min([size, MAX_QUANTUM, *(bucket.quantum for bucket in self._buckets)])
        for bucket in self._buckets:
            delay_s = bucket.reserve_bytes(size)
            if delay_s > 0:
                await asyncio.sleep(delay_s)
        return size

    def _count_sent(self, size: int) -> None:
        self.sent_bytes += size
        self.peer.sent_bytes += size
        self._metrics.add_sent(size)

    def _count_acked(self) -> int:
        """Bytes received by the peer's kernel. Writability is coarser: it means that a third of the buffer is free."""
        try:
            queued = fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, b"\0" * 4)
        except OSError as error:
            if error.errno not in (errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return self.sent_bytes  # a system that does not report it
        return self.sent_bytes - int(struct.unpack("i", queued)[0])


class _ByteCount:
    """Stands in for bytes that h11 must count but never sees."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


async def _warm_pages(descriptor: int, offset: int, size: int) -> None:
    """Read uncached pages in a thread, because sendfile would block the event loop on the disk."""
    if not (_is_cached(descriptor, offset) and _is_cached(descriptor, offset + size - 1)):
        await asyncio.to_thread(os.pread, descriptor, size, offset)


def _is_cached(descriptor: int, offset: int) -> bool:
    if _NOWAIT is None:
        return True
    try:
        os.preadv(descriptor, [bytearray(1)], offset, _NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True  # the file system cannot tell; sendfile will report a problem with the file
    return True


JSON, LINES, TEXT, BYTES = "application/json", "application/x-ndjson", "text/plain", "application/octet-stream"


async def send_refusal(conn: Connection, status: int, reason: str, *headers: tuple[str, str]) -> None:
    """Send a refusal as one line of text."""
    await conn.send_answer(status, f"{reason}\n".encode(), TEXT, *headers)


async def send_json(conn: Connection, fields: Mapping[str, object]) -> None:
    """Send a JSON object on one line."""
    body = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    await conn.send_answer(200, body + b"\n", JSON)
