"""A relay: what it pulls from its upstreams it serves to others, from the first byte on.

It fetches ahead of any request the delta of every version, and the full blob of versions without a delta: what
everybody will ask for. The full blob of an anchor it makes from the one before and the deltas since (make.py), and
fetches it only where it cannot. A shard somebody asks for before it is here becomes urgent. Cut-through needs nothing
of its own: the server sends what a writer has written, while it writes.

Invariants:
- whatever happens upstream or to the disk, what is here is served;
- nothing is fetched twice: a restart goes on from the shards on disk;
- the store's limits hold: old versions go first, and what has no room is noted once, not fetched and not told of;
- an order that does not move is taken back for a while, so that it does not hold the places of those that would.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType

from shoal.shardcast.blob import Blob
from shoal.shardcast.crew import GoneError
from shoal.shardcast.errors import StaleError
from shoal.shardcast.limits import ServeLimits
from shoal.shardcast.link import Deadlines
from shoal.shardcast.make import Maker
from shoal.shardcast.patience import Patience, StallBook
from shoal.shardcast.pull import Puller
from shoal.shardcast.pump import Order
from shoal.shardcast.server import Server
from shoal.shardcast.stock import Stock
from shoal.shardcast.store import DEFAULT_KEEP, Entry, Store
from shoal.shardcast.tickets import TicketBook

DISK_PAUSE_S = 30.0
"""How long a blob that the disk had no room for is left alone."""
GONE_PAUSE_S = 1.0
_LOOK_S = 1.0

Key = tuple[str, str]


class Relay:
    """A store, a server and a puller. Use it as `async with await Relay.open(...) as relay: await relay.wait()`."""

    def __init__(self, store: Store, puller: Puller, note: Callable[[str], None]) -> None:
        self.store = store
        self.puller = puller
        self._note = note
        self._stock = Stock(store, puller.crew.book)
        self._stalls = StallBook(puller.crew.book, puller.crew.deadlines.stall_s)
        self._maker = Maker(store, self._stock, puller.pump, patience=self._new_patience, on_refusal=self._pause_blob)
        self._making: asyncio.Task[None] | None = None
        self._orders: dict[Key, Order] = {}
        self._patience: dict[Key, Patience] = {}
        self._paused: dict[Key, float] = {}
        """until when no order is placed"""
        self._refused: dict[Key, float] = {}
        """until when the disk is not tried again"""
        self._noted: set[Key] = set()
        """blobs that the operator was told of"""
        self._told: set[str] = set()
        """digests of the versions that others hear of"""
        self._revive_at: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._server: Server | None = None
        puller.pump.on_refusal = self._pause_blob

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
        store = await Store.open(
            data, run=run, publisher=publisher, keep=keep, max_bytes=max_bytes, role="relay", note=note
        )
        try:
            puller = Puller(store, urls, in_flight=in_flight, deadlines=deadlines, ticket=ticket, rng=rng, note=note)
            relay = cls(store, puller, note)
            relay._server = Server(
                store,
                limits=limits or ServeLimits(),
                want=relay._want_shard,
                announce=relay._stock.is_told,
                tickets=tickets,
                role="relay",
                describe=lambda: {"upstreams": [share.url for share in puller.progress.sources]},
            )
            await relay.server.start(host, port)
        except BaseException:
            await store.close()
            raise
        return relay

    @property
    def server(self) -> Server:
        assert self._server is not None, "made by `open`"
        return self._server

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
        await self._maker.close()
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
            self._making = self._maker.start_next(lambda entry: self._is_refused((entry.digest, "full")))
            self._tell_others()
            await self._wait_change()
            self._check_tasks()
            self._take_results()
            self._take_back()
            await self._settle_all()

    def _place_orders(self) -> None:
        now = _now()
        self._paused = {key: until for key, until in self._paused.items() if until > now}
        for entry, blob in self._list_wanted():
            key = (entry.digest, blob.name)
            if blob.complete or key in self._orders:
                continue
            if self._stock.is_too_large(blob):
                self._note_once(
                    key, f"version {entry.version}: its {blob.name} blob has no room in the cache, left out"
                )
            elif self._stock.has_room(entry, blob) and not self._is_refused(key) and key not in self._paused:
                spare = blob is entry.full and self._stock.can_finish(entry)  # who needs it can go by deltas
                self._orders[key] = self.puller.pump.order(entry, blob.name, spare=spare)
                self._patience[key] = self._new_patience()

    def _list_wanted(self) -> Iterator[tuple[Entry, Blob]]:
        """What is fetched ahead of any request, of versions that some source has."""
        for entry in self.store.entries():
            if not self.puller.crew.book.list_holders(entry.digest) or self._stalls.is_stalled(entry):
                continue
            if entry.delta is not None:
                yield entry, entry.delta
            if self._is_full_wanted(entry):
                yield entry, entry.full

    def _is_full_wanted(self, entry: Entry) -> bool:
        if entry.full.complete:
            return False
        if entry.log.delta_settled and entry.delta is None:
            return True
        return entry.log.head.anchor and not self._maker.is_expected(entry)

    def _want_shard(self, entry: Entry, name: str, index: int, peer: str) -> AbstractContextManager[object] | None:
        """Make a shard urgent, unless there is no place to put it."""
        blob = entry.full if name == "full" else entry.delta
        if blob is None or not self._stock.has_room(entry, blob) or self._is_refused((entry.digest, name)):
            return None
        if blob is entry.full and self._maker.is_due(entry):
            return nullcontext()  # who asks waits until it is made, or for as long as any request waits
        return self.puller.pump.urge(entry, name, index, peer)

    def _tell_others(self) -> None:
        """Wake those who wait for versions when one comes that was held back."""
        told = {entry.digest for entry in self.store.entries() if self._stock.is_told(entry)}
        if not told <= self._told:
            self.store.changed.notify()
        self._told = told

    def _take_results(self) -> None:
        """Let orders go that ended. Those that failed are placed again after a pause."""
        for key, order in list(self._orders.items()):
            if not order.done.done():
                continue
            self._forget_order(key)
            error = None if order.done.cancelled() else order.done.exception()
            if isinstance(error, GoneError | StaleError):
                self._paused[key] = _now() + GONE_PAUSE_S
            elif error is not None and not isinstance(error, OSError):  # of which `_pause_blob` heard
                raise error

    def _take_back(self) -> None:
        """Let orders go that do not move."""
        for key, order in list(self._orders.items()):
            blob = order.blob
            arrived = blob.have_bytes + self.puller.pump.count_partial(order.entry, blob.name)
            working = self.puller.pump.is_working(order)  # one that waits for its turn is not to blame
            if self._patience[key].is_over(working, arrived + len(order.entry.log.lines)) and working:
                self._stalls.add(order.entry)
                self.puller.pump.cancel(order)
                self._forget_order(key)

    def _new_patience(self) -> Patience:
        return Patience(self.puller.crew.deadlines.stall_s, self.puller.crew.book.clock)

    def _forget_order(self, key: Key) -> None:
        del self._orders[key], self._patience[key]

    def _pause_blob(self, entry: Entry, name: str, error: OSError) -> None:
        """The disk takes no more of a blob: leave it alone for a while, and say so the first time."""
        key = (entry.digest, name)
        self._refused[key] = _now() + DISK_PAUSE_S
        self._note_once(
            key, f"version {entry.version} is tried again every {DISK_PAUSE_S:.0f} s: {error.strerror or error}"
        )

    def _is_refused(self, key: Key) -> bool:
        return self._refused.get(key, 0.0) > _now()

    def _note_once(self, key: Key, text: str) -> None:
        if key not in self._noted:
            self._noted.add(key)
            self._note(text)

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
            await self.store.trim()  # the last complete one may have been kept only because this one was not
        except StaleError:
            return
        except OSError as error:
            self._note(f"version {entry.version}: {error.strerror}")

    async def _wait_change(self) -> None:
        waiters: list[asyncio.Future[None]] = [self.store.changed.wait(), self.puller.crew.changed.wait()]
        others: list[asyncio.Future[None]] = [order.done for order in self._orders.values()]
        others += [self._making] if self._making else []
        try:
            await asyncio.wait({*waiters, *others}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()

    def _check_tasks(self) -> None:
        """A disk that refuses even a line of a manifest stops the fetching for a while, not the serving."""
        now = _now()
        try:
            self.puller.check_tasks()
        except OSError as error:
            if self._revive_at is None:
                self._note(f"no new versions for {DISK_PAUSE_S:.0f} s: {error.strerror or error}")
                self._revive_at = now + DISK_PAUSE_S
        if self._revive_at is not None and now >= self._revive_at:
            self._revive_at = None
            self.puller.revive_watcher()


def _now() -> float:
    return asyncio.get_running_loop().time()
