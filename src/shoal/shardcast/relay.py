"""A relay: what it pulls from its upstreams it serves to others, from the first byte on.

It fetches ahead of any request the delta of every version, and the full blob of anchors and of versions without a
delta: what everybody will ask for. A shard somebody asks for before it is here becomes urgent. Cut-through needs
nothing of its own: the server sends what a writer has written, while it writes.

Invariants:
- whatever happens upstream or to the disk, what is here is served;
- nothing is fetched twice: a restart goes on from the shards on disk;
- the store's limits hold: old versions go first, and what has no room is noted and tried again later.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

from shoal.shardcast.blob import Blob
from shoal.shardcast.crew import GoneError
from shoal.shardcast.errors import StaleError
from shoal.shardcast.limits import ServeLimits
from shoal.shardcast.link import Deadlines
from shoal.shardcast.pull import Puller
from shoal.shardcast.pump import Order
from shoal.shardcast.server import Server
from shoal.shardcast.store import DEFAULT_KEEP, Entry, Store
from shoal.shardcast.tickets import TicketBook

DISK_PAUSE_S = 30.0
"""How long a blob that the disk had no room for is left alone."""
GONE_PAUSE_S = 1.0
_LOOK_S = 1.0

Key = tuple[str, str]


class Relay:
    """A store, a server and a puller. Use it as `async with await Relay.open(...) as relay: await relay.wait()`."""

    def __init__(self, store: Store, puller: Puller, server: Server, note: Callable[[str], None]) -> None:
        self.store = store
        self.puller = puller
        self.server = server
        self._note = note
        self._orders: dict[Key, Order] = {}
        self._paused: dict[Key, float] = {}
        self._revive_at: float | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        data: Path,
        urls: Iterable[str],
        *,
        run: str,
        publisher: str,
        host: str = "127.0.0.1",
        port: int = 0,
        keep: int = DEFAULT_KEEP,
        max_bytes: int | None = None,
        in_flight: int = 4,
        limits: ServeLimits | None = None,
        tickets: TicketBook | None = None,
        ticket: str | None = None,
        deadlines: Deadlines | None = None,
        rng: random.Random | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> "Relay":
        """Open the data folder and begin to serve what it holds."""
        store = await Store.open(data, run=run, publisher=publisher, keep=keep, max_bytes=max_bytes, note=note)
        try:
            puller = Puller(store, urls, in_flight=in_flight, deadlines=deadlines, ticket=ticket, rng=rng, note=note)
            server = Server(
                store,
                limits=limits or ServeLimits(),
                want=_urge_with(puller),
                tickets=tickets,
                role="relay",
                describe=lambda: {"upstreams": [share.url for share in puller.progress.sources]},
            )
            await server.start(host, port)
        except BaseException:
            await store.close()
            raise
        return cls(store, puller, server, note)

    async def __aenter__(self) -> "Relay":
        try:
            await self.puller.__aenter__()
        except BaseException:
            await self.close()
            raise
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop fetching, let transfers end, close the store."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.puller.close()
        await self.server.close()
        await self.store.close()

    async def wait(self) -> None:
        """Until something that must not end has ended; raises what ended it."""
        assert self._task is not None, "entered before"
        await asyncio.shield(self._task)

    async def _run(self) -> None:
        while True:
            self._place_orders()
            await self._wait_change()
            self._check_tasks()
            self._take_results()
            await self._settle_all()

    def _place_orders(self) -> None:
        now = asyncio.get_running_loop().time()
        for entry, blob in self._list_wanted():
            key = (entry.digest, blob.name)
            if not blob.complete and key not in self._orders and self._paused.get(key, 0.0) <= now:
                self._orders[key] = self.puller.pump.order(entry, blob.name)

    def _list_wanted(self) -> Iterator[tuple[Entry, Blob]]:
        """What is fetched ahead of any request, of versions that some source has."""
        for entry in self.store.entries():
            if not self.puller.crew.book.list_holders(entry.digest):
                continue
            if entry.delta is not None:
                yield entry, entry.delta
            if entry.log.head.anchor or (entry.log.delta_settled and entry.delta is None):
                yield entry, entry.full

    def _take_results(self) -> None:
        """Let orders go that ended. Those that failed are placed again after a pause."""
        now = asyncio.get_running_loop().time()
        for key, order in list(self._orders.items()):
            if not order.done.done():
                continue
            del self._orders[key]
            error = None if order.done.cancelled() else order.done.exception()
            if isinstance(error, GoneError | StaleError):
                self._paused[key] = now + GONE_PAUSE_S
            elif isinstance(error, OSError):
                self._note(
                    f"version {order.entry.version} is tried again in {DISK_PAUSE_S:.0f} s: {error.strerror or error}"
                )
                self._paused[key] = now + DISK_PAUSE_S
            elif error is not None:
                raise error
        self._paused = {key: until for key, until in self._paused.items() if until > now}

    async def _settle_all(self) -> None:
        """Give complete blobs their final names."""
        for entry in self.store.entries():
            for blob in entry.blobs:
                if blob.complete and not blob.settled and (blob.name == "delta" or entry.log.ended):
                    await self._settle(entry, blob)

    async def _settle(self, entry: Entry, blob: Blob) -> None:
        try:
            with entry.hold():
                await blob.settle()
        except StaleError:
            return
        except OSError as error:
            self._note(f"version {entry.version}: {error.strerror}")

    async def _wait_change(self) -> None:
        waiters: list[asyncio.Future[None]] = [self.store.changed.wait(), self.puller.crew.changed.wait()]
        orders = [order.done for order in self._orders.values()]
        try:
            await asyncio.wait({*waiters, *orders}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()

    def _check_tasks(self) -> None:
        """A disk that refuses even a line of a manifest stops the fetching for a while, not the serving."""
        now = asyncio.get_running_loop().time()
        try:
            self.puller.check_tasks()
        except OSError as error:
            if self._revive_at is None:
                self._note(f"no new versions for {DISK_PAUSE_S:.0f} s: {error.strerror or error}")
                self._revive_at = now + DISK_PAUSE_S
        if self._revive_at is not None and now >= self._revive_at:
            self._revive_at = None
            self.puller.revive_watcher()


def _urge_with(puller: Puller) -> Callable[[Entry, str, int], None]:
    def urge(entry: Entry, name: str, index: int) -> None:
        puller.pump.urge(entry, name, index)

    return urge
