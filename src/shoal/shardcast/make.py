"""Anchors that a relay makes itself, so that a full blob crosses its link once, when the relay is new.

    deltas on their way -> all here -> being made -> complete
                        -> do not come, do not lead there, or there is no room -> fetched, as by a relay that is new

Invariants:
- one is made at a time, beside the event loop, from versions that are held meanwhile;
- nobody writes to a blob while it is made: requests for its shards wait, each until its own deadline;
- whatever ends the waiting, there is an end: deltas that do not move for `stall_s` are not waited for any more, and
  what was tried in vain is not tried again. A process that was killed in the middle makes it anew, from what is here.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from shoal.shardcast.build import make_full
from shoal.shardcast.errors import DeltaError, ShardError, StaleError
from shoal.shardcast.patience import Patience
from shoal.shardcast.pump import DiskRefusal, Pump
from shoal.shardcast.stock import Stock
from shoal.shardcast.store import Entry, Store


class Maker:
    """Makes full blobs of anchors. Everything here belongs to the event loop's thread."""

    def __init__(
        self, store: Store, stock: Stock, pump: Pump, *, patience: Callable[[], Patience], on_refusal: DiskRefusal
    ) -> None:
        self._store = store
        self._stock = stock
        self._pump = pump
        self._new_patience = patience
        self._on_refusal = on_refusal
        self._patience: dict[str, Patience] = {}
        self._given_up: set[str] = set()
        """digests of versions that are fetched"""
        self._current: Entry | None = None
        self._task: asyncio.Task[None] | None = None

    def is_expected(self, entry: Entry) -> bool:
        """Whether an anchor's full blob will be made here, as far as is known, so that it need not be fetched ahead."""
        if entry is self._current:
            return True
        chain = self._find_chain(entry)
        if not chain or _is_ready(chain):
            return bool(chain)
        patience = self._patience.setdefault(entry.digest, self._new_patience())
        if patience.is_over(None, sum(map(self._count_progress, chain[1:]))):
            self._given_up.add(entry.digest)
        return entry.digest not in self._given_up

    def is_due(self, entry: Entry) -> bool:
        """Whether a full blob is being made, or will be as soon as it has its turn: waiting beats fetching."""
        return entry is self._current or (entry.log.head.anchor and _is_ready(self._find_chain(entry)))

    def start_next(self, is_refused: Callable[[Entry], bool]) -> "asyncio.Task[None] | None":
        """Begin with the newest anchor that can be made, unless another is being made; the work under way."""
        if self._task is None or self._task.done():
            self._check_end()
            self._task = None
            for entry in reversed(self._store.entries()):
                if entry.log.head.anchor and not entry.full.complete and not is_refused(entry):
                    chain = self._find_chain(entry)
                    if _is_ready(chain) and not self._pump.is_wanted(entry, "full"):
                        self._current = entry
                        self._task = asyncio.create_task(self._make(chain))
                        break
        return self._task

    async def close(self) -> None:
        """Stop; what was made half is removed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _find_chain(self, entry: Entry) -> Sequence[Entry]:
        if entry.full.complete or entry.digest in self._given_up:
            return ()
        chain = self._stock.find_chain(entry)
        return chain if chain and self._stock.can_make(chain) else ()

    def _count_progress(self, link: Entry) -> int:
        """A number that grows with every line and byte of a delta."""
        held = 0 if link.delta is None else link.delta.have_bytes + self._pump.count_partial(link, "delta")
        return held + len(link.log.lines)

    async def _make(self, chain: Sequence[Entry]) -> None:
        entry = chain[-1]
        try:
            with ExitStack() as stack:
                for link in chain:
                    stack.enter_context(link.hold())
                missing = await self._complete(chain)
            if missing:
                self._give_up(entry, f"its deltas left {missing} shards wrong, they are fetched")
        except (DeltaError, ShardError) as error:
            self._give_up(entry, f"it cannot be made from its deltas and is fetched ({error})")
        except StaleError:
            self._given_up.add(entry.digest)  # it was dropped
        except OSError as error:
            self._given_up.add(entry.digest)
            self._on_refusal(entry, "full", error)
        finally:
            self._current = None
            self._patience.pop(entry.digest, None)
            self._store.changed.notify()

    async def _complete(self, chain: Sequence[Entry]) -> int:
        """How many shards of the full blob are still missing."""
        full = chain[-1].full
        if full.charged:  # a process that was killed, or requests before all deltas came, left bytes
            await full.prepare()
            if not await full.recheck():
                return 0
        return await make_full(chain)

    def _give_up(self, entry: Entry, reason: str) -> None:
        self._given_up.add(entry.digest)
        self._store.note(f"version {entry.version}: {reason}")

    def _check_end(self) -> None:
        """Raise what ended the last one, if that was a bug of ours."""
        if self._task is not None and not self._task.cancelled():
            self._task.result()


def _is_ready(chain: Sequence[Entry]) -> bool:
    """Whether all deltas of a chain are here, under their final names."""
    return bool(chain) and all(link.log.ended and link.delta is not None and link.delta.settled for link in chain[1:])
