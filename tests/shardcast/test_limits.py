import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.shardcast.limits import (
    BURST_S,
    MAX_QUANTUM,
    MIN_QUANTUM,
    QUANTUM_S,
    Bucket,
    PeerTable,
    Phase,
    RateGuard,
    Roster,
    ServeLimits,
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
    """Greedy senders that wake `late_s` after they should: when which of their quanta went out, and whose it was."""
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
    clock.now += 5.0  # an idle time must not be saved up
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


def test_what_was_taken_before_the_first_wait_is_no_merit() -> None:
    guard = RateGuard(1000, 10.0)
    guard.begin_wait(10**9)
    assert not guard.end_wait(10.0, 10**9 + 5)


def test_each_window_is_judged_by_itself() -> None:
    guard = RateGuard(1000, 10.0)
    guard.begin_wait(0)
    assert guard.end_wait(10.0, 10**9)
    guard.begin_wait(10**9)
    assert not guard.end_wait(10.0, 10**9)


def test_who_never_asked_gives_way_first_then_the_idle_then_the_waiting_and_the_busy_never() -> None:
    roster: Roster[str] = Roster()
    for name, phase in (("busy", Phase.BUSY), ("parked", Phase.PARKED), ("idle", Phase.IDLE), ("fresh", Phase.FRESH)):
        roster.put_member(name, phase)
    order = []
    while (victim := roster.find_victim()) is not None:
        order.append(victim)
        roster.remove_member(victim)
    assert order == ["fresh", "idle", "parked"]
    assert len(roster) == 1 and roster.has_member("busy", Phase.BUSY)


def test_of_one_phase_the_one_longest_in_it_gives_way() -> None:
    roster: Roster[str] = Roster()
    for name in ("a", "b", "c"):
        roster.put_member(name, Phase.IDLE)
    roster.put_member("a", Phase.BUSY)
    roster.put_member("a", Phase.IDLE)
    assert roster.find_victim() == "b"
    assert len(roster) == 3


def test_removing_a_member_twice_is_harmless() -> None:
    roster: Roster[str] = Roster()
    roster.put_member("a", Phase.FRESH)
    roster.remove_member("a")
    roster.remove_member("a")
    assert len(roster) == 0 and roster.find_victim() is None


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
    table: PeerTable[str] = PeerTable(ServeLimits(peer_rate=1 << 20), clock)
    bucket = table.find_peer("192.0.2.1").bucket
    assert bucket is not None
    bucket.reserve_bytes(10 << 20)
    table.find_peer("192.0.2.2")
    assert table.find_peer("192.0.2.1").bucket is bucket
    clock.now += 11.0
    table.find_peer("192.0.2.3")
    assert table.find_peer("192.0.2.1").bucket is not bucket


def test_the_table_does_not_grow_with_the_addresses_seen() -> None:
    table: PeerTable[str] = PeerTable(ServeLimits(peer_rate=1 << 20), Clock())
    for number in range(1000):
        peer = table.find_peer(f"10.0.{number // 250}.{number % 250}")
        peer.roster.put_member("c", Phase.BUSY)
        peer.roster.remove_member("c")
    assert len(table) == 1
    assert table.list_peers() == []


def test_this_machine_has_no_limits_of_its_own_unless_the_setting_says_so() -> None:
    trusting: PeerTable[str] = PeerTable(ServeLimits(peer_rate=1 << 20), Clock())
    assert trusting.find_peer("127.0.0.1").is_trusted and trusting.find_peer("127.0.0.1").bucket is None
    assert not trusting.find_peer("192.0.2.1").is_trusted
    wary: PeerTable[str] = PeerTable(ServeLimits(peer_rate=1 << 20, trust_loopback=False), Clock())
    assert not wary.find_peer("127.0.0.1").is_trusted and wary.find_peer("127.0.0.1").bucket is not None
