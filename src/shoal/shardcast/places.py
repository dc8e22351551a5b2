"""Who writes which shard of a blob.

Invariants:
- a shard has one writer at a time; spares write aside and become the one writer only to put verified bytes in place;
- while a thread still works for a writer that gave up, no other one writes to the shard;
- nothing is kept per shard but for those that are being written, were, or are waited for.
"""

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from shoal.shardcast.signal import Signal

if TYPE_CHECKING:
    from shoal.shardcast.writer import ShardWriter


class Places:
    """The writers of one blob."""

    def __init__(self) -> None:
        self._writers: dict[int, ShardWriter] = {}
        self._waiting: set[ShardWriter] = set()
        """spares, and writers that wait for one to be through"""
        self._draining: set[ShardWriter] = set()
        self._attempts: dict[int, int] = {}
        self._signals: WeakValueDictionary[int, Signal] = WeakValueDictionary()

    @property
    def occupied(self) -> bool:
        """Whether anybody writes to any shard."""
        return bool(self._writers)

    def visible(self, index: int) -> int:
        """Bytes of a shard that its writer put in place."""
        writer = self._writers.get(index)
        return 0 if writer is None else writer.visible

    def attempt(self, index: int) -> int:
        """How many writers a shard has had."""
        return self._attempts.get(index, 0)

    def progress(self, index: int) -> Signal:
        """Notified when something changes about a shard; lives as long as someone has it."""
        signal = self._signals.get(index)
        if signal is None:
            signal = self._signals[index] = Signal()
        return signal

    def notify(self, index: int) -> None:
        """Wake whoever waits for a shard."""
        signal = self._signals.get(index)
        if signal is not None:
            signal.notify()

    def add(self, writer: "ShardWriter") -> None:
        """A writer; it has the place at once, or must `claim` it from a spare that is about to be through."""
        other = self._writers.setdefault(writer.index, writer)
        assert other is writer or other.spare, f"shard {writer.index} has a writer"
        self._attempts[writer.index] = self.attempt(writer.index) + 1
        if other is not writer:
            self._waiting.add(writer)

    def add_spare(self, writer: "ShardWriter") -> None:
        """A writer that writes aside."""
        self._waiting.add(writer)

    async def claim(self, writer: "ShardWriter") -> None:
        """Have the place, once no spare is there any more, unless the writer is over by then."""
        while self._writers.get(writer.index, writer) is not writer and not writer.over:
            await self.progress(writer.index).wait()
        if not writer.over:
            self._waiting.discard(writer)
            self._writers[writer.index] = writer

    def take(self, spare: "ShardWriter") -> None:
        """A spare with verified bytes becomes the one writer; who was it is over."""
        if spare.index in self._writers:
            self._writers[spare.index].abort()
        self._attempts[spare.index] = self.attempt(spare.index) + 1
        self._writers[spare.index] = spare

    def leave(self, writer: "ShardWriter", *, busy: bool) -> None:
        """A writer is through or gave up; `busy`: a thread still works for it."""
        if self._writers.get(writer.index) is writer:
            del self._writers[writer.index]
        self._waiting.discard(writer)
        if busy:
            self._draining.add(writer)
        self.notify(writer.index)

    def end_drain(self, writer: "ShardWriter") -> None:
        """The last thread of a writer is through."""
        self._draining.discard(writer)
        self.notify(writer.index)

    async def wait_drained(self, writer: "ShardWriter") -> None:
        """Until no thread writes to the shard for another writer, one that gave up."""
        while any(other.index == writer.index and other is not writer for other in self._draining):
            await self.progress(writer.index).wait()

    def stop_all(self) -> None:
        """End everyone."""
        for writer in [*self._writers.values(), *self._waiting]:
            writer.abort()
