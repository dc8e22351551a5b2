"""One accepted connection: reads its requests, sends its answers, and never waits for ever.

Invariants:
- bodies of shards go from file to socket by sendfile, never through our memory;
- every wait for the reader is judged by `RateGuard`; one that does not read is cut and its place is free again;
- an answer that cannot be finished as announced ends the connection short: the reader sees that bytes are missing, and
  can never take what it got for the whole;
- all that is sent passes the buckets of the server and of the peer, a quantum at a time.

Phases (limits.Phase): FRESH -> BUSY -> IDLE -> BUSY ..., and PARKED while an answer waits for news.
"""

import asyncio
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import cast

import h11

from shoal.shardcast.hangup import watch_peer
from shoal.shardcast.http import HttpError, new_server, read_head, set_options, wait_writable
from shoal.shardcast.limits import MAX_QUANTUM, Bucket, Peer, Phase, RateGuard, Roster, ServeLimits
from shoal.shardcast.metrics import ServeMetrics

_LINGER_S = 1.0
_LINGER_BYTES = 1 << 18
_NOWAIT = getattr(os, "RWF_NOWAIT", None)


class CutError(Exception):
    """The answer cannot go on as announced, the connection ends here. The text is a metric's label: one of a few."""


class Connection:
    """A peer's socket with the means to answer on it."""

    def __init__(
        self,
        sock: socket.socket,
        peer: "Peer[Connection]",
        *,
        limits: ServeLimits,
        metrics: ServeMetrics,
        roster: "Roster[Connection]",
        bucket: Bucket | None,
    ) -> None:
        set_options(sock)
        self.peer = peer
        self.started = False
        """whether the head of the present answer has been sent"""
        self._is_bare = False
        """whether the present answer must have no body, whatever its head says"""
        self._sock = sock
        self._h11 = new_server()
        self._limits = limits
        self._metrics = metrics
        self._rosters = (roster, peer.roster)
        self._buckets = [one for one in (peer.bucket, bucket) if one is not None]
        self._guard = RateGuard(limits.min_rate, limits.window_seconds)
        self.sent_bytes = 0
        self.enter_phase(Phase.FRESH)

    def enter_phase(self, phase: Phase) -> None:
        """Say what the connection does now, which decides who gives way to others."""
        for roster in self._rosters:
            roster.put_member(self, phase)

    @contextmanager
    def park(self) -> Iterator[None]:
        """While the answer waits for news from elsewhere."""
        self.enter_phase(Phase.PARKED)
        try:
            yield
        finally:
            self.enter_phase(Phase.BUSY)

    async def wait_parked(self, signal: "asyncio.Future[None]", left_s: float) -> bool:
        """Wait for a signal; False if it did not come in time. `CutError` if the peer hangs up before."""
        try:
            with self.park(), watch_peer(self._sock) as left:
                waited = {signal, left}
                done, _ = await asyncio.wait(waited, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
        finally:
            signal.cancel()
        if left in done and signal not in done:
            raise CutError("left")
        return signal in done

    async def read_request(self, first_s: float) -> h11.Request | None:
        """The next request; None if the peer has none any more. `HttpError` for what we do not serve."""
        self.started = False
        rest_s = self._limits.header_seconds
        head = await read_head(self._sock, self._h11, first_s=first_s, rest_s=rest_s)
        self.enter_phase(Phase.BUSY)
        if head is None:
            return None
        assert isinstance(head, h11.Request), "a server reads requests"
        self._is_bare = head.method == b"HEAD"
        if head.http_version not in (b"1.0", b"1.1"):
            raise HttpError("HTTP/1.1 is spoken here", 505)
        # One that comes with a body, or whose end is said in two ways, is not read further: what follows could be
        # taken for another request.
        if any(name in (b"content-length", b"transfer-encoding") for name, _ in head.headers):
            raise HttpError("a request here has no body")
        return head

    async def send_answer(self, status: int, body: bytes, kind: str, *headers: tuple[str, str]) -> None:
        """A whole answer with a short body."""
        await self._pay_bytes(len(body))
        response = self._build_response(status, ("Content-Type", kind), ("Content-Length", str(len(body))), *headers)
        data = [] if self._is_bare else [h11.Data(data=body)]
        await self._send_events(response, *data, h11.EndOfMessage())

    async def start_answer(self, status: int, *headers: tuple[str, str]) -> None:
        """The head of an answer whose body follows by `send_data` or `send_file`."""
        await self._send_events(self._build_response(status, *headers))

    async def send_data(self, data: bytes) -> None:
        """A piece of the body, framed as the head announced."""
        await self._pay_bytes(len(data))
        await self._send_events(h11.Data(data=data))

    async def send_file(self, descriptor: int, offset: int, size: int, is_valid: Callable[[], bool]) -> None:
        """A piece of the body from a file, without a copy; `is_valid` is asked before every piece of it."""
        end = offset + size
        while offset < end:
            stop = offset + await self._take_quantum(end - offset)
            await _warm_pages(descriptor, offset, stop - offset)
            while offset < stop:
                if not is_valid():
                    raise CutError("writer")
                offset += await self._push_pages(descriptor, offset, stop - offset)
        # The bytes went past h11, which still has to know that they went.
        self._h11.send_with_data_passthrough(h11.Data(data=cast(bytes, _Span(size))))

    async def end_answer(self) -> None:
        """The end of a body begun with `start_answer`."""
        await self._send_events(h11.EndOfMessage())

    def start_next(self) -> bool:
        """Make ready for another request; False if this connection cannot have one."""
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        self.enter_phase(Phase.IDLE)
        return True

    def end_request(self) -> None:
        """Take note that the request read has no body, as `read_request` made sure."""
        if self._h11.their_state is h11.SEND_BODY:
            event = self._h11.next_event()
            assert isinstance(event, h11.EndOfMessage), "a request without length ends with its head"

    async def linger(self) -> None:
        """Let the peer read our last words: closing with its bytes unread would reset the connection under them."""
        loop = asyncio.get_running_loop()
        self.enter_phase(Phase.IDLE)
        self._sock.shutdown(socket.SHUT_WR)
        left = _LINGER_BYTES
        with suppress(TimeoutError):  # it had its time
            async with asyncio.timeout(_LINGER_S):
                while left > 0 and (data := await loop.sock_recv(self._sock, left)):
                    left -= len(data)

    def leave_rosters(self) -> None:
        """Count no longer as one of the open connections."""
        for roster in self._rosters:
            roster.remove_member(self)

    def close(self) -> None:
        """Close the socket; also what was given up enters no roster again."""
        self.leave_rosters()
        self._sock.close()

    def _build_response(self, status: int, *headers: tuple[str, str]) -> h11.Response:
        self.started = True
        self._metrics.requests.add(label=str(status))
        reason = HTTPStatus(status).phrase
        common = [("Server", "shoal"), ("Date", formatdate(usegmt=True))]
        return h11.Response(status_code=status, reason=reason, headers=[*common, *headers])

    async def _send_events(self, *events: h11.Event) -> None:
        view = memoryview(b"".join(self._h11.send(event) or b"" for event in events))
        while view:
            try:
                sent = self._sock.send(view)
            except BlockingIOError:
                await self._wait_room()
                continue
            self._count_sent(sent)
            view = view[sent:]

    async def _push_pages(self, descriptor: int, offset: int, size: int) -> int:
        """One call of sendfile, and a turn for others: until there is room if the socket is full."""
        try:
            sent = os.sendfile(self._sock.fileno(), descriptor, offset, size)
        except BlockingIOError:
            await self._wait_room()
            return 0
        if sent == 0:
            raise CutError("file")  # it ended before the size we announced: cut off under us
        self._count_sent(sent)
        if sent < size:
            await self._wait_room()
        else:
            await asyncio.sleep(0)
        return sent

    async def _wait_room(self) -> None:
        loop = asyncio.get_running_loop()
        is_late = True
        while is_late:
            began_s = loop.time()
            self._guard.begin_wait(self._count_acked())
            try:
                async with asyncio.timeout(self._guard.left_s):
                    await wait_writable(self._sock)
                is_late = False
            except TimeoutError:
                pass  # judged below, by what was acknowledged meanwhile
            if not self._guard.end_wait(loop.time() - began_s, self._count_acked()):
                raise CutError("slow")

    async def _pay_bytes(self, size: int) -> None:
        while size > 0:
            size -= await self._take_quantum(size)

    async def _take_quantum(self, size: int) -> int:
        """How many of `size` bytes may go now. The peer's own bucket comes first: who waits there holds up nobody."""
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
        """Bytes the peer's kernel has. Waiting tells less: a full socket is writable when a third of it is free."""
        try:
            queued = fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, b"\0" * 4)
        except OSError as error:
            if error.errno not in (errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return self.sent_bytes  # a system that does not say
        return self.sent_bytes - int(struct.unpack("i", queued)[0])


class _Span:
    """Stands for bytes that h11 shall count but never sees."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


async def _warm_pages(descriptor: int, offset: int, size: int) -> None:
    """Read what is not in memory in a thread, for sendfile would hold up the loop, and all others, for the disk."""
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
        return True  # a file system that cannot say; what is wrong with the file itself, sendfile will tell
    return True
