import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.net.limits import (
    BURST_S,
    MAX_QUANTUM,
    MIN_QUANTUM,
    QUANTUM_S,
    AddressTable,
    Bucket,
    ConnectionTable,
    Phase,
    RateGuard,
    name_peer,
)

LINK = 25_000_000  # bytes a second: 200 Mbit/s


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def send_for(
    bucket: Bucket, clock: Clock, seconds: float, senders: int, late_s: float = 0.0
) -> list[tuple[float, int]]:
    """Greedy senders that wake `late_s` too late: the time and sender of each quantum."""
    end = clock.now + seconds
    queue = [(clock.now, sender) for sender in range(senders)]
    sent = []
    while queue:
        clock.now, sender = heapq.heappop(queue)
        if clock.now >= end:
            continue
        delay = bucket.reserve_bytes(bucket.quantum)
        wake = clock.now + delay + (late_s if delay else 0.0)
        sent.append((wake, sender))
        heapq.heappush(queue, (wake, sender))
    return [item for item in sorted(sent) if item[0] < end]


@pytest.mark.parametrize("senders", [1, 2, 7, 50])
@pytest.mark.parametrize("late_s", [0.0, 0.001, 0.01])
def test_senders_together_get_the_rate_within_a_percent(senders: int, late_s: float) -> None:
    clock = Clock()
    bucket = Bucket(LINK, clock)
    sent = send_for(bucket, clock, 10.0, senders, late_s)
    assert len(sent) * bucket.quantum == pytest.approx(10.0 * LINK, rel=0.01)


def test_no_stretch_of_time_has_more_than_twenty_milliseconds_ahead_of_the_rate() -> None:
    clock = Clock()
    bucket = Bucket(LINK, clock)
    times = [at for at, _ in send_for(bucket, clock, 1.0, 4)]
    clock.now += 5.0  # idle time must not accumulate
    times += [at for at, _ in send_for(bucket, clock, 1.0, 4)]
    for first, start in enumerate(times):
        for last in range(first, min(first + 50, len(times))):
            size = (last - first + 1) * bucket.quantum
            assert size <= LINK * (times[last] - start + BURST_S + QUANTUM_S) * 1.0001


def test_senders_share_evenly() -> None:
    clock = Clock()
    sent = send_for(Bucket(LINK, clock), clock, 2.0, 5)
    counts = [sum(1 for _, sender in sent if sender == one) for one in range(5)]
    assert max(counts) - min(counts) <= 4


def test_the_first_bytes_after_a_pause_go_at_once() -> None:
    clock = Clock()
    bucket = Bucket(LINK, clock)
    assert bucket.reserve_bytes(1000) == 0.0
    while bucket.reserve_bytes(bucket.quantum) == 0.0:
        pass
    clock.now += 1.0
    assert bucket.reserve_bytes(1000) == 0.0


@given(rate=st.integers(1 << 16, 10**12))
def test_a_quantum_is_neither_tiny_nor_longer_than_the_loop_may_wait(rate: int) -> None:
    quantum = Bucket(rate, lambda: 0.0).quantum
    assert MIN_QUANTUM <= quantum <= MAX_QUANTUM
    assert quantum <= max(MIN_QUANTUM, rate * QUANTUM_S)


def test_a_reader_that_takes_nothing_is_found_after_one_window() -> None:
    guard = RateGuard(1000, 10.0)
    guard.begin_wait(5_000_000)
    assert guard.end_wait(9.0, 5_000_000)
    assert guard.left_s == 1.0
    guard.begin_wait(5_000_000)
    assert not guard.end_wait(1.0, 5_000_000)


def test_a_reader_just_above_the_rate_is_kept_and_one_just_below_is_not() -> None:
    for rate, kept in ((1000, True), (999, False)):
        guard = RateGuard(1000, 10.0)
        acked, verdicts = 0, []
        for _ in range(30):
            guard.begin_wait(acked)
            acked += rate
            verdicts.append(guard.end_wait(1.0, acked))
        assert all(verdicts) == kept


def test_bytes_before_the_first_wait_do_not_count() -> None:
    guard = RateGuard(1000, 10.0)
    guard.begin_wait(10**9)
    assert not guard.end_wait(10.0, 10**9 + 5)


def test_each_window_is_judged_by_itself() -> None:
    guard = RateGuard(1000, 10.0)
    guard.begin_wait(0)
    assert guard.end_wait(10.0, 10**9)
    guard.begin_wait(10**9)
    assert not guard.end_wait(10.0, 10**9)


def test_fresh_connections_are_evicted_first_then_idle_then_waiting_and_busy_never() -> None:
    table = ConnectionTable()
    for phase in reversed(Phase):
        table.put_member(phase.name.lower(), phase)
    order = []
    while (victim := table.find_evictable()) is not None:
        order.append(victim)
        table.remove_member(victim)
    assert order == ["fresh", "idle", "parked", "unverified", "known"]
    assert len(table) == 1 and table.has_member("busy", Phase.BUSY)


def test_within_a_phase_the_oldest_is_evicted() -> None:
    table = ConnectionTable()
    for name in ("a", "b", "c"):
        table.put_member(name, Phase.IDLE)
    table.put_member("a", Phase.BUSY)
    table.put_member("a", Phase.IDLE)
    assert table.find_evictable() == "b"
    assert len(table) == 3


def test_removing_a_member_twice_is_harmless() -> None:
    table = ConnectionTable()
    table.put_member("a", Phase.FRESH)
    table.remove_member("a")
    table.remove_member("a")
    assert len(table) == 0 and table.find_evictable() is None


@pytest.mark.parametrize(
    ("address", "name", "is_loopback"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.9.9.9", "127.9.9.9", True),
        ("192.0.2.7", "192.0.2.7", False),
        ("::ffff:192.0.2.7", "192.0.2.7", False),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
        ("::1", "::1", True),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64", False),
        ("fe80::1%eth0", "fe80::/64", False),
    ],
)
def test_what_counts_as_one_peer(address: str, name: str, is_loopback: bool) -> None:
    assert name_peer(address) == (name, is_loopback)


def test_a_peer_that_comes_back_still_owes_what_it_owed() -> None:
    clock = Clock()
    table = AddressTable(clock, trust_loopback=True, peer_rate=1 << 20)
    usage = table.find("192.0.2.1")
    bucket = usage.bucket
    assert bucket is not None
    bucket.reserve_bytes(10 << 20)
    table.release(usage)
    table.find("192.0.2.2")
    assert table.find("192.0.2.1").bucket is bucket
    clock.now += 11.0
    table.find("192.0.2.3")
    assert table.find("192.0.2.1").bucket is not bucket


def test_the_table_does_not_grow_with_the_addresses_seen() -> None:
    table = AddressTable(Clock(), trust_loopback=True, peer_rate=1 << 20)
    for number in range(1000):
        peer = table.find(f"10.0.{number // 250}.{number % 250}")
        peer.connections.put_member("c", Phase.BUSY)
        peer.connections.remove_member("c")
        table.release(peer)
    assert len(table) == 0
    assert table.list_connected() == []


def test_this_machine_has_no_limits_of_its_own_unless_the_setting_says_so() -> None:
    trusting = AddressTable(Clock(), trust_loopback=True, peer_rate=1 << 20)
    assert trusting.find("127.0.0.1").is_trusted and trusting.find("127.0.0.1").bucket is None
    assert not trusting.find("192.0.2.1").is_trusted
    wary = AddressTable(Clock(), trust_loopback=False, peer_rate=1 << 20)
    assert not wary.find("127.0.0.1").is_trusted and wary.find("127.0.0.1").bucket is not None
