"""What a relay can give to others: what it may hold, and which versions it tells of.

Invariants:
- told of are versions that can be finished from here whatever happens upstream, and those that a source announces at
  this moment and that there is room for. So a version whose publisher died leaves no trace in the lists below it, and
  comes back into them with its publisher;
- room is counted as the store counts it: older versions give way, newer ones do not.
"""

from collections.abc import Sequence

from shoal.shardcast.blob import Blob
from shoal.shardcast.sources import SourceBook
from shoal.shardcast.store import Entry, Store


class Stock:
    """Looks at a relay's store and sources; changes nothing."""

    def __init__(self, store: Store, book: SourceBook) -> None:
        self._store = store
        self._book = book

    def is_told(self, entry: Entry) -> bool:
        """Whether others are to hear of a version."""
        if self.can_finish(entry):
            return True
        if not self._book.list_announcers(entry.digest):
            return False
        return any(self.has_room(entry, blob) for blob in entry.blobs)

    def can_finish(self, entry: Entry) -> bool:
        """Whether all that leads to a version is here: its full blob, or its delta and all that leads to its parent."""
        current: Entry | None = entry
        while current is not None and current.log.ended:
            if current.full.complete:
                return True
            if current.delta is None or not current.delta.complete:
                return False
            current = self._find_parent(current)  # of a smaller version, so this ends
        return False

    def find_chain(self, entry: Entry) -> list[Entry]:
        """The versions by whose deltas, all here or still to come, this one is made from the first, whose full blob is
        here; none if there is no such way."""
        chain = [entry]
        while not (chain[-1].complete and chain[-1].full.settled):
            log = chain[-1].log
            version = None if log.delta_settled and log.delta is None else log.head.parent
            parent = None if version is None else self._store.find(version)
            if parent is None or (log.parent_root is not None and parent.log.root not in (None, log.parent_root)):
                return []  # the parent is not here, or was published anew after the delta was made
            chain.append(parent)  # of a smaller version, so this ends
        return chain[::-1]

    def can_make(self, chain: Sequence[Entry]) -> bool:
        """Whether there is room for another full blob of the last version beside all that is here of a chain."""
        limit = self._store.max_bytes
        if limit is None:
            return True
        newest = chain[-1]
        older = [other for other in self._store.entries() if other.version < newest.version and other not in chain]
        spare_bytes = sum(other.disk_bytes for other in older)
        return self._store.used_bytes - spare_bytes + newest.full.layout.total <= limit

    def has_room(self, entry: Entry, blob: Blob) -> bool:
        """Whether a blob is allocated, or could be within the store's limit."""
        limit = self._store.max_bytes
        if limit is None or blob.charged:
            return True
        older = sum(other.disk_bytes for other in self._store.entries() if other.version < entry.version)
        return self._store.used_bytes - older + blob.layout.total <= limit

    def is_too_large(self, blob: Blob) -> bool:
        """Whether there would be no room for a blob even if nothing else were here."""
        return self._store.max_bytes is not None and blob.layout.total > self._store.max_bytes

    def _find_parent(self, entry: Entry) -> Entry | None:
        version = entry.log.head.parent
        parent = None if version is None else self._store.find(version)
        return parent if parent is not None and parent.log.root == entry.log.parent_root else None
