"""Time that never jumps: the system clock at start-up, and the monotonic clock from then on.

A system clock is changed by hand, by a time service, or when a virtual machine wakes up. A ledger's times never go
back, so one event with a wrong time would stall every deadline until the system clock caught up.
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
    """Milliseconds since 1970 by the system clock."""
    return time.time_ns() // 1_000_000


def read_pace() -> int:
    """Milliseconds since an arbitrary moment, including time the machine slept; cannot be set."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1_000_000


def show_time(time_ms: int, pattern: str = "%Y-%m-%d %H:%M UTC") -> str:
    """Format a timestamp; an out-of-range value, which a stranger may have sent, is shown as a number."""
    if not 0 <= time_ms < _END_MS:
        return f"{time_ms} ms"
    return datetime.fromtimestamp(time_ms // 1000, UTC).strftime(pattern)


class SteadyClock:
    """Milliseconds since 1970, as accurate as the system clock was at construction."""

    def __init__(self, wall: Callable[[], int] = read_clock, pace: Callable[[], int] = read_pace) -> None:
        self._wall, self._pace = wall, pace
        self._offset_ms = wall() - pace()

    def __call__(self) -> int:
        pace_ms, wall_ms = self._pace(), self._wall()
        if abs(wall_ms - pace_ms - self._offset_ms) <= MAX_SLEW_MS:
            self._offset_ms = wall_ms - pace_ms
        return pace_ms + self._offset_ms


class LastAliveFile:
    """Stores when a process was last alive; an idle ledger does not record that."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._written_ms = 0

    def read(self) -> int:
        """Milliseconds since 1970; 0 if unknown."""
        if self._path is None or not self._path.exists():
            return 0
        text = self._path.read_text(encoding="ascii", errors="replace")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0  # a write may be incomplete

    def write(self, now_ms: int) -> None:
        """Store the time, called periodically. Not synced to disk: it survives a kill, a power cut may lose some."""
        if self._path is not None and now_ms - self._written_ms >= LIFE_EVERY_MS:
            self._path.write_text(str(now_ms), encoding="ascii")
            self._written_ms = now_ms
