import pytest

from shoal.shardcast.metrics import MAX_LABELS, OTHER, RateWindow, Registry, ServeMetrics


def test_counters_and_gauges_are_written_as_prometheus_reads_them() -> None:
    registry = Registry()
    requests = registry.add_counter("shoal_requests_total", "Requests.", "status")
    registry.add_counter("shoal_plain_total", "Plain.")
    registry.add_gauge("shoal_open", "Open.", lambda: 3)
    requests.add(label="404")
    requests.add(2, label="200")
    assert registry.render_text().decode() == (
        "# HELP shoal_requests_total Requests.\n"
        "# TYPE shoal_requests_total counter\n"
        'shoal_requests_total{status="200"} 2\n'
        'shoal_requests_total{status="404"} 1\n'
        "# HELP shoal_plain_total Plain.\n"
        "# TYPE shoal_plain_total counter\n"
        "shoal_plain_total 0\n"
        "# HELP shoal_open Open.\n"
        "# TYPE shoal_open gauge\n"
        "shoal_open 3\n"
    )


def test_a_gauge_without_a_value_has_no_sample() -> None:
    registry = Registry()
    registry.add_gauge("shoal_newest", "Newest.", lambda: None)
    assert registry.render_text().decode().splitlines()[1:] == ["# TYPE shoal_newest gauge"]


def test_a_counter_keeps_a_bounded_number_of_labels_and_loses_no_count() -> None:
    counter = Registry().add_counter("shoal_x_total", "X.", "kind")
    for number in range(10 * MAX_LABELS):
        counter.add(label=str(number))
    assert len(counter.values) == MAX_LABELS + 1
    assert counter.values[OTHER] == 9 * MAX_LABELS
    assert counter.total == 10 * MAX_LABELS


def test_a_name_cannot_be_declared_twice() -> None:
    registry = Registry()
    registry.add_counter("shoal_x_total", "X.")
    with pytest.raises(AssertionError, match="twice"):
        registry.add_gauge("shoal_x_total", "X.", lambda: 0)


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
    registry = Registry()
    metrics = ServeMetrics(registry, lambda: 10.0)
    metrics.add_sent(4096)
    text = registry.render_text().decode()
    assert "shoal_sent_bytes_total 4096\n" in text
    assert "shoal_sent_bytes_per_second 4096\n" in text
