"""What the parts of a swarm cost: CPU seconds of each process with all that it started."""

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.launch.supervise import Supervisor

LOOK_S = 0.5
_TICKS = os.sysconf("SC_CLK_TCK")


class Meter:
    """Counts the CPU seconds of a supervisor's parts; `started` is called with the name and session of each."""

    def __init__(self, supervisor: Supervisor, started: Callable[[str, int], None] = lambda name, pid: None) -> None:
        self._supervisor, self._started = supervisor, started
        self._seen: dict[str, dict[int, float]] = {}
        self._base: dict[str, float] = {}

    @property
    def cpu_s(self) -> dict[str, float]:
        """Of each part, all its starts together, since `begin`."""
        return {name: spent - self._base.get(name, 0.0) for name, spent in self._sum().items()}

    def begin(self) -> None:
        """From now on."""
        self._base = self._sum()

    async def run(self) -> None:
        """Look now and then, for ever."""
        while True:
            seconds = read_seconds()
            for name, state in self._supervisor.states.items():
                if state.process is not None:
                    self._look(name, state.process.pid, seconds)
            await asyncio.sleep(LOOK_S)

    def _look(self, name: str, pid: int, seconds: Mapping[int, float]) -> None:
        known = self._seen.setdefault(name, {})
        if pid not in known:
            self._started(name, pid)
        known[pid] = seconds.get(pid, known.get(pid, 0.0))

    def _sum(self) -> dict[str, float]:
        return {name: sum(spent.values()) for name, spent in self._seen.items()}


def read_seconds() -> dict[int, float]:
    """CPU seconds by session: each part is one, with its children, those that ended too; none without /proc."""
    seconds: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended just now
        session, ticks = int(fields[3]), sum(map(int, fields[11:15]))
        seconds[session] = seconds.get(session, 0.0) + ticks / _TICKS
    return seconds
