"""Cost of a swarm's processes: the CPU time of each from /proc, including children, and of the stages inside."""

import os
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from loop_probe.loop_stages import COUNTERS, NUM_DOUBLES, STAGES

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_STATS = 2
"""fields of /proc/PID/stat after the name, which may contain spaces"""


@dataclass(slots=True)
class Part:
    """One process that the launcher started, with its children."""

    cpu_s: float = 0.0
    child_s: float = 0.0
    """of its children, the file readers"""
    stages: Counter[str] = field(default_factory=Counter)
    """CPU seconds by stage"""
    calls: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    def subtract(self, other: "Part") -> "Part":
        """The difference since an earlier reading."""
        return Part(
            self.cpu_s - other.cpu_s,
            self.child_s - other.child_s,
            _subtract(self.stages, other.stages),
            _subtract(self.calls, other.calls),
            _subtract(self.counts, other.counts),
        )


Snapshot = dict[str, Part]


class Watch:
    """Observes the processes of one swarm. An ended process keeps its last reading."""

    def __init__(self, launcher: int, probes: Path) -> None:
        self._launcher, self._probes = launcher, probes
        self._parts: dict[int, tuple[str, Part]] = {}

    def look(self) -> Snapshot:
        """The CPU time of each part so far."""
        tree = _read_tree()
        own = tree.get(self._launcher)
        if own is not None:
            # without ended children, which are separate parts
            self._parts[self._launcher] = "launcher", self._read_part(self._launcher, own.cpu_s, 0.0)
        for pid, process in tree.items():
            if process.parent == self._launcher and (name := name_part(pid)):
                below = sum(tree[child].cpu_s + tree[child].ended_s for child in _list_below(tree, pid))
                self._parts[pid] = name, self._read_part(pid, process.cpu_s, below + process.ended_s)
        found: Snapshot = {}
        for name, part in self._parts.values():
            found[name] = part.subtract(_negate(found[name])) if name in found else part
        return found

    def _read_part(self, pid: int, cpu_s: float, child_s: float) -> Part:
        part, path = Part(cpu_s + child_s, child_s), self._probes / str(pid)
        if path.exists() and len(data := path.read_bytes()) == 8 * NUM_DOUBLES:
            values = struct.unpack(f"{NUM_DOUBLES}d", data)
            names = [stage.name for stage in STAGES]
            part.stages = Counter(dict(zip(names, values[: 2 * len(names) : 2], strict=True)))
            part.calls = Counter(dict(zip(names, values[1 : 2 * len(names) : 2], strict=True)))
            part.counts = Counter(dict(zip(COUNTERS, values[2 * len(names) :], strict=True)))
        return part


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    cpu_s: float
    ended_s: float
    """of ended children that were waited for"""


def _read_tree() -> dict[int, _Process]:
    found = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal():
            continue
        try:
            fields = (path / "stat").read_text().rpartition(")")[_STATS].split()
        except OSError:
            continue  # it has ended in the meantime
        user, system, ended_user, ended_system = (int(value) * _TICK_S for value in fields[11:15])
        found[int(path.name)] = _Process(int(fields[1]), user + system, ended_user + ended_system)
    return found


def _list_below(tree: dict[int, _Process], pid: int) -> Iterator[int]:
    for child, process in tree.items():
        if process.parent == pid:
            yield child
            yield from _list_below(tree, child)


def name_part(pid: int) -> str:
    """The name of a part, from its folder or its command; empty if it is not a part."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return ""
    if "shoal.launch.process" in words:
        return "nursery"
    if "shoal" not in words:
        return ""
    for flag in ("--folder", "--data"):
        if flag in words:
            return Path(words[words.index(flag) + 1]).name
    return words[words.index("shoal") + 1]


def _subtract(new: Counter[str], old: Counter[str]) -> Counter[str]:
    return Counter({name: new[name] - old[name] for name in new.keys() | old.keys()})


def _negate(part: Part) -> Part:
    return Part().subtract(part)
