"""A relay serves to others what it pulls from its upstreams, from the first byte on.

Ahead of any request it fetches the delta of every version, and the full blob of versions without a delta: what every
client will ask for. It builds the full blob of an anchor from the previous one and the deltas since (`AnchorBuilder`),
and fetches it only if that fails. A shard that is requested before it has arrived becomes urgent. Cut-through needs no
extra code: the server sends what a writer has written, while it writes.

Invariants:
- whatever happens upstream or to the disk, everything stored here is served;
- nothing is fetched twice: a restart continues from the shards on disk;
- the store's limits hold: old versions are dropped first. A blob without space is logged once, not fetched and not
  announced;
- an order that makes no progress is withdrawn for a while, so that it does not block others.

`RelayInventory`: what a relay can offer to others, that is, what it may hold and which versions it announces.

Invariants:
- it announces versions that can be completed from here whatever happens upstream, and those that a source announces at
  this moment and that there is space for. So a version whose publisher died disappears from the lists downstream, and
  comes back with its publisher;
- space is counted as the store counts it: older versions are evicted, newer ones are not.

`AnchorBuilder`: anchors that a relay builds itself, so that a full blob crosses its link only once, when the relay is
new.

    deltas arriving -> all here -> being built -> complete
                    -> missing, wrong result, or no space -> fetched, as by a new relay

Invariants:
- one anchor is built at a time, concurrently with the event loop, from versions that are held meanwhile;
- nobody writes to a blob while it is built: requests for its shards wait, each until its own deadline;
- waiting always ends: deltas without progress for `stall_s` are no longer waited for, and a failed build is not
  repeated. A process that was killed in the middle builds the anchor again from what is stored here.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack
from weakref import WeakKeyDictionary, WeakSet

from shoal.net.limits import ServeLimits
from shoal.shardcast.delta.apply import make_full
from shoal.shardcast.errors import DeltaError, ShardError, StaleError
from shoal.shardcast.fetch.plan import StallDetector, StallTable
from shoal.shardcast.fetch.pull import FetchOptions, Puller
from shoal.shardcast.fetch.scheduler import DiskRefusal, FetchOrder
from shoal.shardcast.fetch.upstream_stats import UpstreamTable
from shoal.shardcast.fetch.upstreams import GoneError
from shoal.shardcast.serve.server import ShardServer
from shoal.shardcast.store.blob import Blob
from shoal.shardcast.store.store import DEFAULT_KEEP, StoredVersion, VersionStore
from shoal.shardcast.tickets import TicketTable
from shoal.util.aio import wait_any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RelayInventory:
    """A read-only view of a relay's store and sources."""

    _store: VersionStore
    _upstreams: UpstreamTable

    def is_announced(self, entry: StoredVersion) -> bool:
        """Whether a version is announced to others."""
        if self.can_finish(entry):
            return True
        if not self._upstreams.list_announcers(entry.digest):
            return False
        return any(map(self.has_room, entry.blobs))

    def can_finish(self, entry: StoredVersion) -> bool:
        """Whether everything needed is here: the full blob, or the delta and everything needed for its parent."""
        current: StoredVersion | None = entry
        while current is not None and current.log.ended:
            if current.full.complete:
                return True
            if current.delta is None or not current.delta.complete:
                return False
            current = self._store.find_parent(current)  # a smaller version, so this ends
        return False

    def find_chain(self, entry: StoredVersion) -> list[StoredVersion]:
        """The versions by whose deltas (here or still to come) this one is built from the first, whose full blob is
        here.

        Empty if there is no such chain.
        """
        chain = [entry]
        while not chain[-1].ready:
            parent = self._store.find_parent(chain[-1])
            if parent is None:
                return []
            chain.append(parent)  # a smaller version, so this ends
        return chain[::-1]

    def can_make(self, chain: Sequence[StoredVersion]) -> bool:
        """Whether there is space for another full blob of the last version besides the whole chain."""
        return self._fits(chain[-1].full, chain)

    def has_room(self, blob: Blob) -> bool:
        """Whether a blob is allocated, or could be within the store's limit."""
        return blob.charged or self._fits(blob)

    def is_too_large(self, blob: Blob) -> bool:
        """Whether a blob would not fit even into an empty store."""
        return self._store.max_bytes is not None and blob.layout.total > self._store.max_bytes

    def _fits(self, blob: Blob, kept: Sequence[StoredVersion] = ()) -> bool:
        """Whether the limit holds with one more such blob after evicting older versions except those in `kept`."""
        version = blob.entry.version
        older = [other for other in self._store.entries() if other.version < version and other not in kept]
        used = self._store.used_bytes - sum(other.disk_bytes for other in older) + blob.layout.total
        return self._store.max_bytes is None or used <= self._store.max_bytes


