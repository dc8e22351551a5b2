"""How far a pull has come, for whoever looks: numbers to draw a bar with, and the name of what is waited for."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

_SMOOTH_S = 2.0
"""Time over which the rate is smoothed."""


class RateMeter:
    """Bytes per second of a counter that only grows, smoothed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: tuple[float, int] | None = None
        self.rate = 0.0

    def update(self, total: int) -> float:
        """Look at the counter; call this a few times per second."""
        now = self._clock()
        if self._seen is None:
            self._seen = (now, total)
            return self.rate
        then, before = self._seen
        elapsed = now - then
        if elapsed <= 0:
            return self.rate
        share = 1.0 if not self.rate else min(1.0, elapsed / _SMOOTH_S)
        self.rate += share * ((total - before) / elapsed - self.rate)
        self._seen = (now, total)
        return self.rate


@dataclass(frozen=True, slots=True)
class SourceShare:
    """What one source has done so far."""

    url: str
    bytes: int
    shards: int
    failures: int
    wrong: int
    weight: float
    """its share of the draws, 0 .. 1"""
    reason: str
    """its last failure"""


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a pull."""

    version: int | None
    """the version being fetched; None while none is"""
    stage: str
    """idle, waiting, full, delta or applying"""
    bytes_done: int
    bytes_total: int
    rate: float
    """bytes per second received, smoothed"""
    eta_s: float | None
    """seconds to go at that rate; None if it cannot be said"""
    waiting_for: str | None
    """what nothing can go on without at this moment, in words"""
    sources: tuple[SourceShare, ...] = field(default=())
