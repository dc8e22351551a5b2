"""Counters and gauges in the text format that Prometheus reads.

Invariants:
- names and labels are ours: nothing a peer sends becomes a label, and a counter keeps at most `MAX_LABELS` of them, so
  memory stays flat whatever arrives;
- a gauge is a function read when somebody asks, never a second copy of state.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_LABELS = 64
WINDOW_S = 5
"""seconds over which a rate is averaged"""
OTHER = "other"
"""label that takes what comes when a counter has all the labels it may have"""
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass
class Counter:
    """A number that only grows, split by one label or not at all."""

    name: str
    text: str
    label: str | None = None
    values: dict[str, int] = field(default_factory=dict)

    def add(self, amount: int = 1, label: str = "") -> None:
        """Count `amount`, under the label if this counter has one."""
        assert amount >= 0 and bool(label) == (self.label is not None), "a counter grows, with the label it declared"
        if label not in self.values and len(self.values) >= MAX_LABELS:
            label = OTHER
        self.values[label] = self.values.get(label, 0) + amount

    @property
    def total(self) -> int:
        """The sum over all labels."""
        return sum(self.values.values())

    def list_lines(self) -> list[str]:
        """The counter as Prometheus reads it."""
        if self.label is None:
            samples = [f"{self.name} {self.total}"]
        else:
            samples = [f'{self.name}{{{self.label}="{key}"}} {count}' for key, count in sorted(self.values.items())]
        return [f"# HELP {self.name} {self.text}", f"# TYPE {self.name} counter", *samples]


@dataclass(frozen=True)
class Gauge:
    """A number that goes up and down; `read` says what it is now, None that there is none."""

    name: str
    text: str
    read: Callable[[], float | None]

    def list_lines(self) -> list[str]:
        """The gauge as Prometheus reads it."""
        value = self.read()
        samples = [] if value is None else [f"{self.name} {value}"]
        return [f"# HELP {self.name} {self.text}", f"# TYPE {self.name} gauge", *samples]


class Registry:
    """All numbers of one process, in the order they were declared."""

    def __init__(self) -> None:
        self._parts: dict[str, Counter | Gauge] = {}

    def add_counter(self, name: str, text: str, label: str | None = None) -> Counter:
        """Declare a counter; by custom its name ends in _total."""
        counter = Counter(name, text, label)
        self._add_part(counter)
        return counter

    def add_gauge(self, name: str, text: str, read: Callable[[], float | None]) -> None:
        """Declare a gauge and how it is read."""
        self._add_part(Gauge(name, text, read))

    def render_text(self) -> bytes:
        """What /metrics answers."""
        lines = [line for part in self._parts.values() for line in part.list_lines()]
        return "".join(f"{line}\n" for line in lines).encode("ascii")

    def _add_part(self, part: Counter | Gauge) -> None:
        assert part.name not in self._parts, f"{part.name} is declared twice"
        assert _NAME.fullmatch(part.name) and "\n" not in part.text, f"{part.name}: no name or text for Prometheus"
        self._parts[part.name] = part


class RateWindow:
    """Bytes a second over the last few seconds, from one number per second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start_s = clock()
        self._sums: dict[int, int] = {}

    def add_bytes(self, size: int) -> None:
        """Count bytes of this moment."""
        second = int(self._clock())
        if second not in self._sums:
            self._sums = {key: value for key, value in self._sums.items() if key >= second - WINDOW_S}
        self._sums[second] = self._sums.get(second, 0) + size

    @property
    def rate(self) -> float:
        """Bytes a second over the last `WINDOW_S` whole seconds and the present one."""
        now = self._clock()
        first = int(now) - WINDOW_S
        size = sum(value for key, value in self._sums.items() if key >= first)
        return size / max(1.0, now - max(first, self._start_s))


class ServeMetrics:
    """What a server counts about itself."""

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self.requests = registry.add_counter("shoal_requests_total", "Requests answered, by status.", "status")
        self.sent = registry.add_counter("shoal_sent_bytes_total", "Bytes sent, heads included.")
        self.accepted = registry.add_counter("shoal_accepted_total", "Connections accepted.")
        self.evicted = registry.add_counter("shoal_evicted_total", "Idle connections closed for newer ones.")
        self.refused = registry.add_counter("shoal_refused_total", "Connections refused, by reason.", "reason")
        self.cut = registry.add_counter("shoal_cut_total", "Connections ended early, by reason.", "reason")
        self.transfers = 0
        self.window = RateWindow(clock)
        registry.add_gauge("shoal_transfers", "Shards being sent now.", lambda: self.transfers)
        registry.add_gauge("shoal_sent_bytes_per_second", "Rate of the last seconds.", lambda: round(self.window.rate))

    def add_sent(self, size: int) -> None:
        """Count bytes handed to the kernel."""
        self.sent.add(size)
        self.window.add_bytes(size)
