"""Shards that somebody is waiting for right now, and who.

Invariants:
- a shard is urgent only while one of its callers is there; a caller who leaves takes its wish along;
- one peer has at most `MAX_PER_PEER` wishes here, all together at most `MAX_URGENT` shards. What is above that is not
  urgent, but comes all the same when its blob is fetched anyway;
- of two urgent shards the one of the newer version comes first, so that old ones cannot hold up what is new.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.shardcast.blob import Blob
from shoal.shardcast.store import Entry

MAX_URGENT = 1024
MAX_PER_PEER = 64

Key = tuple[str, str, int]
"""Digest of a version, name of a blob, number of a shard."""


@dataclass(slots=True)
class _Wish:
    entry: Entry
    order: int
    num_callers: int = 0


class UrgentBook:
    """Who waits for which shard."""

    def __init__(self) -> None:
        self._wishes: dict[Key, _Wish] = {}
        self._peers: Counter[str] = Counter()
        self._count = 0

    def __len__(self) -> int:
        return len(self._wishes)

    def __contains__(self, key: Key) -> bool:
        return key in self._wishes

    @contextmanager
    def hold(self, entry: Entry, key: Key, peer: str, on_end: Callable[[], None]) -> Iterator[bool]:
        """While the block runs the shard is urgent; False if there are too many. `on_end` when its last caller left."""
        if self._peers[peer] >= MAX_PER_PEER or (key not in self._wishes and len(self) >= MAX_URGENT):
            yield False
            return
        self._count += 1
        wish = self._wishes.setdefault(key, _Wish(entry, self._count))
        wish.num_callers += 1
        self._peers[peer] += 1
        try:
            yield True
        finally:
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]
            wish.num_callers -= 1
            if not wish.num_callers and self._wishes.get(key) is wish:
                del self._wishes[key]
                on_end()

    def list_missing(self) -> list[tuple[Key, Entry]]:
        """What is urgent and still to be fetched, the most urgent first."""
        missing = [(key, wish) for key, wish in self._wishes.items() if not _is_settled(wish.entry, key)]
        missing.sort(key=lambda pair: (-pair[1].entry.version, pair[1].order))
        return [(key, wish.entry) for key, wish in missing]

    def forget(self, key: Key) -> None:
        """No longer urgent: its callers have it, or will hear that it cannot be had."""
        self._wishes.pop(key, None)


def _is_settled(entry: Entry, key: Key) -> bool:
    """Whether there is nothing more to fetch for a wish."""
    blob: Blob | None = entry.full if key[1] == "full" else entry.delta
    return entry.gone or blob is None or blob.has(key[2])
