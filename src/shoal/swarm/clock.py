"""Time that cannot leap: the machine's clock at the start, and from then on the pace of the machine.

A wall clock is set by hand, by a time service, by whoever wakes a virtual machine. If it were believed for one event
of a ledger, whose times never go back, every deadline would stand still until it was right again.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

MAX_SLEW_MS = 1000
"""differences that are followed: a time service moves a clock in small steps"""
LIFE_EVERY_MS = 5000
_END_MS = 253_402_300_800_000
"""of the year 9999"""


def read_clock() -> int:
    """Milliseconds since 1970 by the machine's clock."""
    return time.time_ns() // 1_000_000


def read_pace() -> int:
    """Milliseconds since some moment, time in which the machine slept included; nobody sets it."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1_000_000


def show_time(time_ms: int, pattern: str = "%Y-%m-%d %H:%M UTC") -> str:
    """A time for people; one that no calendar has, which a stranger may have sent, as its number."""
    if not 0 <= time_ms < _END_MS:
        return f"{time_ms} ms"
    return datetime.fromtimestamp(time_ms // 1000, UTC).strftime(pattern)


class SteadyClock:
    """Milliseconds since 1970, as far as the machine's clock was right when this was made."""

    def __init__(self, wall: Callable[[], int] = read_clock, pace: Callable[[], int] = read_pace) -> None:
        self._wall, self._pace = wall, pace
        self._offset_ms = wall() - pace()

    def __call__(self) -> int:
        pace_ms, wall_ms = self._pace(), self._wall()
        if abs(wall_ms - pace_ms - self._offset_ms) <= MAX_SLEW_MS:
            self._offset_ms = wall_ms - pace_ms
        return pace_ms + self._offset_ms


class LifeSign:
    """When a process was last alive, in a file: a ledger in which nothing happens does not say."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._written_ms = 0

    def read(self) -> int:
        """Milliseconds since 1970; 0 if nothing is known."""
        if self._path is None or not self._path.exists():
            return 0
        text = self._path.read_text(encoding="ascii", errors="replace")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0  # a write may have been cut off

    def write(self, now_ms: int) -> None:
        """Note the time, now and then. Nothing waits for the disk: a kill leaves it, a power cut may cost some."""
        if self._path is not None and now_ms - self._written_ms >= LIFE_EVERY_MS:
            self._path.write_text(str(now_ms), encoding="ascii")
            self._written_ms = now_ms
