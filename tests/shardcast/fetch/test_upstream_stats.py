import random

import pytest

from shoal.errors import ConfigError
from shoal.shardcast.fetch.upstream_stats import BAN_S, COOL_S, FLOOR, WRONG_LIMIT, UpstreamTable

DIGEST = "ab" * 32
OTHER = "cd" * 32


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def build_book(*rates: float | None, heal: float = 0.0, clock: FakeClock | None = None) -> UpstreamTable:
    urls = [f"http://127.0.0.1:{9000 + number}" for number in range(len(rates))]
    table = UpstreamTable(urls, clock=clock or FakeClock(), heal=heal)
    for source, rate in zip(table.all, rates, strict=True):
        source.announced.add(DIGEST)
        if rate is not None:
            table.record_success(source, int(rate), 1.0)
    return table


def count_draws(table: UpstreamTable, number: int, seed: int = 7) -> list[int]:
    rng = random.Random(seed)
    counts = dict.fromkeys(table.all, 0)
    for _ in range(number):
        drawn = table.draw(rng, DIGEST)
        assert drawn is not None
        counts[drawn] += 1
    return list(counts.values())


def chi_square(counts: list[int], shares: list[float]) -> float:
    total = sum(counts)
    return sum((count - total * share) ** 2 / (total * share) for count, share in zip(counts, shares, strict=True))


def test_draws_are_proportional_to_rate() -> None:
    counts = count_draws(build_book(8e6, 4e6, 2e6, 2e6), 8000)
    # 16.3: the 99.9 % point for three degrees of freedom.
    assert chi_square(counts, [0.5, 0.25, 0.125, 0.125]) < 16.3


def test_draws_are_proportional_to_success_too() -> None:
    table = build_book(1e6, 1e6)
    table.all[1].success = 0.25
    table.record_success(table.all[1], 10**6, 1.0)
    success = 0.25 + 0.3 * 0.75
    assert table.all[1].success == pytest.approx(success)
    counts = count_draws(table, 6000)
    # 10.8: the 99.9 % point for one degree of freedom.
    assert chi_square(counts, [1 / (1 + success), success / (1 + success)]) < 10.8


def test_rate_is_a_moving_average() -> None:
    table = build_book(1e6)
    table.record_success(table.all[0], 2_000_000, 1.0)
    assert table.all[0].rate == pytest.approx(1.3e6)


def test_an_unknown_source_is_drawn_like_the_mean_of_the_known() -> None:
    table = build_book(1e6, 3e6, None)
    weights = list(table.weigh_all().values())
    assert weights == pytest.approx([1e6, 3e6, 2e6])


def test_small_answers_do_not_count_as_a_rate() -> None:
    table = build_book(1e6)
    table.record_success(table.all[0], 100, 1.0)
    assert table.all[0].rate == pytest.approx(1e6)


def test_a_source_not_drawn_heals_towards_the_mean_and_falls_back_when_measured() -> None:
    table = build_book(1e8, 1e5, heal=0.02)
    fast, slow = table.all
    rng = random.Random(1)
    before = slow.weight
    for _ in range(30):
        if table.draw(rng, DIGEST) is slow:
            break
    assert before is not None and slow.weight is not None and slow.weight > 30 * before
    assert fast.weight == pytest.approx(1e8)
    table.record_success(slow, 10**6, 10.0)
    assert slow.weight == pytest.approx(1e5)


def test_one_healing_step_is_two_percent_of_the_way() -> None:
    table = build_book(3e6, 1e6, heal=0.02)
    fast, slow = table.all
    slow.cool_until = 1e9
    table.draw(random.Random(0), DIGEST)
    assert slow.weight == pytest.approx(1e6 + 0.02 * (2e6 - 1e6))
    assert fast.weight == pytest.approx(3e6)


def test_no_weight_is_ever_zero() -> None:
    table = build_book(1e9, 1e5)
    for _ in range(200):
        table.record_failure(table.all[1], "down")
    assert table.weigh_all()[table.all[1]] == pytest.approx(FLOOR * 1e9)


def test_when_all_sources_failed_from_the_start_they_are_still_drawn() -> None:
    clock = FakeClock()
    table = build_book(None, None, clock=clock)
    for source in table.all:
        for _ in range(3000):
            table.record_failure(source, "down")
    clock.now += COOL_S[1]
    assert min(count_draws(table, 200)) > 50


def test_failures_in_a_row_double_the_pause_up_to_a_bound() -> None:
    clock = FakeClock()
    table = build_book(1e6, clock=clock)
    source = table.all[0]
    pauses = []
    for _ in range(9):
        table.record_failure(source, "down")
        pauses.append(source.cool_until - clock.now)
        assert table.draw(random.Random(0), DIGEST) is None
        assert table.find_pause(DIGEST) == pytest.approx(pauses[-1])
        clock.now = source.cool_until
        assert table.draw(random.Random(0), DIGEST) is source
    assert pauses == pytest.approx([0.25, 0.5, 1, 2, 4, 8, 15, 15, 15])
    table.record_success(source, 10**6, 1.0)
    table.record_failure(source, "down")
    assert source.cool_until - clock.now == pytest.approx(0.25)


