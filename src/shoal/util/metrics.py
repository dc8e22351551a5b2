"""Prometheus metrics of a server, through prometheus-client; each server has its own registry.

Invariants:
- names and label values are fixed: nothing that a peer sends becomes a label, so memory is bounded;
- a gauge is a function that is called at a scrape, never a second copy of state.
"""

import math
from collections.abc import Callable

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, generate_latest

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WINDOW_S = 5
"""seconds over which a rate is averaged"""

prometheus_client.disable_created_metrics()  # an unused extra time series per counter


class Counter(prometheus_client.Counter):
    """A counter that its own server can read, for its status line."""

    @property
    def total(self) -> int:
        """The sum over all label values."""
        return sum(self.values.values())

    @property
    def values(self) -> dict[str, int]:
        """Counts by label value; by "" without labels."""
        samples = [sample for family in self.collect() for sample in family.samples]
        return {"".join(sample.labels.values()): int(sample.value) for sample in samples}


def add_gauge(registry: CollectorRegistry, name: str, text: str, read: Callable[[], float | None]) -> None:
    """Declare a gauge by the function that reads it; None means no value (NaN)."""

    def read_number() -> float:
        value = read()
        return math.nan if value is None else value

    Gauge(name, text, registry=registry).set_function(read_number)


def render_metrics(registry: CollectorRegistry) -> bytes:
    """The body of /metrics, of type `METRICS_TYPE`."""
    return generate_latest(registry)


class RateWindow:
    """Bytes per second over the last few seconds, from one count per second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start_s = clock()
        self._sums: dict[int, int] = {}

    def add_bytes(self, size: int) -> None:
        """Count bytes now."""
        second = int(self._clock())
        if second not in self._sums:
            self._sums = {key: value for key, value in self._sums.items() if key >= second - WINDOW_S}
        self._sums[second] = self._sums.get(second, 0) + size

    @property
    def rate(self) -> float:
        """Bytes per second over the last `WINDOW_S` full seconds and the current one."""
        now = self._clock()
        first = int(now) - WINDOW_S
        size = sum(value for key, value in self._sums.items() if key >= first)
        return size / max(1.0, now - max(first, self._start_s))


class ServerMetrics:
    """Connection metrics of every HTTP server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter("shoal_requests_total", "Requests answered, by status.", ["status"], registry=registry)
        self.accepted = Counter("shoal_accepted_total", "Connections accepted.", registry=registry)
        self.evicted = Counter("shoal_evicted_total", "Idle connections closed for newer ones.", registry=registry)
        self.refused = Counter("shoal_refused_total", "Connections refused, by reason.", ["reason"], registry=registry)
        self.cut = Counter("shoal_cut_total", "Connections ended early, by reason.", ["reason"], registry=registry)


class ServeMetrics(ServerMetrics):
    """Additional metrics of a SHARDCAST server."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        super().__init__(registry)
        self.sent = Counter("shoal_sent_bytes_total", "Bytes sent, heads included.", registry=registry)
        self.transfers = 0
        self.window = RateWindow(clock)
        add_gauge(registry, "shoal_transfers", "Shards being sent now.", lambda: self.transfers)
        rate = "shoal_sent_bytes_per_second"
        add_gauge(registry, rate, "Rate of the last seconds.", lambda: round(self.window.rate))

    def add_sent(self, size: int) -> None:
        """Count bytes handed to the kernel."""
        self.sent.inc(size)
        self.window.add_bytes(size)
