"""Everything that waits, by name: who waits, for whom, since when, until when. No silent hang.

Waits of the run (a step for its groups, the queue for validators) are read from its tables by `status`; those of the
coordinator itself (a decision for the ledger, a file for the store), and those of a node, are entered here while they
last.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from shoal.swarm.messages import WaitInfo

MAX_WAITS = 4096
"""entered at once; more are a leak, or an attack, and are counted instead"""


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that waits."""

    name: str
    owner: str
    for_whom: str
    since_ms: int
    deadline_ms: int = 0
    """0 for what ends by itself"""
    detail: str = ""

    def lasts(self, now_ms: int) -> int:
        """How long it has lasted, in milliseconds."""
        return max(0, now_ms - self.since_ms)

    def is_overdue(self, now_ms: int) -> bool:
        """Whether it passed its deadline."""
        return bool(self.deadline_ms) and now_ms > self.deadline_ms

    def describe(self, now_ms: int) -> WaitInfo:
        """The wait in words."""
        overdue = self.is_overdue(now_ms)
        lasted = f"for {self.lasts(now_ms) // 1000} s"
        end = ""
        if self.deadline_ms:
            left_s = (self.deadline_ms - now_ms) // 1000
            end = f", {-left_s} s past its deadline" if overdue else f", {left_s} s to its deadline"
        detail = f": {self.detail}" if self.detail else ""
        return WaitInfo(
            name=self.name,
            owner=self.owner,
            for_whom=self.for_whom,
            since_ms=self.since_ms,
            deadline_ms=self.deadline_ms,
            overdue=overdue,
            text=f"{self.owner} waits for {self.for_whom} {lasted}{end}{detail}",
        )


class WaitBook:
    """The waits of this process."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waits: dict[int, Wait] = {}
        self._numbers = itertools.count()
        self.num_dropped = 0

    @contextmanager
    def wait(
        self, name: str, *, owner: str, for_whom: str, timeout_s: float = 0.0, detail: str = ""
    ) -> Iterator[Callable[[str], None]]:
        """Enter a wait while the block runs, which may say in the meantime what it knows of the reason."""
        now_ms = self._clock()
        deadline_ms = now_ms + round(1000 * timeout_s) if timeout_s else 0
        number = self._enter_wait(Wait(name, owner, for_whom, now_ms, deadline_ms, detail))
        try:
            yield lambda text: self._change_detail(number, text)
        finally:
            with self._lock:
                self._waits.pop(number, None)

    def list_waits(self) -> list[Wait]:
        """All waits, the longest first."""
        with self._lock:
            return sorted(self._waits.values(), key=lambda wait: wait.since_ms)

    def _change_detail(self, number: int, text: str) -> None:
        with self._lock:
            if number in self._waits:
                self._waits[number] = replace(self._waits[number], detail=text)

    def _enter_wait(self, wait: Wait) -> int:
        with self._lock:
            number = next(self._numbers)
            if len(self._waits) < MAX_WAITS:
                self._waits[number] = wait
            else:
                self.num_dropped += 1
            return number
