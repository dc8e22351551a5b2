"""Metrics in the Prometheus text format."""

import pytest
from prometheus_client import CollectorRegistry

from shoal.util.metrics import Counter, RateWindow, ServeMetrics, add_gauge, render_metrics


def test_counters_and_gauges_are_written_as_prometheus_reads_them() -> None:
    registry = CollectorRegistry()
    requests = Counter("shoal_requests_total", "Requests.", ["status"], registry=registry)
    Counter("shoal_plain_total", "Plain.", registry=registry)
    add_gauge(registry, "shoal_open", "Open.", lambda: 3)
    requests.labels("200").inc(2)
    requests.labels("404").inc()
    assert (requests.values, requests.total) == ({"200": 2, "404": 1}, 3)
    assert render_metrics(registry).decode() == (
        "# HELP shoal_requests_total Requests.\n"
        "# TYPE shoal_requests_total counter\n"
        'shoal_requests_total{status="200"} 2.0\n'
        'shoal_requests_total{status="404"} 1.0\n'
        "# HELP shoal_plain_total Plain.\n"
        "# TYPE shoal_plain_total counter\n"
        "shoal_plain_total 0.0\n"
        "# HELP shoal_open Open.\n"
        "# TYPE shoal_open gauge\n"
        "shoal_open 3.0\n"
    )


def test_a_gauge_without_a_value_is_no_number() -> None:
    registry = CollectorRegistry()
    add_gauge(registry, "shoal_newest", "Newest.", lambda: None)
    assert render_metrics(registry).decode().splitlines()[-1] == "shoal_newest NaN"


def test_a_name_cannot_be_declared_twice() -> None:
    registry = CollectorRegistry()
    Counter("shoal_x_total", "X.", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        add_gauge(registry, "shoal_x_total", "X.", lambda: 0)


def test_the_rate_is_that_of_the_last_seconds() -> None:
    now = 100.0
    window = RateWindow(lambda: now)
    for second in range(60):
        now = 100.0 + second
        window.add_bytes(1000 if second < 30 else 500)
    now = 160.0
    assert window.rate == 500
    now = 300.0
    assert window.rate == 0


def test_a_rate_of_the_first_moment_is_not_blown_up() -> None:
    now = 100.0
    window = RateWindow(lambda: now)
    window.add_bytes(1000)
    assert window.rate == 1000
    now = 102.0
    assert window.rate == 500


def test_old_seconds_are_forgotten() -> None:
    now = 0.0
    window = RateWindow(lambda: now)
    for second in range(1000):
        now = float(second)
        window.add_bytes(1)
    assert len(window._sums) < 10


def test_sent_bytes_show_in_counter_and_rate() -> None:
    registry = CollectorRegistry()
    metrics = ServeMetrics(registry, lambda: 10.0)
    metrics.add_sent(4096)
    text = render_metrics(registry).decode()
    assert "shoal_sent_bytes_total 4096.0\n" in text
    assert "shoal_sent_bytes_per_second 4096.0\n" in text
