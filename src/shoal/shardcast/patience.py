"""How long to wait for what does not move, and when to try it again.

A publisher may die in the middle of a version, and a relay may announce what it cannot hold. Nothing says so: no more
lines come, and no more bytes. So a version is given up for a while when it has not moved for some time, and taken up
again when there is reason to: another line, another source, or a pause that doubles from time to time.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.shardcast.sources import Source, SourceBook
from shoal.shardcast.store import Entry

FIRST_PAUSE = 4
"""How many times longer a version is left alone than it was waited for, the first time."""
MAX_PAUSE_S = 600.0


class Patience:
    """Whether a count still grows. Bytes that turned out wrong and come again are no progress: only a record counts."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._what: object = None
        self._most = -1
        self._moved_at = clock()

    def is_over(self, what: object, count: int) -> bool:
        """Whether the count of this thing reached nothing new for too long. With another thing, and after a yes, the
        time begins anew."""
        now = self._clock()
        if what != self._what or count > self._most:
            self._what, self._most, self._moved_at = what, count, now
        if now - self._moved_at < self._limit_s:
            return False
        self._moved_at = now
        return True


@dataclass(frozen=True, slots=True)
class _Stall:
    num_lines: int
    sources: frozenset[Source]
    until: float
    count: int


class StallBook:
    """Versions that did not move. One event loop uses it."""

    def __init__(self, book: SourceBook, stall_s: float) -> None:
        self._book = book
        self._pause_s = FIRST_PAUSE * stall_s
        self._stalls: dict[str, _Stall] = {}

    def add(self, entry: Entry) -> None:
        """An entry did not move for too long."""
        count = self._stalls[entry.digest].count + 1 if entry.digest in self._stalls else 0
        until = self._book.clock() + min(MAX_PAUSE_S, self._pause_s * 2 ** min(count, 16))
        sources = frozenset(self._book.list_announcers(entry.digest))
        self._stalls[entry.digest] = _Stall(len(entry.log.lines), sources, until, count)

    def is_stalled(self, entry: Entry) -> bool:
        """Whether nothing has changed since that would make another try worth it."""
        stall = self._stalls.get(entry.digest)
        if stall is None or self._book.clock() >= stall.until or len(entry.log.lines) > stall.num_lines:
            return False
        return stall.sources.issuperset(self._book.list_announcers(entry.digest))
