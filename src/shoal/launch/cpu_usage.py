"""What the parts of a swarm cost: CPU seconds of each process with all that it started."""

import asyncio
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from shoal.launch.supervisor import Supervisor
from shoal.util.files import write_atomic

POLL_S = 0.5
VALIDATORS, GENERATORS = "validator-", ("worker-", "cheat-", "campaign-")
"""how the names of parts begin that check, and that generate"""
_TICKS = os.sysconf("SC_CLK_TCK")


class CpuMeter:
    """Counts the CPU seconds of a supervisor's parts; `started` is called with the name and session of each."""

    def __init__(self, supervisor: Supervisor, started: Callable[[str, int], None] = lambda name, pid: None) -> None:
        self._supervisor, self._started = supervisor, started
        self._spent: dict[str, dict[int, float]] = {}
        self._base: dict[str, float] = {}

    @property
    def cpu_s(self) -> dict[str, float]:
        """Of each part, all its starts together, since `begin`."""
        return {name: spent - self._base.get(name, 0.0) for name, spent in self._sum().items()}

    def begin(self) -> None:
        """Count from now on."""
        self._base = self._sum()

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            seconds = read_seconds()
            for name, state in self._supervisor.states.items():
                if state.process is not None:
                    self._update(name, state.process.pid, seconds)
            await asyncio.sleep(POLL_S)

    def _update(self, name: str, pid: int, seconds: Mapping[int, float]) -> None:
        known = self._spent.setdefault(name, {})
        if pid not in known:
            self._started(name, pid)
        known[pid] = seconds.get(pid, known.get(pid, 0.0))

    def _sum(self) -> dict[str, float]:
        return {name: sum(spent.values()) for name, spent in self._spent.items()}


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


def share_checking(cpu_s: Mapping[str, float], liars: Collection[str] = ()) -> float | None:
    """CPU of the validators that check, over that of all that generate; None where it was not measured."""
    checking = sum(spent for name, spent in cpu_s.items() if name.startswith(VALIDATORS) and name not in liars)
    generating = sum(spent for name, spent in cpu_s.items() if name.startswith(GENERATORS))
    return checking / generating if generating else None


def add_costs(path: Path, cpu_s: Mapping[str, float]) -> None:
    """Add what the parts took since they were started to what is kept of the starts before."""
    before = read_costs(path)
    total = before | {name: before.get(name, 0.0) + spent for name, spent in cpu_s.items()}
    write_atomic(path, json.dumps({name: round(spent, 2) for name, spent in total.items()}).encode())


def read_costs(path: Path) -> dict[str, float]:
    """CPU seconds of each part, all starts together; nothing if none were counted."""
    if not path.exists():
        return {}
    return {str(name): float(spent) for name, spent in json.loads(path.read_bytes()).items()}