@dataclass(eq=False, slots=True)
class AnchorBuilder:
    """Builds full blobs of anchors. Runs in the event loop's thread only."""

    _puller: Puller
    _inventory: RelayInventory
    _on_refusal: DiskRefusal
    _patience: dict[str, StallDetector] = field(default_factory=dict)
    _given_up: set[str] = field(default_factory=set)
    """digests of versions that are fetched instead"""
    _current: StoredVersion | None = None
    _task: "asyncio.Task[None] | None" = None

    def is_expected(self, entry: StoredVersion) -> bool:
        """Whether an anchor's full blob will probably be built here, so that it need not be fetched ahead."""
        if entry is self._current:
            return True
        chain = self._find_chain(entry)
        if not chain or _is_ready(chain):
            return bool(chain)
        patience = self._patience.setdefault(entry.digest, self._puller.new_stall_detector())
        if patience.is_over(None, sum(map(self._count_progress, chain[1:]))):
            self._given_up.add(entry.digest)
        return entry.digest not in self._given_up

    def is_due(self, entry: StoredVersion) -> bool:
        """Whether a full blob is being built or queued: waiting is better than fetching."""
        return entry is self._current or (entry.log.head.anchor and _is_ready(self._find_chain(entry)))

    def start_next(self, is_refused: Callable[[Blob], bool]) -> "asyncio.Task[None] | None":
        """Start building the newest anchor that can be built, unless one is in progress; returns the current task."""
        if self._task is None or self._task.done():
            if self._task is not None and not self._task.cancelled():
                self._task.result()  # raises the exception of a bug
            self._task = None
            for entry in reversed(self._puller.store.entries()):
                if entry.log.head.anchor and not entry.full.complete and not is_refused(entry.full):
                    chain = self._find_chain(entry)
                    if _is_ready(chain) and not self._puller.scheduler.is_wanted(entry.full):
                        self._current = entry
                        self._task = asyncio.create_task(self._make(chain))
                        break
        return self._task

    async def close(self) -> None:
        """Stop; a half-built blob is removed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _find_chain(self, entry: StoredVersion) -> Sequence[StoredVersion]:
        if entry.full.complete or entry.digest in self._given_up:
            return ()
        chain = self._inventory.find_chain(entry)
        return chain if chain and self._inventory.can_make(chain) else ()

    def _count_progress(self, link: StoredVersion) -> int:
        """A number that grows with every line and byte of a delta."""
        arrived = 0 if link.delta is None else self._puller.scheduler.count_arrived(link.delta)
        return arrived + len(link.log.lines)

    async def _make(self, chain: Sequence[StoredVersion]) -> None:
        entry = chain[-1]
        try:
            with ExitStack() as stack:
                for link in chain:
                    stack.enter_context(link.hold())
                missing = await self._complete(chain)
            if missing:
                self._give_up(entry, f"{missing} shards built from deltas are wrong and will be fetched")
        except (DeltaError, ShardError) as error:
            self._give_up(entry, f"cannot be built from deltas and will be fetched ({error})")
        except StaleError:
            self._given_up.add(entry.digest)  # it was dropped
        except OSError as error:
            self._given_up.add(entry.digest)
            self._on_refusal(entry.full, error)
        finally:
            self._current = None
            self._patience.pop(entry.digest, None)
            self._puller.store.changed.notify()

    async def _complete(self, chain: Sequence[StoredVersion]) -> int:
        """Build the full blob; returns how many shards are still missing."""
        full = chain[-1].full
        if full.charged:  # a killed process, or requests before all deltas arrived, left bytes
            await full.prepare()
            if not await full.recheck():
                return 0
        return await make_full(chain)

    def _give_up(self, entry: StoredVersion, reason: str) -> None:
        self._given_up.add(entry.digest)
        logger.warning(f"version {entry.version}: {reason}")


def _is_ready(chain: Sequence[StoredVersion]) -> bool:
    """Whether all deltas of a chain are here, under their final names."""
    return bool(chain) and all(link.log.ended and link.delta is not None and link.delta.settled for link in chain[1:])


DISK_PAUSE_S = 30.0
"""How long to wait before retrying a blob that the disk had no space for."""
GONE_PAUSE_S = 1.0
_LOOK_S = 1.0


class Relay:
    """A store, a server and a puller. Use it as `async with await Relay.open(...) as relay: await relay.wait()`."""

    def __init__(
        self,
        store: VersionStore,
        puller: Puller,
        *,
        limits: ServeLimits | None = None,
        tickets: TicketTable | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.store = store
        self.puller = puller
        self._inventory = RelayInventory(store, puller.upstreams)
        self._stalls = StallTable(puller.upstreams, puller.upstreams.deadlines.stall_s)
        self._builder = AnchorBuilder(puller, self._inventory, self._pause_blob)
        self._making: asyncio.Task[None] | None = None
        self._orders: dict[FetchOrder, StallDetector] = {}
        self._paused: WeakKeyDictionary[Blob, float] = WeakKeyDictionary()
        """until when no order is placed"""
        self._refused: WeakKeyDictionary[Blob, float] = WeakKeyDictionary()
        """until when the disk is not retried"""
        self._noted: WeakSet[Blob] = WeakSet()
        """blobs that were already reported in the log"""
        self._announced: set[str] = set()
        """digests of the announced versions"""
        self._revive_at: float | None = None
        self._task: asyncio.Task[None] | None = None
        puller.scheduler.on_refusal = self._pause_blob
        self.server = ShardServer(
            store,
            limits=limits,
            want=self._want_shard,
            announce=self._inventory.is_announced,
            tickets=tickets,
            role="relay",
            tls=tls,
            describe=lambda: {"upstreams": [str(upstream) for upstream in puller.upstreams.all]},
        )

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
        keep_s: float = 0.0,
        keep_bytes: int | None = None,
        max_bytes: int | None = None,
        limits: ServeLimits | None = None,
        tickets: TicketTable | None = None,
        tls: ssl.SSLContext | None = None,
        **options: Unpack[FetchOptions],
    ) -> "Relay":
        """Open the data folder and start serving what it holds, encrypted if `tls` is given."""
        store = await VersionStore.open(
            data,
            run=run,
            publisher=publisher,
            keep=keep,
            keep_s=keep_s,
            keep_bytes=keep_bytes,
            max_bytes=max_bytes,
            role="relay",
        )
        try:
            relay = cls(store, Puller(store, urls, **options), limits=limits, tickets=tickets, tls=tls)
            await relay.server.start(host, port)
        except BaseException:
            await store.close()
            raise
        return relay

    async def __aenter__(self) -> "Relay":
        try:
            await self.puller.__aenter__()
        except BaseException:
            await self.close()
            raise
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop fetching, let transfers end, close the store."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._builder.close()
        await self.puller.close()
        await self.server.close()
        await self.store.close()

    async def wait(self) -> None:
        """Wait until an essential task ends; raises its exception."""
        assert self._task is not None, "enter the context first"
        await asyncio.shield(self._task)

    async def _run(self) -> None:
        while True:
            self._place_orders()
            self._making = self._builder.start_next(self._is_refused)
            self._notify_pollers()
            await self._wait_change()
            self._check_tasks()
            self._take_results()
            self._take_back()
            await self._settle_all()

    def _place_orders(self) -> None:
        ordered = {order.blob for order in self._orders}
        for blob in self._list_wanted():
            entry = blob.entry
            if blob.complete or blob in ordered:
                continue
            if self._inventory.is_too_large(blob):
                self._note_once(blob, f"no space in the cache for its {blob.name} blob, skipped")
            elif (
                self._inventory.has_room(blob) and not self._is_refused(blob) and self._paused.get(blob, 0.0) <= _now()
            ):
                spare = blob is entry.full and self._inventory.can_finish(entry)  # clients can use deltas instead
                self._orders[self.puller.scheduler.order(blob, spare=spare)] = self.puller.new_stall_detector()

    def _list_wanted(self) -> Iterator[Blob]:
        """The blobs fetched ahead of any request, of versions that some source has."""
        for entry in self.store.entries():
            if not self.puller.upstreams.list_holders(entry.digest) or self._stalls.is_stalled(entry):
                continue
            if entry.delta is not None:
                yield entry.delta
            if self._is_full_wanted(entry):
                yield entry.full

    def _is_full_wanted(self, entry: StoredVersion) -> bool:
        if entry.full.complete:
            return False
        if entry.log.delta_settled and entry.delta is None:
            return True
        return entry.log.head.anchor and not self._builder.is_expected(entry)

    def _want_shard(self, blob: Blob, index: int, peer: str) -> AbstractContextManager[object] | None:
        """Make a shard urgent, unless there is no space for it."""
        if not self._inventory.has_room(blob) or self._is_refused(blob):
            return None
        if blob is blob.entry.full and self._builder.is_due(blob.entry):
            return nullcontext()  # the caller waits until it is built, or until its own deadline
        return self.puller.scheduler.hold_urgent(blob, index, peer)

    def _notify_pollers(self) -> None:
        """Wake long-polling clients when a version that was held back becomes available."""
        announced = {entry.digest for entry in self.store.entries() if self._inventory.is_announced(entry)}
        if not announced <= self._announced:
            self.store.changed.notify()
        self._announced = announced

    def _take_results(self) -> None:
        """Remove finished orders. Failed ones are placed again after a pause."""
        for order in [order for order in self._orders if order.done.done()]:
            del self._orders[order]
            error = None if order.done.cancelled() else order.done.exception()
            if isinstance(error, GoneError | StaleError):
                self._paused[order.blob] = _now() + GONE_PAUSE_S
            elif error is not None and not isinstance(error, OSError):  # an OSError was handled by `_pause_blob`
                raise error

    def _take_back(self) -> None:
        """Withdraw orders that make no progress."""
        scheduler = self.puller.scheduler
        for order, patience in list(self._orders.items()):
            entry = order.blob.entry
            working = scheduler.is_working(order)  # an order that waits for its turn is not to blame
            if patience.is_over(working, scheduler.count_arrived(order.blob) + len(entry.log.lines)) and working:
                self._stalls.add(entry)
                scheduler.cancel(order)
                del self._orders[order]

    def _pause_blob(self, blob: Blob, error: OSError) -> None:
        """Pause a blob that the disk has no space for, and log that the first time."""
        self._refused[blob] = _now() + DISK_PAUSE_S
        self._note_once(blob, f"retrying every {DISK_PAUSE_S:.0f} s: {error.strerror or error}")

    def _is_refused(self, blob: Blob) -> bool:
        return self._refused.get(blob, 0.0) > _now()

    def _note_once(self, blob: Blob, text: str) -> None:
        if blob not in self._noted:
            self._noted.add(blob)
            logger.warning(f"version {blob.entry.version}: {text}")

    async def _settle_all(self) -> None:
        """Move complete blobs to their final names."""
        for entry in self.store.entries():
            for blob in entry.blobs:
                if blob.complete and not blob.settled and (blob.name == "delta" or entry.log.ended):
                    await self._settle(entry, blob)

    async def _settle(self, entry: StoredVersion, blob: Blob) -> None:
        try:
            with entry.hold():
                await blob.settle()
            # The previous complete version may have been kept only because this one was incomplete.
            await self.store.trim()
        except StaleError:
            return
        except OSError as error:
            logger.warning(f"version {entry.version}: {error.strerror}")

    async def _wait_change(self) -> None:
        others: list[asyncio.Future[None]] = [order.done for order in self._orders]
        others += [self._making] if self._making else []
        await wait_any([self.store.changed, self.puller.upstreams.changed], _LOOK_S, *others)

    def _check_tasks(self) -> None:
        """If the disk refuses even a line of a manifest, pause fetching but continue serving."""
        now = _now()
        try:
            self.puller.check_tasks()
        except OSError as error:
            if self._revive_at is None:
                logger.warning(f"fetching of new versions paused for {DISK_PAUSE_S:.0f} s: {error.strerror or error}")
                self._revive_at = now + DISK_PAUSE_S
        if self._revive_at is not None and now >= self._revive_at:
            self._revive_at = None
            self.puller.revive_watcher()


def _now() -> float:
    return asyncio.get_running_loop().time()
