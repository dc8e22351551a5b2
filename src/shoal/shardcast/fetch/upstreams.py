"""Requests to the upstreams of one client: which one is asked next, and how each response changes its statistics.

`charge` is the only place where the behaviour of an upstream enters its statistics: every request runs inside it.
"""

import asyncio
import logging
import random
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TypedDict, Unpack

from shoal.net.sockets import load_client_tls
from shoal.shardcast.fetch import connection
from shoal.shardcast.fetch.connection import FetchDeadlines, UpstreamConnections, UpstreamError, UpstreamResponse
from shoal.shardcast.fetch.upstream_stats import Upstream, UpstreamTable
from shoal.shardcast.store.store import StoredVersion
from shoal.util.aio import Notifier, wait_any
from shoal.util.metrics import RateWindow

logger = logging.getLogger(__name__)

PROBE_BYTES = 1 << 18
MOVING_S = 2.0
GROWTH_S = 0.5
"""How often a task that waits for a manifest checks whether its version still exists."""
_MAX_SLEEP_S = 1.0
"""Maximum sleep before looking for an upstream again."""


class GoneError(Exception):
    """No upstream has the version any more."""


async def wait_growth(entry: StoredVersion) -> None:
    """Wait for more lines of a manifest, or a while; `GoneError` if none will come."""
    if entry.gone:
        raise GoneError("the version was replaced or dropped")
    await wait_any([entry.grown], GROWTH_S)


class UpstreamOptions(TypedDict, total=False):
    """Options for requests to upstreams."""

    deadlines: FetchDeadlines | None
    ticket: str | None
    authority: Path | None
    """file of certificates to trust at https URLs, instead of the system's"""
    rng: random.Random | None


class UpstreamPool(UpstreamTable):
    """The upstreams of one client, with connections to them."""

    def __init__(self, urls: Iterable[str], **options: Unpack[UpstreamOptions]) -> None:
        super().__init__(urls)
        self.deadlines = options.get("deadlines") or FetchDeadlines()
        self.rng = options.get("rng") or random.Random()
        self.changed = Notifier()
        """an upstream announced or withdrew a version, or failed"""
        self.waits: dict[object, str] = {}
        """what is currently being waited for, by waiter"""
        self.window = RateWindow(self.clock)
        self._moved_at = -MOVING_S
        self.late: set[Upstream] = set()
        """upstreams with a late transfer; others are asked first"""
        uses_tls = any(one.url.scheme == "https" for one in self.all)
        tls = load_client_tls(options.get("authority")) if uses_tls else None
        ticket = options.get("ticket")
        self._connections = {one: UpstreamConnections(one.url, self.deadlines, ticket, tls=tls) for one in self.all}
        self._probes: list[asyncio.Task[None]] = []

    def ask(
        self, upstream: Upstream, target: str, *headers: tuple[str, str], head_s: float | None = None
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        """Send one request to an upstream; see `UpstreamConnections.request`."""
        return self._connections[upstream].request(target, *headers, head_s=head_s)

    @contextmanager
    def charge(self, upstream: Upstream, digest: str = "", *, shard: bool = False) -> Iterator[None]:
        """Record failures within the block in the upstream's statistics, and continue after the block.

        A request for a shard counts as in flight; requests for lists and manifests mostly wait and use no bandwidth.
        """
        upstream.busy += shard
        try:
            yield
        except UpstreamError as error:
            if isinstance(error, connection.InvalidDataError):
                self.record_wrong(upstream, digest, str(error))
                logger.warning(f"{upstream}: {error}")
            elif isinstance(error, connection.MissingError) and digest:
                upstream.announced.discard(digest)
                upstream.counts.reason = str(error)
            elif isinstance(error, connection.BusyError) and digest:
                self.record_busy(upstream, digest, str(error), error.pause)
            else:
                upstream.denied = isinstance(error, connection.DeniedError)
                self.record_failure(upstream, str(error), error.pause)
            self.changed.notify()
        finally:
            upstream.busy -= shard

    async def pick(self, digest: str, avoid: Collection[Upstream] = ()) -> Upstream:
        """An upstream to ask for that version, as soon as one is available; `GoneError` if none has it."""
        while (upstream := self.draw(self.rng, digest, [*avoid, *self.late])) is None:
            pause = self.find_pause(digest)
            if pause is None:
                raise GoneError("no source has this version any more")
            with self.wait_for(self._describe_wait(digest)):
                await self.sleep(min(pause, _MAX_SLEEP_S) + 0.001)
        return upstream

    @contextmanager
    def wait_for(self, what: str) -> Iterator[None]:
        """Register what the block waits for, for status displays."""
        waiter = object()
        self.waits[waiter] = what
        try:
            yield
        finally:
            del self.waits[waiter]

    def count(self, upstream: Upstream, num_bytes: int) -> None:
        """Count received bytes of a body."""
        upstream.counts.bytes += num_bytes
        self.window.add_bytes(num_bytes)
        self._moved_at = self.clock()

    def is_moving(self) -> bool:
        """Whether bytes arrived recently, so that there is no wait to explain."""
        return self.clock() - self._moved_at < MOVING_S

    async def sleep(self, seconds: float) -> None:
        """Sleep until the timeout or a change of the upstreams."""
        await wait_any([self.changed], seconds)

    async def probe_all(self, timeout_s: float) -> None:
        """Measure every upstream once; late ones continue in the background, and count as failed when they fail."""
        self._probes = [asyncio.create_task(self._probe(upstream)) for upstream in self.all]
        await asyncio.wait(self._probes, timeout=timeout_s)

    async def close(self) -> None:
        """Close all connections."""
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for pool in self._connections.values():
            pool.close()

    async def _probe(self, upstream: Upstream) -> None:
        loop = asyncio.get_running_loop()
        with self.charge(upstream):
            begun = loop.time()
            async with self.ask(upstream, f"/probe?bytes={PROBE_BYTES}", head_s=self.deadlines.rest_s) as answer:
                if answer.reply.length != PROBE_BYTES:
                    raise UpstreamError(f"announced {answer.reply.length} bytes instead of {PROBE_BYTES}")
                try:
                    async with asyncio.timeout(self.deadlines.window_s):
                        while await answer.read_piece(self.deadlines.window_s):
                            pass
                except TimeoutError as error:
                    raise UpstreamError("too slow to measure its rate") from error
            self.record_success(upstream, PROBE_BYTES, loop.time() - begun)

    def _describe_wait(self, digest: str) -> str:
        """Why no upstream can be asked, for the one that becomes available first."""
        holders = self.list_holders(digest)
        first = min(holders, key=lambda upstream: max(upstream.cool_until, upstream.banned_until(digest)))
        return f"{first} ({first.counts.reason})"