def test_requests_that_died_together_cool_once() -> None:
    table = build_book(1e6)
    source = table.all[0]
    for _ in range(8):
        table.record_failure(source, "connection reset")
    assert source.cool_until == pytest.approx(100.25)
    assert source.counts.failures == 8


def test_a_server_that_asks_for_a_pause_gets_it_but_no_longer_than_the_bound() -> None:
    table = build_book(1e6)
    table.record_failure(table.all[0], "busy", pause=3.0)
    assert table.find_pause(DIGEST) == pytest.approx(3.0)
    table.record_failure(table.all[0], "busy", pause=1e9)
    assert table.find_pause(DIGEST) == pytest.approx(COOL_S[1])


def test_wrong_bytes_ban_for_that_version_and_the_ban_ends() -> None:
    clock = FakeClock()
    table = build_book(1e6, 1e6, clock=clock)
    liar, honest = table.all
    liar.announced.add(OTHER)
    table.record_wrong(liar, DIGEST, "wrong hash")
    clock.now += COOL_S[1] / 10
    assert table.list_ready(DIGEST) == [honest]
    assert table.list_ready(OTHER) == [liar]
    clock.now += BAN_S[0]
    assert liar in table.list_ready(DIGEST)


def test_a_source_that_cannot_give_one_version_now_is_asked_for_others() -> None:
    clock = FakeClock()
    table = build_book(1e6, clock=clock)
    (source,) = table.all
    source.announced.add(OTHER)
    for _ in range(20):
        table.record_busy(source, DIGEST, "responded with status 503", 1.0)
    assert table.draw(random.Random(1), DIGEST) is None and table.find_pause(DIGEST) == 1.0
    assert table.draw(random.Random(1), OTHER) is source
    clock.now += 1.001
    assert table.draw(random.Random(1), DIGEST) is source
    table.record_busy(source, DIGEST, "responded with status 503", 1e9)
    assert table.find_pause(DIGEST) == COOL_S[1]


def test_a_list_that_was_read_ends_a_row_of_failures() -> None:
    clock = FakeClock()
    table = build_book(1e6, clock=clock)
    (source,) = table.all
    for _ in range(8):
        clock.now += 100
        table.record_failure(source, "no connection")
    clock.now += 100
    table.record_list(source)
    table.record_failure(source, "no connection")
    assert source.listed and table.find_pause(DIGEST) == COOL_S[0]


def test_three_wrong_shards_ban_for_every_version_for_longer() -> None:
    clock = FakeClock()
    table = build_book(1e6, 1e6, clock=clock)
    liar = table.all[0]
    liar.announced.add(OTHER)
    for _ in range(WRONG_LIMIT):
        table.record_wrong(liar, DIGEST, "wrong hash")
    clock.now += 2 * BAN_S[0]
    assert table.list_ready(OTHER) == []
    clock.now += 4 * BAN_S[0]
    assert table.list_ready(OTHER) == [liar]
    for _ in range(20):
        table.record_wrong(liar, DIGEST, "wrong hash")
    assert table.find_pause(OTHER) == pytest.approx(BAN_S[1])


def test_only_holders_are_drawn_and_without_any_there_is_nothing_to_wait_for() -> None:
    table = build_book(1e6, 1e9)
    table.all[1].announced.clear()
    assert count_draws(table, 50) == [50, 0]
    table.all[0].announced.clear()
    assert table.draw(random.Random(0), DIGEST) is None
    assert table.find_pause(DIGEST) is None


def test_avoided_sources_are_drawn_only_if_there_is_no_other() -> None:
    table = build_book(1e9, 1.0, None)
    rng = random.Random(3)
    first, second, third = table.all
    assert {table.draw(rng, DIGEST, avoid=[first, third]) for _ in range(20)} == {second}
    assert table.draw(rng, DIGEST, avoid=table.all) in table.all


def test_the_same_address_twice_is_one_source() -> None:
    table = UpstreamTable(["http://127.0.0.1:80/", "http://127.0.0.1:80"])
    assert len(table.all) == 1


def test_no_source_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        UpstreamTable([])


def test_an_address_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ConfigError, match="ftp"):
        UpstreamTable(["http://127.0.0.1:80", "ftp://relay.example"])


def test_a_busy_source_is_drawn_less_often() -> None:
    table = build_book(4e6, 4e6)
    table.all[0].busy = 3
    # 10.8: the 99.9 % point for one degree of freedom.
    assert chi_square(count_draws(table, 4000), [0.2, 0.8]) < 10.8


def test_the_rate_of_a_source_is_that_of_all_requests_under_way() -> None:
    """Four requests share a link of 8 MB/s: each gets a quarter, and the source is as fast as it was alone."""
    table = build_book(8e6, 8e6)
    shared = table.all[0]
    shared.busy = 3
    for _ in range(20):
        table.record_success(shared, 2_000_000, 1.0)
    assert shared.rate == pytest.approx(8e6, rel=0.01)
